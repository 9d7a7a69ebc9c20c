"""The methods that the paper compares with: ZORB, dlADMM, LM-KARnet and ELM.

`fit_zorb` and `fit_dladmm` train a model; `zorb`, `dladmm`, `lm_karnet` and `elm` are arms for
`tpsgd.compare`. Imports training and what is below it.
"""

from tpsgd.peers.arms import dladmm, elm, lm_karnet, zorb
from tpsgd.peers.dladmm import fit_dladmm
from tpsgd.peers.zorb import fit_zorb

__all__ = ["dladmm", "elm", "fit_dladmm", "fit_zorb", "lm_karnet", "zorb"]
