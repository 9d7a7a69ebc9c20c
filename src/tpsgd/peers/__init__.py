"""The methods that the paper compares with. Imports the engine and below."""

from tpsgd.peers.dladmm import fit_dladmm
from tpsgd.peers.zorb import fit_zorb

__all__ = ["fit_dladmm", "fit_zorb"]
