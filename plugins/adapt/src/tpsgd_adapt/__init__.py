"""Adaptors: a few layers, trained without backpropagation, on the taps of a frozen backbone.

`backbone` and `features` read the taps, `heads` and `adaptor` hold the layers, `fitting` trains
them. `search` and `trials` choose layers by the engine of `comparison.trials`, `figures` draws the
choice; `novelty` says when a domain is new; `weights`, `pretrained` and `quantize` make backbones.
"""

from tpsgd_adapt import novelty, quantize, weights
from tpsgd_adapt.adaptor import COMBINATIONS, Adaptor, averaged, learned, load, summed
from tpsgd_adapt.backbone import IMAGENET, Backbone
from tpsgd_adapt.features import Features, encode, hold_out, shots
from tpsgd_adapt.fitting import fit, probe
from tpsgd_adapt.heads import Layers, Probe
from tpsgd_adapt.pretrained import backbone
from tpsgd_adapt.search import AdaptorSearch, search
from tpsgd_adapt.trials import activation_overlap

__all__ = [
    "COMBINATIONS",
    "IMAGENET",
    "Adaptor",
    "AdaptorSearch",
    "Backbone",
    "Features",
    "Layers",
    "Probe",
    "activation_overlap",
    "averaged",
    "backbone",
    "encode",
    "fit",
    "hold_out",
    "learned",
    "load",
    "novelty",
    "probe",
    "quantize",
    "search",
    "shots",
    "summed",
    "weights",
]
