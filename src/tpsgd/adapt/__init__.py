"""Adaptors: a few layers, trained without backpropagation, on the taps of a frozen backbone."""

from tpsgd.adapt import corruptions as shifts
from tpsgd.adapt import novelty, weights
from tpsgd.adapt import quantize as lighter
from tpsgd.adapt.adaptor import Adaptor, averaged, learned, summed
from tpsgd.adapt.backbone import IMAGENET, Backbone
from tpsgd.adapt.features import Features, encode
from tpsgd.adapt.files import load
from tpsgd.adapt.fitting import fit, hold_out, probe
from tpsgd.adapt.heads import Layers, Probe
from tpsgd.adapt.naswot import activation_overlap
from tpsgd.adapt.optuna_study import Space, study
from tpsgd.adapt.pretrained import backbone
from tpsgd.adapt.results import Search
from tpsgd.adapt.search import search

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
    "hold_out",
    "learned",
    "lighter",
    "load",
    "novelty",
    "probe",
    "search",
    "shifts",
    "study",
    "summed",
    "weights",
]
