"""What makes two runs the same run: settings, model, optimizers and data, as plain values."""

import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.engine.learners.optimizers import describe_optimizer
from tpsgd.engine.sources.batches import ArraySource, stored_samples
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded
from tpsgd.train import Net, Source

MAY_DIFFER = ("threads", "torch", "device", "measure", "parallel")  # which make no other run
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
    optimizers = [
        describe_optimizer(x.settings.optimizer, x.params, x.settings.lr) if x.trains else "none"
        for x in net.learners
    ]
    values = {name: value for name, value in settings.items() if name not in MAY_DIFFER} | {
        "model": str(model).splitlines(),
        "list of tensors": [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors.items()],
        "list of optimizers": optimizers,
    }
    # Unlike other weights, those of a frozen backbone are not replaced by a checkpoint. An adaptor
    # that recomputes its features has its backbone, a `Tap`, as the first module.
    taps = [module for module in model.modules() if getattr(module, "is_tap", False)]
    if frozen := [t for tap in taps for t in (*tap.parameters(), *tap.buffers())]:
        values["checksum of the backbone"] = checksum_of(frozen)
    values |= _samples("training data", net.source)
    if net.validation is not None:
        values |= _samples("validation data", net.validation)
    return json.loads(json.dumps(values, default=str))  # tuples become lists


def check_same_run(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if problem := difference(before, now):
        raise TpsgdError(
            f"the checkpoint in {folder} is of another run: {problem}; resume with the same, or "
            "name another folder"
        )


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How the values of two runs differ, that which matters most first; "" if they do not.

    Examples:
        >>> difference({"options": ["a"], "seed": 0, "rule": "dfa"}, {"rule": "drtp", "seed": 0})
        "its rule was dfa, and now it is drtp (list of the rules' options: different, too)"
        >>> difference({"epochs": 2}, {"epochs": [1, 2]}), difference({"lr": None}, {"lr": 0.1})
        ('its epochs were 2, and now they are [1, 2]', 'its lr was not set, and now it is 0.1')
    """
    names = differing(before, now)
    if not names:
        return ""
    old, new = where_they_differ(before.get(names[0]), now.get(names[0]))
    words = list(dict.fromkeys(IN_WORDS.get(name, name) for name in names))
    others = f" ({', '.join(words[1:5])}: different, too)" if words[1:] else ""
    name = words[0] if names[0] == "options" else names[0]
    many = name.isalpha() and name.endswith("s") and not name.endswith("ss")  # one word
    was, now_is = ("were", "now they are") if many else ("was", "now it is")
    old, new = ("not set" if value in (None, "None") else value for value in (old, new))
    return f"its {name} {was} {old}, and {now_is} {new}{others}"


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of the values that differ, that which matters most first."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def where_they_differ(old: Any, new: Any) -> tuple[str, str]:
    """Two values in words, or of two lists the first entries that differ."""
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip_longest(old, new, fillvalue="nothing")
        old, new = next((a, b) for a, b in pairs if a != b)
    return shortened(old), shortened(new)


def _samples(name: str, source: Source) -> dict[str, Any]:
    stored = stored_samples(source)
    values: dict[str, Any] = {f"number of samples ({name})": source.samples}
    if not isinstance(stored, ArraySource):
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
    x = x.data if isinstance(x, (Padded, ModelInputs)) else x
    some = torch.linspace(0, len(x) - 1, min(COMPARED, len(x)), device=x.device).long()
    return checksum_of([y, x[some]])


def checksum_of(tensors: Iterable[Tensor]) -> str:
    code = 0
    for tensor in tensors:
        code = zlib.crc32(bytes_of(tensor), code)
    return f"{code:08x}"


def bytes_of(t: Tensor) -> Any:
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
