"""The methods that the paper compares with: ZORB, dlADMM, LM-KARnet and ELM.

`fit_zorb` and `fit_dladmm` train a model; `zorb`, `dladmm`, `lm_karnet` and `elm` are arms for
`tpsgd.compare`.
"""

from tpsgd.comparison.closed_forms import elm, lm_karnet
from tpsgd_peers.arms import dladmm, zorb
from tpsgd_peers.dladmm import fit_dladmm
from tpsgd_peers.zorb import fit_zorb

__all__ = ["dladmm", "elm", "fit_dladmm", "fit_zorb", "lm_karnet", "zorb"]
