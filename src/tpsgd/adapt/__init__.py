"""Adaptors: a few layers, trained without backpropagation, on the taps of a frozen backbone."""

from . import lighter, novelty, shifts, weights
from .adaptor import Adaptor, averaged, learned, summed
from .backbone import IMAGENET, Backbone
from .features import Features, encode
from .found import Search
from .known import backbone
from .layers import Layers, Probe
from .saved import load
from .score import activation_overlap
from .search import search
from .studies import Space, study
from .training import fit, probe, tenth

__all__ = [
    "IMAGENET",
    "Adaptor",
    "Backbone",
    "Features",
    "Layers",
    "Probe",
    "Search",
    "Space",
    "activation_overlap",
    "averaged",
    "backbone",
    "encode",
    "fit",
    "learned",
    "lighter",
    "load",
    "novelty",
    "probe",
    "search",
    "shifts",
    "study",
    "summed",
    "tenth",
    "weights",
]
