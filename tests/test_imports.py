"""Imports point one way, from the shells to the paper; those inside functions count too."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tpsgd

ROOT = Path(tpsgd.__file__).parent
PAPER = ["common", "maths", "losses", "targets", "projections", "objectives", "rules", "train"]
ORDER = [
    PAPER, ["nets"], ["saved"], ["engine"], ["memory"], ["features"], ["zoo", "data"],
    ["comparison"], ["cli", "__main__"],
]  # fmt: skip
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FOR_DATA = {"nets.padded", "saved.scaling", "data"}
SHELLS = ("data", "comparison", "cli")
PLAIN = {name for name in RANK if name not in SHELLS}

FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(ROOT.rglob("*.py"))
    if file.parent != ROOT or file.name != "__init__.py"
}


@cache
def imports(module: str) -> set[str]:
    """The modules of this library that a module imports anywhere, without `tpsgd.`."""
    targets = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relative to itself"
            home = {alias.name: str(node.module) for alias in node.names}
            if node.module == "tpsgd":  # a public name stands for the module that has it
                home = {name: f"tpsgd.{tpsgd._HOMES.get(name, '')}".rstrip(".") for name in home}
            names = {f"{module}.{name}": module for name, module in home.items()}
            targets |= {name if name[6:] in FILES else names[name] for name in names}
    return {name[6:] for name in targets if name.startswith("tpsgd.")}


@pytest.mark.parametrize("package", RANK)
def test_imports_follow_the_order_of_the_packages(package):
    for module in (m for m in FILES if m.partition(".")[0] == package):
        later = {name for name in imports(module) if RANK[name.partition(".")[0]] > RANK[package]}
        assert not later, f"{module} imports {later}"


def test_data_sets_know_nothing_of_training():
    for module in (m for m in FILES if m.partition(".")[0] == "data"):
        beyond = {name for name in imports(module) if name.split(".")[0] not in ("data", "common")}
        beyond -= FOR_DATA
        assert not beyond, f"{module} imports {beyond}"


def test_no_module_imports_itself_through_others():
    TopologicalSorter({module: imports(module) for module in FILES}).prepare()


def test_the_library_imports_no_plug_in():
    for module, file in FILES.items():
        names = re.findall(r"^ *(?:from|import) (tpsgd_\w+)", file.read_text(), re.MULTILINE)
        assert not names, f"{module} imports {names}"


def test_the_top_of_the_package_is_small():
    entries = {file.name for file in ROOT.iterdir()} - {"__pycache__"}
    assert len(entries) <= 22, sorted(entries)


def test_the_core_loads_torch_and_numpy_alone():
    known = {"tpsgd", "torch", "numpy", *sys.stdlib_module_names}
    for module in (m for m in FILES if m.partition(".")[0] in PLAIN):
        for node in ast.parse(FILES[module].read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= known, module


def test_a_class_name_is_used_once():
    homes: dict[str, str] = {}
    for module, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                before = homes.setdefault(node.name, module)
                assert before == module, f"{before} and {module} both have a class {node.name}"
