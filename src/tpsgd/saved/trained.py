"""A trained model in a folder: its modules, its tensors, and the record of its training.

A model is described by its modules (`modules`). A model that a user's function makes is stored as
`FILE.py:FUNCTION` and the checksum of that file; loading it asks for the file.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd import __version__
from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.common.files import call_function, is_function, named_folder
from tpsgd.saved import folder as folders
from tpsgd.saved import modules
from tpsgd.saved.checkpoint import readable
from tpsgd.saved.folder import FolderFormat

MODEL = FolderFormat("model", 1)
CHANNELS_LAST = "channels-last"
LINKS = ("torch.nn.modules.activation", "torch.nn.modules.dropout")  # keep the number of outputs
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


def write(
    folder: str | Path,
    model: nn.Module,
    content: Mapping[str, Any],
    factory: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model, its `run`, `classes` and `inputs` into a folder; see `Run.save`."""
    path = check_free(folder, overwrite)
    classes = _class_names(content["classes"])
    if classes and "targets" in content["run"]["settings"]:
        raise TpsgdError("the model was trained on numbers: leave the names of classes out")
    check_classes(model, classes)
    description, tensors = describe(model, factory)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    description |= {**content, "classes": classes, "versions": versions | {"tpsgd": __version__}}
    return folders.write(MODEL, path, description, tensors)


def read(folder: str | Path, factory: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """A model, its `run`, `classes`, `inputs` and the `versions` that it was saved with.

    No code is run, except for the file of a `factory`.
    """
    path = named_folder(folder, "of a trained model")
    description, tensors = folders.read(MODEL, path)
    with readable(path, "model"):
        model = rebuild(path, description, tensors, factory)
        content = {key: dict(description[key]) for key in ("run", "inputs", "versions")}
        return model, content | {"classes": _class_names(description["classes"])}


def describe(
    model: nn.Module, factory: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A model in plain values, and its tensors by name."""
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.UninitializedParameter):
            raise TpsgdError(f"the model's state {name!r} is not a tensor: it cannot be saved")
        tensors[name] = tensor.detach()
    if factory is None:
        described = modules.describe(model)
    else:
        described = {"factory": factory, "sha256": _checksum(factory)}
    description = {
        "model": described,
        "tensors": {name: _form(tensor) for name, tensor in tensors.items()},
        "frozen": sorted(name for name, p in model.named_parameters() if not p.requires_grad),
    }
    return description, tensors


def rebuild(
    path: Path,
    description: Mapping[str, Any],
    tensors: dict[str, Tensor],
    factory: str | None = None,
) -> nn.Module:
    """The model that `describe` has described, once the tensors have been compared with it."""
    model = _model(path, description["model"], factory)
    forms, state = description["tensors"], model.state_dict(keep_vars=True)
    if names := forms.keys() ^ tensors.keys() | state.keys() ^ tensors.keys():
        problem = "are not those of the model that it describes"
        raise TpsgdError(f"the tensors in {path} {problem}: {shortened(sorted(names))}")
    for name, tensor in tensors.items():
        target, form = state[name], forms[name]
        place = f"{name!r} in {path} is {_form(tensor)}"
        if form.removesuffix(f" {CHANNELS_LAST}") != _form(tensor):
            raise TpsgdError(f"{place}, and {shortened(repr(form))} by its description")
        same_kind = tensor.is_floating_point() == target.is_floating_point()
        if tensor.shape != target.shape or not same_kind:
            raise TpsgdError(f"{place}, the model needs {_form(target)}")
        if form.endswith(CHANNELS_LAST) and tensor.dim() == 4:
            tensors[name] = tensor.contiguous(memory_format=torch.channels_last)
    if any(t.is_meta for t in state.values()):
        model.load_state_dict(tensors, assign=True)
    else:  # of a factory: its parameters may be shared, and stay
        for name, target in state.items():
            target.data = tensors[name].to(target.device)
    for name in description["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    return model


def check_free(folder: str | Path, overwrite: bool) -> Path:
    return folders.check_free(MODEL, folder, overwrite)


def check_classes(model: nn.Module, classes: Sequence[str]) -> None:
    """Refuse another number of class names than the last linear layer has outputs."""
    leaves = [module for module in model.modules() if not list(module.children())]
    while leaves and type(leaves[-1]).__module__ in LINKS:
        leaves.pop()
    if not classes or not leaves or not isinstance(leaves[-1], nn.Linear):
        return
    count = max(2, leaves[-1].out_features)  # one output is a yes or a no
    if len(classes) != count:
        names = f"classes has {len(classes)} names"
        raise TpsgdError(f"the model tells {count} classes apart, but {names}")


def _checksum(factory: str) -> str:
    if not is_function(factory):
        raise TpsgdError(f"factory must be 'FILE.py:FUNCTION', got {factory!r}")
    file = Path(factory.rpartition(":")[0]).expanduser()
    if not file.is_file():
        raise TpsgdError(f"there is no file {file}")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _model(folder: Path, description: Any, factory: str | None) -> nn.Module:
    if "factory" not in description:
        if factory is not None:
            raise TpsgdError(f"the model in {folder} needs no file: leave {factory} out")
        return modules.build(description)
    word, checksum = shortened(description["factory"]), str(description["sha256"])
    if factory is None:
        raise TpsgdError(
            f"the model in {folder} is made by {word}: name that file to have it run, with "
            f"tpsgd.load(folder, factory={word!r}) or --factory {word}"
        )
    if _checksum(factory) != checksum or factory.rpartition(":")[2] != word.rpartition(":")[2]:
        raise TpsgdError(
            f"{factory} is not what the model in {folder} was made by, {word} with the SHA-256 "
            f"{checksum[:16]}...: the file has changed, or is another one"
        )
    with torch.random.fork_rng():
        model = call_function(factory)
    if not isinstance(model, nn.Module):
        raise TpsgdError(f"{factory} returned a {type(model).__name__}, not an nn.Module")
    return model


def _form(tensor: Tensor) -> str:
    """The type, shape and memory format of a tensor in words: `float32 64x3x3x3 channels-last`."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided:
        raise TpsgdError(f"a tensor of type {name} ({tensor.layout}) cannot be saved")
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    words = [name, "x".join(map(str, tensor.shape)) or "number"]
    return " ".join(words + [CHANNELS_LAST] * (last and not tensor.is_contiguous()))


def _class_names(classes: Any) -> list[str]:
    is_list = isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)
    if not is_list or len(set(classes)) < len(classes):
        raise TpsgdError("classes must be a list of different names, in the order of the outputs")
    return list(classes)
