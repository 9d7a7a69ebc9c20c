"""A stream in a folder of `saved.folder`: its model, its settings, and its state between calls."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import named_folder
from tpsgd.engine.learners.optimizers import adam, sgd
from tpsgd.engine.solvers import Recursive, rls
from tpsgd.losses import bce, cross_entropy, mse
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded
from tpsgd.rules import ALL, Rule
from tpsgd.saved import folder as folders
from tpsgd.saved import trained
from tpsgd.saved.checkpoint import pack, readable, unpack
from tpsgd.saved.expected import check_count
from tpsgd.saved.folder import FolderFormat
from tpsgd_streams.readers import EXAMPLES, ModelReader
from tpsgd_streams.rehearsal import Rehearsal

STREAM = FolderFormat("stream", 1)
OPTIMIZERS = {"adam": adam, "sgd": sgd}
LOSSES = {loss.name: loss for loss in (mse, cross_entropy, bce)}
ARGUMENTS: dict[str, Callable[[Any], Any]] = {  # made of the plain values that stand for them
    "rule": lambda word: ALL[word].make(),
    "optimizer": lambda word: OPTIMIZERS[word] if isinstance(word, str) else rls(word),
    "loss": lambda word: LOSSES[word],
    "rehearsal": lambda options: Rehearsal(**options),
}
MODEL = "model/"  # before the names of the model's tensors
OWN = "your own"  # in place of a word
LARGEST_SAMPLE = 1 << 28  # numbers


def write(stream: Any, folder: str | Path, factory: str | None, overwrite: bool) -> Path:
    """See `Stream.save`."""
    path = folders.check_free(STREAM, folder, overwrite)
    if type(stream._reader) is not ModelReader:
        raise TpsgdError("the stream of an adaptor: use adaptor.save and stream.state_dict()")
    description, weights = trained.describe(stream.model, factory)
    tensors = {MODEL + name: tensor for name, tensor in weights.items()}
    content = {"settings": _settings(stream), "state": stream.state_dict()}
    description["stream"] = pack(content, tensors, "stream")
    return folders.write(STREAM, path, description, tensors)


def read(make: Any, folder: str | Path, factory: str | None, settings: dict[str, Any]) -> Any:
    """The stream in a folder, once its state has been compared with learners that are new."""
    path = named_folder(folder, "of a stream")
    description, tensors = folders.read(STREAM, path)
    with readable(path, "stream"):
        weights = {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}
        model = trained.rebuild(path, description, weights, factory)
        content = unpack(description["stream"], tensors)
        state, saved = content["state"], content["settings"]
        sample = saved.pop("sample")
        names = state["classes"] if isinstance(state["classes"], list) else None
        stream = make(model, classes=names, **_values(path, saved, settings))
        for number in (state["samples"], state["calls"], *state["drifts"]):
            check_count("samples", number)
        stream.load_state_dict(state)
        if sample is not None:
            one = len(sample) > 1
            several = {} if one else {name: _like(False, *form) for name, *form in sample[0]}
            _check_state(stream, _like(*sample) if one else ModelInputs(several))
    return stream


def _settings(stream: Any) -> dict[str, Any]:
    settings, buffer, rule = stream._settings, stream.rehearsal, stream._rule
    optimizer, loss, form = settings.optimizer, settings.loss, stream._reader.form
    rules = [word for word in ALL if isinstance(rule, Rule) and str(ALL[word].make()) == str(rule)]
    optimizers = [word for word, factory in OPTIMIZERS.items() if factory is optimizer]
    if isinstance(optimizer, Recursive):
        optimizers = [optimizer.gamma]
    values = {name: getattr(settings, name) for name in ("lr", "batch_size", "seed")}
    values["rule"], values["optimizer"] = next(iter(rules), OWN), next(iter(optimizers), OWN)
    values["loss"] = loss and (loss.name if LOSSES.get(loss.name) is loss else OWN)
    values["rehearsal"] = None
    if buffer is not None:
        options = {"memory": buffer.limit, "balanced": buffer.balanced}
        values["rehearsal"] = options | {"replayed": buffer.replayed}
    sample: Any = form and [form[0] is Padded, list(form[1]), _word(form[2])]
    if form and form[3]:
        sample = [[[name, list(shape), _word(dtype)] for name, (shape, dtype) in form[3].items()]]
    return values | {"sample": sample}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(path: Path, saved: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a stream: those that it was saved with, or others in their place."""
    values = saved | settings
    for name, make in ARGUMENTS.items():
        if name in settings or saved[name] is None:
            continue
        if saved[name] == OWN:
            raise TpsgdError(
                f"the stream in {path} has its own {name}, which is code: pass it again, "
                f"Stream.load(folder, {name}=...)"
            )
        values[name] = make(saved[name])
    return values


def _like(padded: bool, shape: list[int], dtype: str) -> Any:
    """Samples of zeros, in the form of those that the stream has learned from."""
    shape = [check_count("shape", n, least=1) for n in shape]
    if math.prod(shape) > LARGEST_SAMPLE or dtype not in trained.DTYPES:
        raise ValueError(f"samples cannot be {dtype} of shape {shape}")
    x = torch.zeros(EXAMPLES, *shape, dtype=getattr(torch, dtype))
    return Padded(x, torch.full((EXAMPLES,), shape[0])) if padded else x


def _check_state(stream: Any, x: Any) -> None:
    """Refuse a state that does not fit learners, or samples and labels of the buffer."""
    stream._reader.check(x)
    for net, seen in zip(stream._nets, stream._reader.inputs(x), strict=True):
        net.check_state(seen)
    buffer = stream.rehearsal
    if buffer is not None and len(buffer):
        buffer.check(x)
        if buffer.y[: len(buffer)].max() >= len(stream.classes):
            raise ValueError("stored labels are no classes of the stream")
