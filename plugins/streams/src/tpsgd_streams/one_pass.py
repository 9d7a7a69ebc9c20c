"""`OnePass`: a classifier that reads each sample once, in any order, and forgets none."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.solvers import Recursive, Ridge, ridge
from tpsgd.engine.sources.inputs import check_finite, inputs
from tpsgd.saved.expected import check_count
from tpsgd_streams.labels import Classes, is_rows, plain
from tpsgd_streams.one_sample import OneSample
from tpsgd_streams.random_features import RandomFeatures
from tpsgd_streams.readers import samples_of
from tpsgd_streams.recursion import RecursiveHead
from tpsgd_streams.solved_heads import Discriminant, DiscriminantHead, RidgeHead, SolvedHead

Solver = Ridge | Recursive | Discriminant


class OnePass(OneSample):
    """Random features and a head that is solved: each sample is read once, and none is stored.

    After any number of calls of `partial_fit` the head is the solution for all samples that came,
    whatever their order: classes may come one after another, and none is forgotten. There is no
    learning rate and no epoch.

    Args:
        features: how many random features h = relu(W x); 0: the samples themselves, or what the
            encoder makes of them. More are more accurate; the sums take features² numbers.
        solver: `tpsgd.ridge()`, whose penalty a fifth of the samples chooses, which is held out
            and learned from afterwards; `tpsgd.ridge(alpha)`; `tpsgd.rls(gamma)`, solved after
            every sample; or `tpsgd.lda()`, streaming linear discriminant analysis.
        direct: the head sees the inputs of the random features, too.
        encoder: a frozen encoder in front: an `nn.Module`, `tpsgd.adapt.backbone(...)`, or any
            function of a batch. Maps and tokens are averaged.
        classes: their names, if the order of the outputs matters. Others are added as they come.
        forgetting: a factor such as 0.999, by which an earlier sample counts less for every later
            one of its class; with `rls()`, for every later one. Default: 1. Below 1, `ridge()` and
            `lda()` have sums for each class.
        bound: with `rls()` and `forgetting`, of the trace of the inverse of the products of
            features. Above it nothing more is forgotten, so that classes that have not come for
            long are not lost. Default: ten times the trace before the first sample.
        seed: of the random features.

    Attributes:
        classes: the labels, in the order of the outputs.
        samples: how many samples came.

    Examples:
        >>> x, y = torch.randn(300, 8), torch.arange(300) % 3
        >>> x[:, 0] += 4 * y
        >>> model = OnePass(50)
        >>> for label in range(3):
        ...     _ = model.partial_fit(x[y == label], y[y == label])
        >>> bool(model.evaluate((x, y)) > 0.6)
        True
    """

    def __init__(
        self,
        features: int = 1000,
        *,
        solver: Solver | None = None,
        direct: bool = False,
        encoder: Callable[[Any], Any] | None = None,
        classes: Sequence[Hashable] = (),
        forgetting: float = 1.0,
        bound: float | None = None,
        seed: int = 0,
    ) -> None:
        self.solver = ridge() if solver is None else solver
        if not isinstance(self.solver, Solver):
            raise TpsgdError(
                f"solver must be tpsgd.ridge(), tpsgd.rls() or tpsgd.lda(), got {solver!r}"
            )
        _check_forgetting(self.solver, forgetting, bound)
        self.forgetting, self.bound = forgetting, bound
        self._features = RandomFeatures(features, seed, encoder, direct)
        if not hasattr(classes, "__len__"):
            raise TpsgdError(f"classes must be a list of different names, got {classes!r}")
        self._classes = Classes(classes, len(classes))
        self._head: SolvedHead | None = None  # before the first sample
        self._solution: tuple[Tensor, Tensor] | None = None
        self.samples = 0

    @property
    def classes(self) -> tuple[Any, ...]:
        """The labels, in the order of the outputs."""
        return tuple(self._classes.names)

    @property
    def nbytes(self) -> int:
        """The bytes of what is learned and of the random features."""
        layer, width = self._features.layer, self._features.width
        own = layer.weight.nbytes if layer is not None and width else 0
        return own + (0 if self._head is None else _bytes_of(self._head.state()))

    def partial_fit(self, x: Any, y: Any) -> "OnePass":
        """Learn from some samples, or from a single one.

        Samples that cannot be learned from are refused before anything changes.

        Args:
            x: samples in one tensor or array.
            y: a label for each, of any kind; a single label for a single sample.
        """
        x, y = samples_of(x, y)
        if is_rows(y):
            raise TpsgdError("OnePass needs one class for each sample, not rows of numbers")
        self._check(x)
        new = self._classes.new(y)
        features = copy(self._features)  # the first sample settles their form
        labels, batches = self._classes.indices(y, new=new), list(features.rows(x))
        head = self._new_head(features.columns) if self._head is None else copy(self._head)
        for _ in new:
            head.add_class()
        targets = nn.functional.one_hot(labels, len(self.classes) + len(new)).double()
        for few, h in batches:
            head.add(x[few], h, targets[few])  # one that refuses samples changes nothing
        for name in new:
            self._classes.add(name)
        self._features, self._head, self._solution = features, head, None
        self.samples += len(x)
        return self

    def outputs(self, x: Any) -> Tensor:
        """A number per class for each sample, in float64."""
        x = inputs(x)
        self._check(x)
        weight, bias = self._solved()
        return torch.cat([h @ weight + bias for _, h in self._features.rows(x)])

    def predict(self, x: Any) -> list[Any]:
        """The class of each sample."""
        return [self.classes[i] for i in self.outputs(x).argmax(1).tolist()]

    def evaluate(self, data: Any) -> float:
        """The share of samples of `(x, y)` whose class is predicted; a new class is an error."""
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise TpsgdError(f"evaluate takes (x, y), got {type(data).__name__}")
        x, y = samples_of(*data)
        pairs = zip(self.predict(x), plain(y), strict=True)
        return sum(name == label for name, label in pairs) / len(y)

    def probabilities(self, x: Any) -> Tensor:
        """Each sample's probabilities of the classes, estimated by the outputs.

        Outputs of least squares are cut at 0 and divided by their sum.
        """
        out = self.outputs(x)
        if isinstance(self.solver, Discriminant):
            return out.softmax(1)
        out = out.clamp(min=1e-9)
        return out / out.sum(1, keepdim=True)

    def merge(self, other: "OnePass") -> "OnePass":
        """Learn all that another model has learned: as if its samples had come here.

        Both need the same settings; classes are matched by their names.
        """
        if not isinstance(other, OnePass):
            raise TpsgdError(f"merge takes another OnePass, got {type(other).__name__}")
        if other is self:
            raise TpsgdError("a model cannot be merged with itself: its samples would count twice")
        if self._head is not None and other._head is not None:
            self._check_same(other._identity())
        if other._head is None:
            return self
        if isinstance(self.solver, Recursive):
            other._head.merge(self._head, [])  # which says why not
        new = [name for name in other.classes if name not in self._classes.names]
        checked = [self._classes.check_new(name) for name in new]
        if self._head is None:
            self._check_same(other._identity() | self._form())
            self._features.start(other._features.shape or (), other._inputs)
            self._head, self._names = self._new_head(self._features.columns), other._names
        for name in checked:
            self._classes.add(name)
            self._head.add_class()
        columns = [self._classes.names.index(name) for name in other.classes]
        self._head.merge(other._head, columns)
        self._solution = None
        self.samples += other.samples
        return self

    def layers(self) -> nn.Sequential:
        """The random layer and the head as plain layers in float32, without the encoder.

        `tpsgd.export`, `tpsgd.evaluate` and `tpsgd.fit` take them.
        """
        return self._features.plain(*self._solved())

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as plain values and tensors; the encoder is not part of it."""
        state = None if self._head is None else self._head.state()
        labels = {"samples": self.samples, "classes": list(self.classes)}
        return deepcopy({"identity": self._identity(), **labels, "head": state})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another model with the same settings was."""
        if not isinstance(state, dict) or set(state) != set(self.state_dict()):
            raise TpsgdError("this is no state of a OnePass: pass what state_dict() returned")
        now, was = self._identity(), state["identity"]
        if self._head is None and isinstance(was, dict):
            now |= {name: was[name] for name in self._form() if name in was}
        if was != now:
            raise TpsgdError(f"the state is of {was}, this model has {now}")
        loaded = OnePass(
            self._features.width, direct=self._features.direct, solver=self.solver,
            encoder=self._features.encoder, classes=state["classes"],
            forgetting=self.forgetting, bound=self.bound, seed=self._features.seed,
        )  # fmt: skip
        try:
            loaded.samples = check_count("samples", state["samples"])
            if state["head"] is not None:
                inputs = check_count("inputs", was["inputs"], least=1)
                loaded._features.start(tuple(was["shape"]), inputs)
                loaded._names = None if was["names"] is None else tuple(was["names"])
                loaded._head = loaded._new_head(loaded._features.columns)
                loaded._head.restore(deepcopy(state["head"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TpsgdError(f"the state is damaged: {error}") from error
        vars(self).update(vars(loaded))

    @property
    def _inputs(self) -> int:
        layer = self._features.layer
        return 0 if layer is None else layer.in_features

    def _new_head(self, columns: int) -> SolvedHead:
        size = columns, len(self._classes)
        if isinstance(self.solver, Ridge):
            return RidgeHead(*size, self.solver.alpha, self.forgetting)
        if isinstance(self.solver, Discriminant):
            return DiscriminantHead(*size, self.solver.shrinkage, self.forgetting)
        return RecursiveHead(*size, self.solver.gamma, self.forgetting, self.bound)

    def _check(self, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise TpsgdError("OnePass takes samples of one tensor and one shape: pad sequences")
        if not len(x):
            raise TpsgdError("there are no samples")
        check_finite(x)
        self._features.check(x)

    def _solved(self) -> tuple[Tensor, Tensor]:
        if self._head is None:
            raise TpsgdError("nothing was learned yet: call partial_fit or learn_one first")
        if self._solution is None:
            self._solution = self._head.solution()
        return self._solution

    def _identity(self) -> dict[str, Any]:
        """What two models must have in common to go on from each other."""
        return {
            "solver": repr(self.solver), "features": self._features.width,
            "direct": self._features.direct, "seed": self._features.seed,
            "forgetting": self.forgetting, "bound": self.bound, **self._form(),
        }  # fmt: skip

    def _form(self) -> dict[str, Any]:
        """What the first sample settles: shape, names, how many numbers the encoder gives."""
        shape, names = (None if t is None else list(t) for t in (self._features.shape, self._names))
        return {"shape": shape, "names": names, "inputs": self._inputs}

    def _check_same(self, other: dict[str, Any]) -> None:
        own = self._identity()
        if names := [name for name in own if own[name] != other[name]]:
            name = names[0]
            raise TpsgdError(
                f"models with different {name} cannot be merged: {own[name]} and {other[name]}"
            )


def _check_forgetting(solver: Solver, forgetting: float, bound: float | None) -> None:
    if not isinstance(forgetting, (int, float)) or not 0 < forgetting <= 1:
        raise TpsgdError(f"forgetting must be a number above 0, at most 1, got {forgetting!r}")
    if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
        raise TpsgdError(f"bound must be a number above 0, got {bound!r}")
    if bound is not None and (forgetting == 1 or not isinstance(solver, Recursive)):
        raise TpsgdError("bound is of solver=tpsgd.rls() with a forgetting factor below 1")


def _bytes_of(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(map(_bytes_of, state.values())) if isinstance(state, dict) else 0
