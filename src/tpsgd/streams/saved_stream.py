"""A stream in a folder: its model, its settings, and what goes on from call to call.

All of it is one description and one file of tensors (`saved.folder`), so that a process that is
killed while it writes leaves the old stream or the new one, and reading runs no code.
"""

import math
from pathlib import Path
from typing import Any

import torch

from tpsgd.engine.optimizers import adam, sgd
from tpsgd.errors import TpsgdError
from tpsgd.files import named_folder
from tpsgd.losses import bce, cross_entropy, mse
from tpsgd.nets.padded import Padded
from tpsgd.rules import ALL, Rule
from tpsgd.saved import folder as folders
from tpsgd.saved import trained
from tpsgd.saved.checkpoint import pack, readable, unpack
from tpsgd.saved.expected import check_number
from tpsgd.saved.folder import Layout
from tpsgd.solvers import Recursive
from tpsgd.solvers.recursive import rls
from tpsgd.streams.rehearsal import Rehearsal
from tpsgd.streams.subjects import EXAMPLES, Layers

STREAM = Layout("stream", 1)
OPTIMIZERS = {"adam": adam, "sgd": sgd}
LOSSES = {loss.name: loss for loss in (mse, cross_entropy, bce)}
MODEL = "model/"  # before the names of the model's tensors
OWN = "your own"  # in place of a word
LARGEST_SAMPLE = 1 << 28  # numbers


def write(stream: Any, folder: str | Path, overwrite: bool) -> Path:
    """Write a stream into a folder; see `Stream.save`."""
    path = named_folder(folder, "to save the stream in")
    if folders.holds(STREAM, path) and not overwrite:
        raise TpsgdError(
            f"{path} already holds a stream: name another folder, or replace it with overwrite=True"
        )
    if isinstance(stream._subject, Layers):
        raise TpsgdError("the stream of an adaptor: use adaptor.save and stream.state_dict()")
    description, weights = trained.describe(stream.model)
    tensors = {MODEL + name: tensor for name, tensor in weights.items()}
    content = {"settings": _settings(stream), "state": stream.state_dict()}
    description["stream"] = pack(content, tensors, "stream")
    return folders.write(STREAM, path, description, tensors)


def read(make: Any, folder: str | Path, settings: dict[str, Any]) -> Any:
    """The stream in a folder, once its state has been compared with learners that are new."""
    path = named_folder(folder, "of a stream")
    description, tensors = folders.read(STREAM, path)
    with readable(path, "stream"):
        weights = {
            name.removeprefix(MODEL): tensor
            for name, tensor in tensors.items()
            if name.startswith(MODEL)
        }
        model = trained.rebuild(path, description, weights)
        content = unpack(description["stream"], tensors)
        state, saved = content["state"], content["settings"]
        sample = saved.pop("sample")
        names = state["classes"] if isinstance(state["classes"], list) else None
        stream = make(model, classes=names, **_values(path, saved, settings))
        for number in (state["samples"], state["calls"], *state["drifts"]):
            check_number("samples", number, least=0, whole=True)
        stream.load_state_dict(state)
        if sample is not None:
            _check_state(stream, _like(*sample))
    return stream


def _settings(stream: Any) -> dict[str, Any]:
    """The settings of a stream as plain values."""
    settings, rehearsal, rule = stream._settings, stream.rehearsal, stream._rule
    words = [word for word in ALL if str(ALL[word].make()) == str(rule)]
    optimizer = settings.optimizer
    if isinstance(optimizer, Recursive):
        optimizer = optimizer.gamma
    else:
        named = [word for word, factory in OPTIMIZERS.items() if factory is optimizer]
        optimizer = named[0] if named else OWN
    loss, form = settings.loss, stream._subject.form
    buffer = rehearsal and {"memory": rehearsal.limit, "balanced": rehearsal.balanced}
    return {
        "rule": words[0] if words and isinstance(rule, Rule) else OWN,
        "optimizer": optimizer,
        "loss": loss and (loss.name if LOSSES.get(loss.name) is loss else OWN),
        "lr": settings.lr,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "rehearsal": rehearsal and {**buffer, "replayed": rehearsal.replayed},
        "sample": form and [form[0] is Padded, list(form[1]), str(form[2]).removeprefix("torch.")],
    }


def _values(path: Path, saved: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a stream: those that it was saved with, or others in their place."""
    values = saved | settings
    for name in ("rule", "optimizer", "loss"):
        if name not in settings and saved[name] == OWN:
            raise TpsgdError(
                f"the stream in {path} has its own {name}, which is code: pass it again, "
                f"Stream.load(folder, {name}=...)"
            )
    if "rule" not in settings:
        values["rule"] = ALL[saved["rule"]].make()
    if "optimizer" not in settings:
        word = saved["optimizer"]
        values["optimizer"] = OPTIMIZERS[word] if isinstance(word, str) else rls(word)
    if "loss" not in settings and saved["loss"] is not None:
        values["loss"] = LOSSES[saved["loss"]]
    if "rehearsal" not in settings and saved["rehearsal"] is not None:
        values["rehearsal"] = Rehearsal(**saved["rehearsal"])
    return values


def _like(padded: bool, shape: list[int], dtype: str) -> Any:
    """Samples of zeros, in the form of those that the stream has learned from."""
    shape = [check_number("shape", n, least=1, whole=True) for n in shape]
    if math.prod(shape) > LARGEST_SAMPLE or dtype not in trained.DTYPES:
        raise ValueError(f"samples cannot be {dtype} of shape {shape}")
    x = torch.zeros(EXAMPLES, *shape, dtype=getattr(torch, dtype))
    return Padded(x, torch.full((EXAMPLES,), shape[0])) if padded else x


def _check_state(stream: Any, x: Any) -> None:
    """Refuse a state that does not fit learners, or samples and labels of the buffer."""
    stream._subject.check(x)
    for net, seen in zip(stream._nets, stream._subject.inputs(x), strict=True):
        net.check_state(seen)
    buffer = stream.rehearsal
    if buffer is not None and len(buffer):
        buffer.check(x)
        if buffer.y.dtype != torch.long or max(buffer.counts()) >= len(stream.classes):
            raise ValueError("stored labels are no classes of the stream")
