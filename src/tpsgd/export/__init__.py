"""A training step that leaves Python: as C for a device, as a page that learns, as ONNX."""

from tpsgd.export.c_export import c
from tpsgd.export.exported import Exported
from tpsgd.export.records import read_weights

__all__ = ["Exported", "c", "read_weights"]
