"""`tpsgd.adapt.fit`: train layers on the taps of a frozen backbone without backpropagation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.device import available
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.record import Run, of_run
from tpsgd.engine.settings import Memory, Settings
from tpsgd.engine.solvers import SOLVERS, ridge
from tpsgd.engine.sources.inputs import labels, tensor
from tpsgd.engine.sources.loaders import first_samples, is_stream
from tpsgd.nets.cuts.split import split
from tpsgd.rules import Rule, frozen
from tpsgd.saved.checkpoint import claimed
from tpsgd_adapt.adaptor import Adaptor, Combination, averaged, fit_weights, learned
from tpsgd_adapt.backbone import Backbone, Tap
from tpsgd_adapt.features import Features, check_samples, count, encode, fingerprint, hold_out
from tpsgd_adapt.heads import Build, Layers, Probe, Shapes

Method = Callable[..., Run]
BATCH = 32
LEAST_EPOCHS, LEAST_STEPS = 8, 150  # of every block, by default


def fit(
    backbone: Backbone,
    data: Any,
    *,
    taps: str | Sequence[str] | None = None,
    layers: Build = Layers(),  # noqa: B008 (a frozen value)
    combine: Combination | None = None,
    classes: int | Sequence[str] | None = None,
    method: Method = fit_locally,
    start: Adaptor | None = None,
    rule: Rule | Sequence[Rule] | None = None,
    epochs: int | Sequence[int] | None = None,
    batch_size: int = BATCH,
    progress: Callable[[str, int, int], None] | None = None,
    **settings: Any,
) -> Adaptor:
    """Train an adaptor on a frozen backbone: the layers of each tap, independently.

    Args:
        backbone: see `Backbone`.
        data: `(x, y)`, a `Dataset` or a `DataLoader`, as for `tpsgd.fit`; or `Features`.
        taps: which of the backbone's taps; default: the last one.
        layers: `(shape of the tap, classes) -> nn.Sequential`; default: the paper's adaptor.
        combine: `summed`, `averaged` (the default) or `learned`, for several taps. Learned weights
            are fitted to the validation data, or to a tenth of the samples that is held out.
        classes: their names or their number; default: as many as the labels have.
        method: `tpsgd.fit`, `tpsgd.fit_backprop`, or any function with their arguments.
        start: a similar adaptor on the same backbone, whose weights are the initial ones. Layers
            that are solved (a probe's) are solved from scratch.
        rule: as for `tpsgd.fit`.
        epochs: per block; default: enough for 150 steps per block, and at least 8.
        batch_size: samples per step.
        progress: called with (tap or "features", done, total).
        **settings: those of `tpsgd.fit`. `memory=tpsgd.Memory(reuse=...)` says where the features
            are: in memory (True), in a file in a folder (its path), recomputed in every epoch
            (False), or in memory if they take less than half of what is free (None). A budget,
            `memory="64MB"`, counts the backbone too (with `Features` the layers alone) and decides
            what is kept. With `augment`, which changes the images, features are recomputed.

    Examples:
        >>> from tpsgd_adapt import Backbone
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        >>> x, y = torch.rand(20, 3, 6, 6), torch.arange(20) % 2
        >>> adaptor = fit(Backbone(net, ["1"]), (x, y), epochs=1)
        >>> adaptor(x).shape
        torch.Size([20, 2])
    """
    checked = Settings.of("adapt.fit", {"batch_size": batch_size, **settings})
    names = tap_names(backbone, taps)
    if combine is None:
        combine = averaged if start is None else start.combine
    if not isinstance(combine, Combination):
        raise TpsgdError(f"combine is adapt.summed, averaged or learned, got {combine!r}")
    learns_weights = combine is learned and len(names) > 1
    held_out = checked.validation
    if learns_weights and held_out is None:
        data, held_out = hold_out(data, checked.seed)
    if checked.augment is not None and isinstance(data, Features):
        raise TpsgdError("augment changes the images: their features cannot be kept")
    shapes, shape = _shapes(backbone, data, names)
    if not isinstance(data, Features) and _keep_in_memory(checked, data, shapes, backbone):
        data = encode(backbone, data, names, progress=progress and partial(progress, "features"))
    if isinstance(data, Features) and held_out is not None and not isinstance(held_out, Features):
        held_out = encode(backbone, held_out, names)
    if classes is None and start is not None:
        classes = start.classes
    class_names = name_classes(classes, data)
    adaptor = Adaptor(backbone, layers, shapes, class_names, shape, combine, checked.seed)
    if start is not None:
        _copy_weights(start, adaptor)
    settings |= {} if rule is None else {"rule": rule}
    settings |= {"epochs": epochs_for(count(data), batch_size, epochs), "batch_size": batch_size}
    settings |= {} if checked.validation is None else {"validation": held_out}
    with claimed(checked.checkpoint) as checkpoint:
        for tap in names:
            options = settings | {"progress": progress and partial(progress, tap)}
            if checkpoint is not None:
                options |= {"checkpoint": checkpoint.within(tap)}
            if len(names) > 1:
                options = of_run(options, tap, checked.seed)
            run = _train(method, adaptor, tap, data, options)
            adaptor.runs[tap] = run.without_model()  # the adaptor is the model
    if learns_weights:
        fit_weights(adaptor, held_out)
    return adaptor.eval()


def epochs_for(samples: int, batch_size: int, epochs: Any = None) -> Any:
    """The epochs that the caller asked for, or the default: more for few samples.

    Examples:
        >>> epochs_for(100, 32), epochs_for(10_000, 32), epochs_for(100, 32, 5)
        (38, 8, 5)
    """
    steps = -(-samples // batch_size)
    return max(LEAST_EPOCHS, -(-LEAST_STEPS // steps)) if epochs is None else epochs


def probe(backbone: Backbone, data: Any, *, alpha: float | None = None, **options: Any) -> Adaptor:
    """The control: a linear classifier on each tap's average, solved in closed form (ridge).

    `alpha` is the ridge penalty; by default generalised cross-validation chooses it. The other
    arguments are those of `fit`.
    """
    return fit(backbone, data, layers=Probe(), optimizer=ridge(alpha), epochs=1, **options)


def tap_names(backbone: Backbone, taps: str | Sequence[str] | None) -> tuple[str, ...]:
    """The taps to train on; by default the last one."""
    if not isinstance(backbone, Backbone):
        raise TpsgdError("the first argument is an adapt.Backbone: adapt.Backbone(module, taps)")
    names = list(backbone.taps)[-1:] if taps is None else [taps] if isinstance(taps, str) else taps
    for tap in names:
        backbone.path(tap)
    if not names or len(set(names)) < len(names):
        raise TpsgdError(f"name each tap once, and at least one: {list(names)}")
    return tuple(names)


def _shapes(backbone: Backbone, data: Any, taps: tuple[str, ...]) -> tuple[Shapes, tuple[int, ...]]:
    """The shape of a sample at each tap, and that of the sample itself."""
    if isinstance(data, Features):
        check_origin(backbone, data)
        return {tap: tuple(data.at(tap)[0].shape[1:]) for tap in taps}, data.shape
    x = first_samples(data)
    check_samples(backbone, x)
    return backbone.shapes(x, taps), tuple(x.shape[1:])


def check_origin(backbone: Backbone, features: Features) -> None:
    """Refuse features that another backbone made."""
    if features.made_by and features.made_by != fingerprint(backbone.model):
        raise TpsgdError("these features are of another backbone: encode the data with this")


def _keep_in_memory(settings: Settings, data: Any, shapes: Shapes, backbone: Backbone) -> bool:
    """Whether to compute the features once and keep them in memory."""
    if settings.memory.budget is not None or settings.augment is not None:
        return False
    if settings.memory.reuse is not None:
        return settings.memory.reuse is True
    need = count(data) * sum(map(prod, shapes.values())) * 4
    return need < max(available(backbone.device), available(torch.device("cpu"))) / 2


def name_classes(classes: int | Sequence[str] | None, data: Any) -> tuple[str, ...]:
    """The names of the classes: as given, or their numbers, as many as the labels have."""
    if classes is None:
        if not isinstance(data, Features) and is_stream(data):
            raise TpsgdError("say how many classes there are (classes=10), or keep the features")
        y = labels(data.y if isinstance(data, Features) else tensor(data[1], "y"), None, None)
        classes = y.shape[1] if y.dim() == 2 else int(y.max()) + 1
    names = tuple(map(str, range(classes) if isinstance(classes, int) else classes))
    if len(names) < 2:
        raise TpsgdError(f"an adaptor needs at least two classes, got {len(names)}")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise TpsgdError(f"two classes are called {repeated[0]!r}: give each a name of its own")
    return names


def _copy_weights(start: Adaptor, adaptor: Adaptor) -> None:
    """Begin with the weights of another adaptor, if it is of the same kind."""
    if adaptor.classes != start.classes:
        raise TpsgdError(f"the adaptor to start from has other classes: {list(start.classes)}")
    backbone, other = adaptor.backbone, start.backbone
    if other is not backbone and fingerprint(other.model) != fingerprint(backbone.model):
        raise TpsgdError("the adaptor to start from belongs to another backbone")
    for tap, head in adaptor.heads.items():
        try:
            head.load_state_dict(start.heads[tap].state_dict())
        except (KeyError, RuntimeError) as error:
            raise TpsgdError(f"the adaptor to start from has other layers at {tap!r}") from error


def _train(method: Method, adaptor: Adaptor, tap: str, data: Any, settings: dict[str, Any]) -> Run:
    """Train the layers of a tap, on its features or on the samples themselves."""
    head: Any = adaptor.heads[tap]
    if isinstance(data, Features):
        if "validation" in settings:
            settings["validation"] = settings["validation"].at(tap)
        return method(head, data.at(tap), **settings)
    model = nn.Sequential(Tap(adaptor.backbone, tap), *head)
    blocks = len(split(head, blocks=settings.get("blocks")))
    return method(model, data, **_with_backbone(settings, blocks))


def _with_backbone(settings: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The settings for a model whose first block is the frozen backbone."""
    settings = dict(settings)
    memory = Memory.of(settings.get("memory"))
    if memory.budget is None and memory.reuse is None:  # the features do not fit in memory
        settings["memory"] = replace(memory, reuse=False)
    if isinstance(settings.get("optimizer"), SOLVERS):
        settings["optimizer"] = [settings["optimizer"]] * blocks
    if (cut := settings.get("blocks")) is not None:
        settings["blocks"] = cut + 1 if isinstance(cut, int) else [1, *cut]
    for name in ("rule", "optimizer", "lr", "epochs", "early_stopping"):
        if isinstance(values := settings.get(name), (list, tuple)):
            first = {"rule": frozen(), "optimizer": adam}.get(name, values[0])
            settings[name] = [first, *values]
    return settings
