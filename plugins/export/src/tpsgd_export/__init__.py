"""A training step that leaves Python: as C for a device, as a page that learns, as ONNX.

`recipe` has the step in plain numbers, `read_model` makes it of a torch model and a rule, and
refuses what cannot be exported. `to_c`, `to_page` and `to_onnx` write it; `records` brings weights
back. A name is loaded, and torch with it, when it is first used, so that `tpsgd --help`, which
imports `cli`, need not wait.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpsgd_export.exported import Exported
    from tpsgd_export.heads.export import one_pass
    from tpsgd_export.records import read_weights
    from tpsgd_export.to_c.export import c
    from tpsgd_export.to_onnx.export import onnx
    from tpsgd_export.to_page.page import page

__all__ = ["Exported", "c", "one_pass", "onnx", "page", "read_weights"]

_MODULES = {
    "Exported": "exported",
    "c": "to_c.export",
    "one_pass": "heads.export",
    "onnx": "to_onnx.export",
    "page": "to_page.page",
    "read_weights": "records",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tpsgd_export' has no attribute {name!r}")
    return getattr(import_module(f"tpsgd_export.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
