"""Adaptors: a few layers, trained without backpropagation, on the taps of a frozen backbone."""

from .adaptor import Adaptor, averaged, learned, summed
from .backbone import IMAGENET, Backbone
from .features import Features, encode
from .known import backbone
from .layers import Layers, Probe
from .saved import load
from .training import fit, probe

__all__ = [
    "IMAGENET",
    "Adaptor",
    "Backbone",
    "Features",
    "Layers",
    "Probe",
    "averaged",
    "backbone",
    "encode",
    "fit",
    "learned",
    "load",
    "probe",
    "summed",
]
