"""`Stream`: a model that goes on learning, from a few samples at a time."""

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import evaluate_numbers, last_module
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.settings import Memory, Settings, listed
from tpsgd.engine.solvers import Recursive
from tpsgd.engine.sources.inputs import inputs, tensor
from tpsgd.engine.sources.inputs import labels as check_labels
from tpsgd.features.last_good import LastGood
from tpsgd.features.progress_bar import Progress, bar_unless
from tpsgd.features.run_identity import describe_optimizer, difference
from tpsgd.losses import Loss, bce, mse
from tpsgd.maths.kernels.epoch_figures import hits
from tpsgd.maths.random import Key, permutation
from tpsgd.nets.blocks import has_batch_norm
from tpsgd.nets.layers import ends_in_maps
from tpsgd.nets.new_classes import outputs_of
from tpsgd.rules import Rule, default, frozen, resolve
from tpsgd.targets import Target
from tpsgd.train import simultaneous
from tpsgd_streams import saved_stream
from tpsgd_streams.labels import Classes, is_rows, plain
from tpsgd_streams.one_sample import OneSample
from tpsgd_streams.online import OnlineNet
from tpsgd_streams.other_labels import mistakes
from tpsgd_streams.readers import EXAMPLES, ModelReader, samples_of
from tpsgd_streams.rehearsal import Rehearsal


class DriftDetector(Protocol):
    """Anything that looks at errors one after another, such as `river.drift.ADWIN()`."""

    @property
    def drift_detected(self) -> bool: ...
    def update(self, value: float) -> Any: ...


