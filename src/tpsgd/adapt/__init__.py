"""Adaptors: a few layers, trained without backpropagation, on the taps of a frozen backbone.

`backbone` and `features` read the taps, `heads` and `adaptor` hold the layers, `fitting` trains
them. `search` and `trials` choose layers; `novelty`, `corruptions` and `recovery` are about new
domains; `figures` draws both; `weights`, `pretrained` and `quantize` make backbones. The package
imports the engine, the memory planner, the data sets and the model zoo, not `comparison`.
"""

from tpsgd.adapt import corruptions, novelty, quantize, weights
from tpsgd.adapt.adaptor import COMBINATIONS, Adaptor, averaged, learned, load, summed
from tpsgd.adapt.backbone import IMAGENET, Backbone
from tpsgd.adapt.features import Features, encode, hold_out, shots
from tpsgd.adapt.fitting import fit, probe
from tpsgd.adapt.heads import Layers, Probe
from tpsgd.adapt.pretrained import backbone
from tpsgd.adapt.recovery import Domain, recover
from tpsgd.adapt.search import Search, search
from tpsgd.adapt.trials import activation_overlap

__all__ = [
    "COMBINATIONS",
    "IMAGENET",
    "Adaptor",
    "Backbone",
    "Domain",
    "Features",
    "Layers",
    "Probe",
    "Search",
    "activation_overlap",
    "averaged",
    "backbone",
    "corruptions",
    "encode",
    "fit",
    "hold_out",
    "learned",
    "load",
    "novelty",
    "probe",
    "quantize",
    "recover",
    "search",
    "shots",
    "summed",
    "weights",
]
