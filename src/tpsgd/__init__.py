"""Train neural networks without backpropagation: target-projection SGD and its relatives.

The public names and their homes are written once, in `__init__.pyi`. A name is loaded, and torch
with it, when it is first used, so that `tpsgd --help` need not wait. Other names are those of
plug-ins, which are looked for when one is used.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _homes() -> dict[str, str]:
    """Each public name with the module that it is imported from in the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return import_module("tpsgd.common.plugins").attribute(name)
    home = f"tpsgd.{_HOMES[name]}".removesuffix(".")
    if home != "tpsgd" and hasattr(module := import_module(home), name):
        return getattr(module, name)
    return import_module(f"{home}.{name}")


def __dir__() -> list[str]:
    plugins = import_module("tpsgd.common.plugins")
    return sorted({*globals(), *__all__, *plugins.names(plugins.ATTRIBUTES)})
