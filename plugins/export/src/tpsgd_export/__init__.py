"""A training step that leaves Python: as C for a device, as a page that learns, as ONNX.

`recipe` has the step in plain numbers, `read_model` makes it of a torch model and a rule, and
refuses what cannot be exported. `to_c`, `to_page` and `to_onnx` write it; `records` brings weights
back.
"""

from tpsgd_export.exported import Exported
from tpsgd_export.records import read_weights
from tpsgd_export.to_c.export import c
from tpsgd_export.to_onnx.export import onnx
from tpsgd_export.to_page.page import page

__all__ = ["Exported", "c", "onnx", "page", "read_weights"]
