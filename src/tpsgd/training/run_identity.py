"""What makes two runs the same run: settings, model, optimizers and data, as plain values."""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.batches import Arrays, stored_samples
from tpsgd.engine.optimizers import make_optimizer
from tpsgd.errors import TpsgdError, shortened
from tpsgd.nets.padded import Padded
from tpsgd.parallel.ranks import unlike
from tpsgd.protocols import Source
from tpsgd.saved.expected import OF_DEVICE
from tpsgd.solvers import SOLVERS
from tpsgd.train import Net

MAY_DIFFER = (
    "threads",
    "torch",
    "device",
    "measure",
    "parallel",
)  # settings that do not make another run
# of several differences, those that say most come first
FIRST = (
    "data", "rule", "number of samples (training data)", "shape of samples (training data)",
    "model", "epochs", "checksum (training data)",
)  # fmt: skip
IN_WORDS = {
    "number of samples (training data)": "training data",
    "shape of samples (training data)": "training data",
    "checksum (training data)": "training data",
    "list of tensors": "model",
    "list of optimizers": "optimizer",
    "options": "list of the rules' options",
}
COMPARED = 64  # samples whose numbers are compared; of the labels all are


def identity(net: Net, model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """What a later run must have in common with this one, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    forms = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors.items()]
    values = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
    values |= {"model": str(model).splitlines(), "list of tensors": forms}
    values |= {"list of optimizers": [_optimizer(learner) for learner in net.learners]}
    values |= _backbones(model)
    values |= _samples("training data", net.source)
    if net.validation is not None:
        values |= _samples("validation data", net.validation)
    return json.loads(json.dumps(values, default=str))  # tuples become lists


def check_same_run(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a checkpoint of other settings, another model or other data."""
    if problem := difference(before, now):
        raise TpsgdError(
            f"the checkpoint in {folder} is of another run: {problem}; resume with the same, or "
            "name another folder"
        )


def check_same_on_ranks(identities: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks with different settings, models or data: they would wait for one another.

    Examples:
        >>> check_same_on_ranks([{"epochs": [2]}, {"epochs": [3]}])
        Traceback (most recent call last):
        ...
        tpsgd.errors.TpsgdError: every rank must have the same epochs: rank 0 has 2, rank 1 has 3
    """
    for rank, identity in enumerate(identities):
        for name in _differing(identities[0], identity):
            pair = _where_they_differ(identities[0].get(name), identity.get(name))
            first, other = map(shortened, pair)
            words = IN_WORDS.get(name, name)
            what = "" if words == name else f"{name.partition(' (')[0]} "
            raise unlike(words, what + first, rank, what + other)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How the values of two runs differ, that which matters most first; "" if they do not.

    Examples:
        >>> difference({"options": ["a"], "seed": 0, "rule": "dfa"}, {"rule": "drtp", "seed": 0})
        "its rule was dfa, and now it is drtp (list of the rules' options: different, too)"
    """
    names = _differing(before, now)
    if not names:
        return ""
    old, new = _where_they_differ(before.get(names[0]), now.get(names[0]))
    words = list(dict.fromkeys(IN_WORDS.get(name, name) for name in names))
    others = f" ({', '.join(words[1:5])}: different, too)" if words[1:] else ""
    name = words[0] if names[0] == "options" else names[0]
    return f"its {name} was {shortened(old)}, and now it is {shortened(new)}{others}"


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of the values that differ, that which matters most first."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def _where_they_differ(old: Any, new: Any) -> tuple[Any, Any]:
    """Two values, or of two lists the first entries that differ."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return old, new
    pairs = zip_longest(old, new, fillvalue="nothing")
    return next((str(a).strip(), str(b).strip()) for a, b in pairs if a != b)


def _optimizer(learner: Any) -> str:
    """The optimizer that a block begins with, and its settings."""
    if not learner.trains:
        return "none"
    return describe_optimizer(learner.settings.optimizer, learner.params, learner.settings.lr)


def describe_optimizer(factory: Any, params: Mapping[str, Tensor], lr: float | None = None) -> str:
    """A solver with its penalty, or the optimizer that a factory makes, with its numbers.

    Examples:
        >>> from tpsgd import ridge, sgd
        >>> describe_optimizer(ridge(0.1), {}), describe_optimizer(sgd, {"w": torch.zeros(1)})[:14]
        ('Ridge(alpha=0.1)', "SGD [{'lr': 0.")
    """
    if isinstance(factory, SOLVERS):
        return repr(factory)
    optimizer = make_optimizer(factory, params, lr)
    groups = [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in g.items() if k not in OF_DEVICE}
        for g in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"


def _backbones(model: nn.Module) -> dict[str, Any]:
    """A checksum of frozen backbones inside a model: unlike other weights, they are not replaced.

    An adaptor that recomputes its features has its backbone, a `Tap`, as the first module.
    """
    taps = [module for module in model.modules() if getattr(module, "is_tap", False)]
    code = 0
    for tensor in (t for tap in taps for t in (*tap.parameters(), *tap.buffers())):
        code = zlib.crc32(_bytes(tensor), code)
    return {"checksum of the backbone": f"{code:08x}"} if taps else {}


def _samples(name: str, source: Source) -> dict[str, Any]:
    """How many samples there are, what they look like, and a checksum of some numbers."""
    stored = stored_samples(source)
    values: dict[str, Any] = {f"number of samples ({name})": source.samples}
    if not isinstance(stored, Arrays):
        return values
    values[f"shape of samples ({name})"] = f"{tuple(stored.x.shape[1:])} {stored.x.dtype}"
    return values | {f"checksum ({name})": checksum(stored.x, stored.y)}


def checksum(x: Tensor | Padded, y: Tensor) -> str:
    """A checksum of all labels, and of the numbers of some samples.

    Examples:
        >>> x, y = torch.zeros(3, 2), torch.arange(3)
        >>> checksum(x, y) == checksum(x, y.flip(0)), checksum(x, y) == checksum(x + 1, y)
        (False, False)
    """
    x = x.data if isinstance(x, Padded) else x
    some = torch.linspace(0, len(x) - 1, min(COMPARED, len(x)), device=x.device).long()
    return f"{zlib.crc32(_bytes(x[some]), zlib.crc32(_bytes(y))):08x}"


def _bytes(t: Tensor) -> Any:
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