class Stream(OneSample):
    """A model that learns from samples as they come, without backpropagation or stored data.

    Every call of `partial_fit` takes a step of every block for each batch. Optimizers, class codes
    and the sums of `rls()` go on from call to call, so that many calls are one training run. A
    label that has not come before becomes a new class: the last layer and the class codes get a
    row, and all other rows stay as they are.

    Labels may be real numbers, too: they are standardised by the mean and the deviation of all that
    have come, and the model gives their own units. Or there is a class, or a number, for every step
    or pixel, and -100 where there is none. What labels are is settled by the first call; name
    loss="mse" for numbers that may all be 0 or 1 there.

    Args:
        model: any model that `tpsgd.fit` can train, also of several inputs, or an adaptor
            (`tpsgd.adapt`), whose layers learn.
        rule: as for `tpsgd.fit`. Default: `rules.default()`; with `rls()`, `rules.frozen()`.
        loss: as for `tpsgd.fit`.
        optimizer: as for `tpsgd.fit`, or one per block. `tpsgd.rls()` solves the last layer after
            every batch, on the features of hidden layers that stay as they are.
        lr: overrides the optimizer's learning rate.
        classes: the names of the model's outputs. Without names, labels are indices, and the next
            new class has the next index.
        rehearsal: `tpsgd.Rehearsal("100KB")`: earlier samples that are learned again with new ones.
        drift: a detector with `update(error)` and `drift_detected`, such as `river`'s. It gets 1
            for each sample that is predicted wrongly and 0 for each other, before the model learns
            from them; of numbers the absolute error in their units, of steps or pixels the share
            that is wrong.
        on_drift: called with this stream, once for a batch in which the detector says so.
        batch_size: the most new samples of a step. Samples of one call are shuffled.
        seed: of the class codes, the order of samples and dropout.
        device: where to learn; default: where the model is.
        progress: as for `tpsgd.fit`: by default, a call of more than two seconds shows a bar on a
            terminal.

    Attributes:
        model: the model itself.
        classes: the names, or the indices, of its classes; none if labels are numbers.
        samples: how many samples came.
        drifts: after how many samples the detector found a drift.

    Examples:
        >>> x, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> stream = Stream(model)
        >>> for start in range(0, 100, 10):
        ...     _ = stream.partial_fit(x[start : start + 10], y[start : start + 10])
        >>> _ = stream.partial_fit(x[0], 2)  # a single sample, of a new class
        >>> stream.classes, model(x).shape
        ((0, 1, 2), torch.Size([100, 3]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rule: Rule | Sequence[Rule] | None = None,
        loss: Loss | None = None,
        optimizer: Any = adam,
        lr: float | Sequence[float] | None = None,
        classes: Sequence[Hashable] | None = None,
        rehearsal: Rehearsal | None = None,
        drift: DriftDetector | None = None,
        on_drift: Callable[["Stream"], Any] | None = None,
        batch_size: int = 32,
        seed: int = 0,
        device: torch.device | str | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TpsgdError(f"a stream needs an nn.Module, got {type(model).__name__}")
        if rehearsal is not None and not isinstance(rehearsal, Rehearsal):
            raise TpsgdError(f'rehearsal must be tpsgd.Rehearsal("100KB"), got {rehearsal!r}')
        if classes is not None and not isinstance(classes, Sequence):
            raise TpsgdError(f"classes must be a list of names, got {classes!r}")
        if on_drift is not None and drift is None:
            raise TpsgdError("on_drift, a function of the stream, needs a detector, drift=")
        self._settings = Settings(
            order=simultaneous, loss=loss, optimizer=optimizer, lr=lr, epochs=1,
            batch_size=batch_size, seed=seed, device=device, progress=progress,
            memory=Memory(slices=1, measure=False),
        )  # fmt: skip
        if rule is None:  # a layer that is solved needs inputs that stay as they are
            rule = frozen() if isinstance(optimizer, Recursive) else default()
        self.model, self._rule = model, resolve(rule)
        if any(each.predictor for each in listed(self._rule)):
            raise TpsgdError(
                "a stream predicts by the model's output, and its rule by something else: use fit"
            )
        make_reader: Any = getattr(model, "stream_reader", None)
        self._reader = ModelReader(model) if make_reader is None else make_reader()
        self._nets = [OnlineNet(net, self._rule, self._settings) for net in self._reader.nets]
        names = self._reader.names if classes is None else classes
        self._classes = Classes(names, outputs_of(self._reader.nets[0]))
        self._target: Target | None = None  # of labels that are no classes of samples
        self.rehearsal, self.drift, self.on_drift = rehearsal, drift, on_drift
        self._last_good = LastGood()
        self.samples, self.drifts, self._calls = 0, list[int](), 0
        self._has_batch_norm = any(has_batch_norm(net.modules()) for net in self._reader.nets)

    @property
    def classes(self) -> tuple[Any, ...]:
        """The names of the classes, in the order of the outputs; indices if they have none."""
        return () if self._numbers else tuple(self._classes.names)

    @property
    def _numbers(self) -> bool:
        return self._nets[0].numbers

    def partial_fit(self, x: Any, y: Any) -> "Stream":
        """Learn from some samples: one step of every block for each batch of them.

        Samples that cannot be learned from are refused before anything changes. If a loss becomes
        NaN or infinite, the stream goes back to the weights that gave a finite one.

        Args:
            x: samples as for `tpsgd.fit`, or a single one.
            y: their labels: names or indices of classes, old or new; or float rows, numbers, or
                labels of every step or pixel, as for `tpsgd.fit`. A single label for a single
                sample.
        """
        x, y = samples_of(x, y)
        y = y if self._classes.named else tensor(y, "y")
        self._check(x, y)
        new, target = [], self._other_target(x, y)
        if target is None:
            new = self._classes.new(y)
            labels = self._classes.indices(y, self._settings.loss, new)
        else:
            labels = self._other_labels(y, target)
        if new:
            for net, seen in zip(self._nets, self._reader.inputs(x[:EXAMPLES]), strict=True):
                net.check_new_class()
                net.check(seen)
        for name in new:
            self.add_class(name)
        done = 0
        with bar_unless(self._settings.progress) as show:
            for index in self._batches(len(x)):
                self._learn(x[index], labels[index])
                done += len(index)
                if show is not None:
                    show(done, len(x))
        self._calls += 1
        return self

    def add_class(self, name: Hashable = None) -> None:
        """One more class, whose output is 0 before its first sample; other outputs stay.

        `partial_fit` does it for a label that is new. Without names, the class gets the next index.
        """
        if self._numbers:
            raise TpsgdError("the labels of this stream are numbers: there are no classes to add")
        name = self._classes.check_new(name)
        for net in self._nets:
            net.check_new_class()
        self._last_good.drop()
        for net in self._nets:
            net.add_class()
        self._reader.add_class(str(name))
        self._classes.add(name)

    def outputs(self, x: Any, *, batch_size: int = 1024) -> Tensor:
        """One number per class for each sample, or for each of its steps or pixels; or numbers."""
        return self._reader.outputs(inputs(x), batch_size)

    def predict(self, x: Any, *, batch_size: int = 1024) -> list[Any]:
        """The class of each sample, as labels are passed to `partial_fit`; or its numbers.

        With labels of every step or pixel, lists of them.
        """
        out = self.outputs(x, batch_size=batch_size)
        last = self._nets[0].dim_of_classes(out)
        if self._numbers:
            return out.squeeze(last).tolist()
        best = out.argmax(last).tolist()
        return [self._classes.names[i] for i in best] if out.dim() == 2 else best

    def probabilities(self, x: Any) -> Tensor:
        """Each sample's probabilities of the classes: the softmax of its outputs."""
        if self._numbers:
            raise TpsgdError("the labels of this stream are numbers: there are no probabilities")
        out = self.outputs(x)
        return out.softmax(self._nets[0].dim_of_classes(out))

    def evaluate(self, data: Any, *, batch_size: int = 1024) -> float:
        """The share of samples of `(x, y)` whose class is predicted; a new class is an error.

        R² of numbers; with labels of every step or pixel, the share of these.
        """
        x, y = samples_of(*data)
        y = y if self._classes.named else tensor(y, "y")
        if self._numbers:
            return evaluate_numbers(self.model, (x, y.float()), batch_size)
        if is_rows(y) or getattr(y, "ndim", 1) > 1:
            return self._reader.evaluate((x, tensor(y, "y")))
        predicted = self.predict(x, batch_size=batch_size)
        return sum(map(operator.eq, predicted, plain(y))) / len(y)

    def state_dict(self) -> dict[str, Any]:
        """What goes on from call to call besides the weights, `model.state_dict()`, as copies."""
        state = {
            "classes": self._classes.described,
            "identity": self._identity(),
            "samples": self.samples,
            "names": None if self._names is None else list(self._names),
            "calls": self._calls,
            "drifts": self.drifts,
            "nets": [net.current_state() for net in self._nets],
            "rehearsal": None if self.rehearsal is None else self.rehearsal.state_dict(),
        }
        return deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stream of such a model was, with the same classes.

        Rule, optimizer, seed and the shapes of the weights must be the same; the learning rate, the
        size of batches and the detector of drifts need not be.
        """
        if not isinstance(state, dict) or set(state) != set(self.state_dict()):
            raise TpsgdError("this is no state of a stream: pass what state_dict() returned")
        if (before := state["classes"]) != (now := self._classes.described):
            raise TpsgdError(f"the state is of classes {before}, the stream has {now}")
        if problem := difference(state["identity"], self._identity()):
            raise TpsgdError(f"the state is of another stream: {problem}")
        if (state["rehearsal"] is None) != (self.rehearsal is None):
            raise TpsgdError("the state and the stream must both have a rehearsal buffer, or none")
        if self.rehearsal is not None:
            self.rehearsal.load_state_dict(state["rehearsal"])
        for net, of_net in zip(self._nets, state["nets"], strict=True):
            net.resume(deepcopy(of_net))
        self._target = None
        if self._numbers and self._settings.loss is None:
            self._choose_mse()
        self._last_good.drop()
        self._names = None if state["names"] is None else tuple(state["names"])
        self.samples, self._calls = state["samples"], state["calls"]
        self.drifts = list(state["drifts"])

    def save(
        self, folder: str | Path, *, factory: str | None = None, overwrite: bool = False
    ) -> Path:
        """Write the model and all that goes on from call to call into a folder, for `Stream.load`.

        Rule, loss, optimizer, rates, classes and the rehearsal buffer go with it; a detector of
        drifts does not. The model may be one that `Run.save` can save; an adaptor has its own
        `save`.

        Args:
            folder: made if it does not exist.
            factory: as for `Run.save`: `FILE.py:FUNCTION`, for a model of your own class.
            overwrite: replace a stream that the folder holds. A process that is killed meanwhile
                leaves the old stream or the new one.
        """
        return saved_stream.write(self, folder, factory, overwrite)

    @classmethod
    def load(cls, folder: str | Path, *, factory: str | None = None, **settings: Any) -> "Stream":
        """A stream that `save` has written, to go on with bit for bit.

        No code is run, except for the file of a `factory`.

        Args:
            folder: where the stream was saved.
            factory: `FILE.py:FUNCTION` that it was saved with; the file must be the same.
            settings: as for `Stream`: a detector of drifts, a device, another learning rate; and
                the rule, the optimizer or the loss if they are your own.
        """
        return saved_stream.read(cls, folder, factory, settings)

    def _identity(self) -> dict[str, Any]:
        """What a stream that goes on from the state must have in common with this one."""
        rules, one = listed(self._rule), {"weight": torch.zeros(1)}
        factories = listed(self._settings.optimizer)
        optimizers = ["none" if f is None else describe_optimizer(f, one) for f in factories]
        tensors = [pair for net in self._reader.nets for pair in net.state_dict().items()]
        return {
            "rule": [rule.name for rule in rules],
            "options": [str(rule) for rule in rules],
            "optimizer": [re.split(r"\W", words)[0] for words in optimizers],
            "seed": self._settings.seed,
            "model": [f"{name} of shape {tuple(t.shape)}" for name, t in tensors],
        }

    def _check(self, x: Any, y: Any) -> None:
        """Refuse samples before anything changes."""
        if not len(x):
            raise TpsgdError("there are no samples to learn from")
        self._reader.check(x)
        if self._settings.loss is bce and len(self._classes) == 1 and not is_rows(y):
            raise TpsgdError(
                "a single yes-or-no output cannot tell classes apart in a stream: give the model "
                "an output for each class"
            )
        if self.rehearsal is not None:
            self.rehearsal.check(x, is_rows(y) or getattr(y, "ndim", 1) > 1)
        if len(x) == 1 and not self.rehearsal and self._has_batch_norm:  # none, or an empty one
            raise TpsgdError(
                "batch normalisation needs at least 2 samples in a step: pass more than one, or "
                "build the model with nn.GroupNorm"
            )

    def _other_target(self, x: Any, y: Any) -> Target | None:
        """What labels are, if they are numbers or those of positions."""
        if self._target is not None or not isinstance(y, Tensor):
            return self._target
        loss, maps = self._settings.loss, ends_in_maps(self.model)
        output = tuple(self._reader.outputs(x[:EXAMPLES], EXAMPLES).shape[1:])
        whole = loss is not None and loss.of_numbers and output[0] == 1
        target = Target.of(y.float() if whole else y, loss, all_of_them=False).at(output, maps)
        if not target.numbers and not target.positions:
            return None
        if self._classes.named and target.numbers:
            raise TpsgdError("these labels are numbers, and classes are named: leave classes out")
        return target

    def _other_labels(self, y: Any, target: Target) -> Tensor:
        """Such labels, checked; from now on all must be so."""
        y = tensor(y, "y")
        y = y.float() if target.numbers and not y.is_floating_point() else y
        check_labels(y, self._settings.loss, len(self._classes), False, target)
        self._target = target
        if target.numbers and self._settings.loss is None:
            self._choose_mse()
        return y

    def _choose_mse(self) -> None:
        """The loss of numbers, by which later labels are known to be such."""
        self._settings = replace(self._settings, loss=mse)
        for net in self._nets:
            net.settings = self._settings

    def _batches(self, samples: int) -> Iterator[Tensor]:
        """Indices of a call's samples, in random order; batch norm gets no batch of one."""
        key = Key(self._settings.seed, 0, self._calls)
        batches = list(torch.cat(list(permutation(samples, key))).split(self._settings.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1 and self._has_batch_norm:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield from batches

    def _learn(self, x: Any, labels: Tensor) -> None:
        """Learn from a batch, with earlier samples if there are some."""
        if self.drift is not None:
            self._watch(self.drift, x, labels)
        buffer = self.rehearsal
        self._step(*(x, labels) if buffer is None else buffer.mixed(x, labels))
        self.samples += len(x)
        if buffer is not None:
            buffer.add(x, labels)

    def _step(self, x: Any, labels: Tensor) -> None:
        """One step of every net; after a loss that is not finite, back to the last good weights."""
        copies, states = self._last_good.copies, [net.current_state() for net in self._nets]
        self._last_good.keep(self._tensors(), states)
        try:
            nets = zip(self._nets, self._reader.inputs(x), strict=True)
            problems = [net.learn(seen, labels) for net, seen in nets]
        except BaseException:
            if copies:
                self._go_back(-1)
                copies.pop()
            raise
        if problem := next(filter(None, problems), ""):
            where = "the weights are lost (those of more than 64 MB are not copied)"
            if copies:
                when = "the step before" if len(copies) > 1 else "this step"
                where = f"the model and the stream are as they were before {when}"
                self._go_back(0)
            self._last_good.drop()
            raise TpsgdError(f"{problem}; {where}")

    def _tensors(self) -> list[Tensor]:
        return [t for net in self._nets for t in (*net.model.parameters(), *net.model.buffers())]

    def _go_back(self, number: int) -> None:
        states = self._last_good.restore(number, self._tensors())
        for net, state in zip(self._nets, states, strict=True):
            net.resume(state)

    def _watch(self, detector: DriftDetector, x: Any, labels: Tensor) -> None:
        """Tell the detector which samples of a batch the model, before it learns, gets wrong."""
        drifted, out = False, self.outputs(x, batch_size=len(x))
        if self._target is not None:
            errors = mistakes(out, labels, self._target)
        else:
            cut = 0.5 if isinstance(last_module(self._reader.nets[0]), nn.Sigmoid) else 0.0
            y, multi_label = labels.to(out.device), self._settings.loss is bce
            errors = 1 - hits((out - cut)[:, None], y[:, None], multi_label)
        try:
            for wrong in errors.tolist():
                detector.update(wrong)
                drifted = drifted or detector.drift_detected
        except Exception as error:
            kind, reason = type(detector).__name__, f"{type(error).__name__}: {error}"
            raise TpsgdError(f"the drift detector {kind} failed with {reason}") from error
        if drifted:
            self.drifts.append(self.samples)
            if self.on_drift is not None:
                self.on_drift(self)
