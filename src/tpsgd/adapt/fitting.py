"""`tpsgd.adapt.fit`: layers on the taps of a frozen backbone, trained without backpropagation."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.adapt.adaptor import Adaptor, Combination, averaged, fit_weights, learned
from tpsgd.adapt.backbone import Backbone, Tap
from tpsgd.adapt.features import Features, check_pictures, count, encode, fingerprint
from tpsgd.adapt.heads import Build, Layers, Probe
from tpsgd.data.split import stratified
from tpsgd.engine.backprop import fit_backprop
from tpsgd.engine.batches import first_samples, in_stream
from tpsgd.engine.device import available
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.inputs import tensor
from tpsgd.engine.optimizers import adam
from tpsgd.engine.record import Run
from tpsgd.errors import TpsgdError
from tpsgd.nets.blocks import split
from tpsgd.rules import frozen
from tpsgd.solvers import SOLVERS, ridge

Keep = bool | str | Path | None
BATCH = 32
LEAST_EPOCHS, LEAST_STEPS = 8, 150  # of every block, where nobody says
PER_BLOCK = ("optimizer", "lr", "epochs", "early_stopping", "passes")


def fit(
    backbone: Backbone,
    data: Any,
    *,
    taps: str | Sequence[str] | None = None,
    layers: Build = Layers(),  # noqa: B008 (a frozen value)
    combine: Combination | None = None,
    classes: int | Sequence[str] | None = None,
    method: Callable[..., Run] = fit_locally,
    keep: Keep = None,
    start: Adaptor | None = None,
    epochs: int | Sequence[int] | None = None,
    batch_size: int = BATCH,
    seed: int = 0,
    validation: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Adaptor:
    """Train an adaptor on a frozen backbone: layers for each tap, each by itself.

    Args:
        backbone: see `Backbone`.
        data: `(x, y)`, a `Dataset` or a `DataLoader`, as for `tpsgd.fit`; or `Features`.
        taps: which of the backbone's taps; default: its last one.
        layers: `(shape of the tap, classes) -> nn.Sequential`; default: the paper's adaptor.
        combine: `summed`, `averaged` (the default) or `learned`, where there are several taps.
            Learned weights are found on the validation data, or on a tenth of the samples that is
            held out.
        classes: their names or their number; default: as many as the labels have.
        method: `tpsgd.fit`, `tpsgd.fit_backprop`, or any function with their arguments.
        keep: the features in memory (True), in a file in a folder (its path), computed again for
            every epoch (False), or in memory where they fit in half of what is free (None).
        start: an adaptor of the same kind, on the same backbone, to go on from, which itself stays
            as it is. Layers that are solved (a probe's) begin anew.
        epochs: per block; default: as many as give every block 150 steps, and 8 at least.
        batch_size: samples per step.
        seed: of the initial weights, the projections and the order of samples.
        validation: held-out data, measured after every epoch.
        progress: called with (what is being done, done, total).
        options: anything else `method` takes: `rule`, `lr`, `memory_budget`, ...  A budget counts
            the backbone too, and decides what is kept. With `augment`, which changes the pictures,
            features are computed again.

    Examples:
        >>> from tpsgd.adapt import Backbone
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        >>> x, y = torch.rand(20, 3, 6, 6), torch.arange(20) % 2
        >>> adaptor = fit(Backbone(net, ["1"]), (x, y), epochs=1)
        >>> adaptor(x).shape
        torch.Size([20, 2])
    """
    if not isinstance(backbone, Backbone):
        raise TpsgdError("the first argument is an adapt.Backbone: adapt.Backbone(module, taps)")
    if combine is not None and not isinstance(combine, Combination):
        raise TpsgdError(f"combine is adapt.summed, averaged or learned, got {combine!r}")
    names = _taps(backbone, taps)
    combine = combine or (averaged if start is None else start.combine)
    held_out, budgeted = validation, options.get("memory_budget") is not None
    if combine is learned and len(names) > 1 and validation is None:
        data, held_out = hold_out(data, seed)
    _refuse(data, validation, method, keep, options)
    shapes, shape = _shapes(backbone, data, names)
    streams = budgeted or options.get("augment") is not None
    kept = isinstance(data, Features) or (not streams and _in_memory(keep, data, shapes, backbone))
    if kept and not isinstance(data, Features):
        tell = progress and (lambda done, total: progress("features", done, total))
        data = encode(backbone, data, names, progress=tell)
    if kept and held_out is not None and not isinstance(held_out, Features):
        held_out = encode(backbone, held_out, names)
    known = _classes(classes if start is None else classes or start.classes, data)
    heads = _heads(layers, shapes, len(known), seed, backbone.device)
    if start is not None:
        _go_on(heads, start, backbone, known)
    adaptor = Adaptor(
        backbone, heads, known, build=layers, shape=shape, tap_shapes=shapes, combine=combine,
        seed=seed,
    )  # fmt: skip
    adaptor.to(backbone.device)
    check = held_out if validation is not None else None
    options |= {"epochs": epochs_for(count(data), batch_size, epochs), "batch_size": batch_size}
    for tap, head in heads.items():
        tell = progress and (lambda done, total, tap=tap: progress(tap, done, total))
        settings = {**options, "seed": seed, "progress": tell}
        if kept:
            held = None if check is None else check.at(tap)
            adaptor.runs[tap] = method(head, data.at(tap), validation=held, **settings)
        else:
            settings |= {} if budgeted else {"reuse": keep or False}
            adaptor.runs[tap] = _stream(method, backbone, tap, head, data, check, settings)
    if combine is learned and len(names) > 1:
        fit_weights(adaptor, held_out)
    return adaptor.eval()


def epochs_for(samples: int, batch_size: int, given: Any = None) -> Any:
    """The epochs that were given, or enough for few samples.

    Examples:
        >>> epochs_for(100, 32), epochs_for(10_000, 32), epochs_for(100, 32, 5)
        (38, 8, 5)
    """
    steps = -(-samples // batch_size)
    return max(LEAST_EPOCHS, -(-LEAST_STEPS // steps)) if given is None else given


def probe(backbone: Backbone, data: Any, *, alpha: float | None = None, **options: Any) -> Adaptor:
    """The control: a linear classifier on each tap's average, solved in closed form (ridge).

    `alpha` is its penalty, chosen by generalised cross-validation if not given; the other arguments
    are those of `fit`.
    """
    return fit(backbone, data, layers=Probe(), optimizer=ridge(alpha), epochs=1, **options)


def _taps(backbone: Backbone, taps: str | Sequence[str] | None) -> tuple[str, ...]:
    names = list(backbone.taps)[-1:] if taps is None else [taps] if isinstance(taps, str) else taps
    for tap in names:
        backbone.path(tap)
    if not names or len(set(names)) < len(names):
        raise TpsgdError(f"name each tap once, and one at least: {list(names)}")
    return tuple(names)


def _shapes(
    backbone: Backbone, data: Any, taps: tuple[str, ...]
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """The shape of one sample at each tap, and its own."""
    if isinstance(data, Features):
        if data.made_by and data.made_by != fingerprint(backbone.model):
            raise TpsgdError("these features were made by another backbone: encode them with this")
        return {tap: tuple(data.at(tap)[0].shape[1:]) for tap in taps}, data.shape
    x = first_samples(data)
    if not isinstance(x, Tensor):
        raise TpsgdError("a backbone takes samples of one shape, not sequences of any length")
    check_pictures(backbone, x)
    return backbone.shapes(x, taps), tuple(x.shape[1:])


def _in_memory(
    keep: Keep, data: Any, shapes: dict[str, tuple[int, ...]], backbone: Backbone
) -> bool:
    if keep is not None:
        return keep is True
    need = count(data) * sum(map(prod, shapes.values())) * 4
    return need < max(available(backbone.device), available(torch.device("cpu"))) / 2


def _classes(classes: int | Sequence[str] | None, data: Any) -> tuple[str, ...]:
    if classes is None:
        y = data.y if isinstance(data, Features) else None
        if y is None and in_stream(data):
            raise TpsgdError("say how many classes there are (classes=10), or keep the features")
        y = tensor(data[1], "y") if y is None else y
        classes = y.shape[1] if y.is_floating_point() and y.dim() == 2 else int(y.max()) + 1
    names = tuple(map(str, range(classes) if isinstance(classes, int) else classes))
    if len(names) < 2:
        raise TpsgdError(f"an adaptor needs at least two classes, got {len(names)}")
    return names


def _heads(
    layers: Build, shapes: dict[str, tuple[int, ...]], classes: int, seed: int, device: torch.device
) -> dict[str, nn.Sequential]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        heads = {tap: layers(shape, classes) for tap, shape in shapes.items()}
    for head in heads.values():
        if not isinstance(head, nn.Sequential):
            raise TpsgdError(f"layers must make an nn.Sequential, made {type(head).__name__}")
    return {tap: head.to(device) for tap, head in heads.items()}


def _refuse(
    data: Any, validation: Any, method: Callable[..., Run], keep: Keep, options: dict[str, Any]
) -> None:
    """What does not go together, before anything is computed."""
    budgeted, augmented = (options.get(k) is not None for k in ("memory_budget", "augment"))
    if budgeted and (keep is not None or isinstance(data, Features)):
        raise TpsgdError("memory_budget decides what is kept: give it or keep, and the data itself")
    if budgeted and method is fit_backprop:
        raise TpsgdError("memory_budget is for what is trained block by block, not for backprop")
    if augmented and (keep or isinstance(data, Features)):
        raise TpsgdError("augment changes the pictures: their features cannot be kept")
    if isinstance(keep, (str, Path)) and not Path(keep).expanduser().is_dir():
        raise TpsgdError(f"keep={str(keep)!r} is no folder: make it, or give True, False or None")
    given = [d for d in (data, validation) if d is not None and not isinstance(d, Features)]
    kinds = {first_samples(d).dtype is torch.uint8 for d in given}
    if len(kinds) > 1:
        raise TpsgdError("data and validation must both be bytes (uint8), or both be floats")
    if augmented and True in kinds:
        raise TpsgdError("augment wants pictures as floats from 0 to 1: divide the bytes by 255")


def _go_on(
    heads: dict[str, nn.Sequential], start: Adaptor, backbone: Backbone, classes: tuple[str, ...]
) -> None:
    """Begin where another adaptor ended."""
    if classes != start.classes:
        raise TpsgdError(f"the adaptor to start from has other classes: {list(start.classes)}")
    own = start.backbone
    if own is not backbone and fingerprint(own.model) != fingerprint(backbone.model):
        raise TpsgdError("the adaptor to start from belongs to another backbone")
    for tap, head in heads.items():
        known = start.heads[tap].state_dict() if tap in start.heads else {}
        own = head.state_dict()
        if {k: v.shape for k, v in known.items()} != {k: v.shape for k, v in own.items()}:
            raise TpsgdError(f"the adaptor to start from has other layers at tap {tap!r}")
        head.load_state_dict(known)


def _stream(
    method: Callable[..., Run],
    backbone: Backbone,
    tap: str,
    head: nn.Sequential,
    data: Any,
    validation: Any,
    settings: dict[str, Any],
) -> Run:
    """Train a head behind its backbone, which is run again or has its outputs kept by `fit`."""
    bytes_given = first_samples(data).dtype is torch.uint8
    model = nn.Sequential(Tap(backbone, tap, 255 if bytes_given else 1.0), *head)
    rule, optimizer = settings.get("rule"), settings.get("optimizer")
    if isinstance(rule, (list, tuple)):
        settings["rule"] = [frozen(), *rule]
    if isinstance(optimizer, SOLVERS):
        settings["optimizer"] = [optimizer] * len(split(head))
    for name in PER_BLOCK:
        value = settings.get(name)
        if isinstance(value, (list, tuple)):
            settings[name] = [adam if name == "optimizer" else value[0], *value]
    if method is not fit_locally:
        settings.pop("reuse", None)
    return method(model, data, validation=validation, **settings)


def hold_out(data: Any, seed: int = 0) -> tuple[Any, Any]:
    """Nine tenths of the samples and the rest, the shares of the classes kept."""
    if isinstance(data, Features):
        y, take = data.y, data.__getitem__
    elif in_stream(data):
        raise TpsgdError("learned weights of taps need held-out data: give validation=")
    else:
        x, y = data
        x, y = tensor(x, "x"), tensor(y, "y")
        take = lambda index: (x[index], y[index])  # noqa: E731
    known = (y.argmax(1) if y.dim() == 2 else y).cpu()
    train = torch.from_numpy(stratified(known.numpy(), len(known) - -(-len(known) // 10), seed))
    train = train.to(y.device)
    return take(train), take(~train)
