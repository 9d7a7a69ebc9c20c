"""`TPSGDClassifier`: an MLP trained without backpropagation, in scikit-learn's conventions."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from tpsgd.engine.inputs import tensor
from tpsgd.engine.lengths import LARGEST
from tpsgd.engine.optimizers import OptimizerFactory, adam
from tpsgd.errors import TpsgdError
from tpsgd.estimators.patience import StreamPatience
from tpsgd.estimators.perceptron import NUMBERS, Perceptron
from tpsgd.estimators.weights import weighted, weighted_cross_entropy, weighted_rows
from tpsgd.losses import cross_entropy
from tpsgd.rules import Rule
from tpsgd.streams.stream import Stream


class TPSGDClassifier(ClassifierMixin, Perceptron):
    """A multi-layer perceptron that learns block by block, as a scikit-learn classifier.

    `float32` samples are learned in float32, about twice as fast; all others in float64. Samples
    are taken as they are: put a `StandardScaler` before the classifier. Only bytes (`uint8`) are
    pixels, as in `fit`: divided by 255, in float32. Sparse matrices are refused.

    Args:
        hidden: the widths of the hidden layers; `()` is a linear classifier.
        rule: how hidden layers learn: a word of `tpsgd rules`, a `tpsgd.rules` value, or a function
            that returns one, such as `functools.partial(tpsgd.rules.readout, scale=2.0)`. Words and
            such functions can be pickled, values cannot.
        activation: of the hidden layers: relu, leaky-relu, tanh, sigmoid, gelu, silu or softplus.
        epochs: the most passes over the samples for each layer; early stopping may end them. None:
            as many as make 1,000 steps, and at least 5.
        batch_size: samples per step. None: the power of two nearest to the root of the number of
            samples, 8 to 128; in `partial_fit` 128.
        optimizer: a factory, `params -> torch.optim.Optimizer`, such as `tpsgd.sgd`; default Adam.
        lr: the learning rate; None is the optimizer's own, 1e-3 for Adam.
        tol: a layer stops when its loss has not improved by this much for `n_iter_no_change`
            epochs. None: a layer takes all its epochs.
        n_iter_no_change: the patience, in epochs of `fit` or calls of `partial_fit`.
        early_stopping: hold `validation_fraction` of the samples out and look at the loss of these.
            The weights are those of the last epoch, not of the best one. In `partial_fit` a sample
            is held out or not by a hash of its numbers, so that it stays on its side when it comes
            again, and the losses of the calls are averaged; once the patience is over, further
            calls change nothing.
        validation_fraction: the share of samples that early stopping holds out.
        class_weight: `{class: weight}`, or "balanced"; multiplied by the weights of samples.
        warm_start: `fit` goes on from the weights of the last `fit`.
        random_state: of the initial weights, the class codes, the order of samples and the samples
            held out.
        device: where to train.
        verbose: show a progress bar with the time left, on a terminal, for a call of more than two
            seconds.

    Attributes:
        classes_: the labels, sorted.
        model_: the trained `nn.Sequential`, whose outputs are logits.
        run_: the record of the last `fit`, a `tpsgd.Run`.
        n_iter_: the most epochs that a layer has taken in the last call.
        n_features_in_, feature_names_in_: the number of features, and the names in a data frame.
        stopped_early_: whether `partial_fit` has stopped learning.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = TPSGDClassifier((32,), lr=0.01, random_state=0).fit(X, y)
        >>> classifier.score(X, y) > 0.9
        True
    """

    def __init__(
        self,
        hidden: int | Sequence[int] = (256,),
        rule: str | Rule | Callable[[], Rule] = "readout-learned",
        *,
        activation: str = "relu",
        epochs: int | None = None,
        batch_size: int | None = None,
        optimizer: OptimizerFactory | None = None,
        lr: float | None = None,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        class_weight: dict[Any, float] | str | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: torch.device | str = "cpu",
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.rule = rule
        self.activation = activation
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr = lr
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "TPSGDClassifier":
        """Train a new net (with `warm_start`, the net of the last `fit`).

        A weight multiplies the sample's loss, in every layer; only their ratios matter. Samples of
        weight 0 are left out. Equal to repeated samples as far as batches are: with weights, a
        batch has `batch_size` different samples.

        Args:
            X: samples, (samples, features).
            y: their classes, numbers or strings.
            sample_weight: their weights; None is 1 for all.
        """
        warm = self.warm_start and hasattr(self, "model_")
        X, y = self._samples(X, y, first=not warm)
        classes = np.unique(y)
        if warm and not np.array_equal(classes, self.classes_):
            raise TpsgdError(
                f"warm_start goes on with the classes {self.classes_.tolist()}, but y has "
                f"{classes.tolist()}: set warm_start=False"
            )
        self.classes_ = classes
        weights = self._weights(X, y, sample_weight)
        if weights is not None:
            heavy = weights > 0
            X, y, weights = X[heavy], y[heavy], weights[heavy]
            weights /= weights.mean() if len(y) else 1.0
        _refuse_one_class(y)
        if not warm:
            self._start(len(classes), X.dtype)
        parts: Any = [X, y] if weights is None else [X, y, weights]
        validation = None
        if self.early_stopping:
            split: Any = train_test_split(
                *parts, test_size=self.validation_fraction, random_state=self._seed, stratify=y
            )
            parts, validation = split[::2], self._data(*split[1::2])
        self._train(
            self._data(*parts), weights is not None, optimizer=self.optimizer or adam,
            validation=validation, early_stopping=self._stopping(),
        )  # fmt: skip
        self._open_stream()
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> "TPSGDClassifier":
        """Go on learning: one pass over these samples, in which every batch trains every layer.

        The optimizer's state and the class codes go on from call to call, so that many calls on
        parts of a data set are one training run. A single sample is a batch, too.

        Args:
            X: samples, (samples, features).
            y: their classes.
            classes: all classes that will ever come; needed in the first call.
            sample_weight: their weights; here they are not divided by their mean.
        """
        first = not hasattr(self, "model_")
        X, y = self._samples(X, y, first)
        classes = self._classes_of_stream(y, classes, first)
        if first:
            self.classes_ = classes
            self._start(len(classes), X.dtype)
            self._open_stream()
        if self.stopped_early_ and self.early_stopping:
            return self
        weights = self._weights(X, y, sample_weight)
        learned = np.ones(len(y), bool) if weights is None else weights > 0
        held_out = np.zeros(len(y), bool)
        if self.early_stopping:
            held_out = learned & self._held_out(X)
        self._learn_pass(X, y, weights, learned & ~held_out)
        if held_out.any():
            self._patience_of_stream.watch(self._loss(X[held_out], y[held_out]), self._patience())
            self.stopped_early_ = self._patience_of_stream.spent
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, (samples, classes), in the order of `classes_`."""
        return torch.softmax(self._outputs(self._inputs(X)), 1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each sample."""
        best = self._outputs(self._inputs(X)).argmax(1).numpy()
        return self.classes_[best]

    def _samples(self, X: Any, y: Any, first: bool) -> tuple[np.ndarray, np.ndarray]:
        """Samples and labels as arrays, checked as scikit-learn does."""
        X, y = validate_data(self, X, y, dtype=NUMBERS, order="C", reset=first)
        check_classification_targets(y)
        self._check_settings(first)
        return self._numbers(X, first), y

    def _classes_of_stream(self, y: np.ndarray, classes: Any, first: bool) -> np.ndarray:
        """The classes of all calls of `partial_fit`."""
        if first and classes is None:
            raise TpsgdError("the first call of partial_fit needs all classes: classes=[...]")
        classes = self.classes_ if classes is None else unique_labels(classes)
        if not first and not np.array_equal(classes, self.classes_):
            raise TpsgdError(
                f"classes={classes.tolist()} are not those of the first call, "
                f"{self.classes_.tolist()}"
            )
        if self.class_weight == "balanced":
            raise TpsgdError(
                'class_weight="balanced" needs all labels at once: in partial_fit, use '
                "class_weight={class: weight}"
            )
        if absent := np.setdiff1d(y, classes).tolist():
            raise TpsgdError(f"y has classes that are not in classes={classes.tolist()}: {absent}")
        return classes

    def _open_stream(self) -> None:
        """The next call of `partial_fit` starts with a new optimizer."""
        self._stream: Stream | None = None
        self._stream_state: dict[str, Any] | None = None
        self._stream_settings: tuple[Any, ...] = ()
        self._patience_of_stream = StreamPatience()
        self.stopped_early_ = False

    def _stream_for(self, has_weights: bool) -> Stream:
        """The stream that the net learns from, which goes on where it was with other settings."""
        settings = has_weights, self.lr, self.batch_size, self.verbose
        if self._stream is not None and settings != self._stream_settings:
            self._stream_state = self._stream.state_dict()
            self._stream = None
        if self._stream is None:
            self._stream = Stream(
                self.model_, rule=weighted(self._rule()) if has_weights else self._rule(),
                loss=weighted_cross_entropy if has_weights else cross_entropy,
                optimizer=self.optimizer or adam, lr=self.lr, seed=self._seed,
                batch_size=int(self.batch_size or LARGEST), progress=bool(self.verbose),
            )  # fmt: skip
            if self._stream_state is not None:
                self._stream.load_state_dict(self._stream_state)
            self._stream_settings, self._stream_state = settings, None
        return self._stream

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle has: of the stream, what goes on from call to call."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        if state.get("_stream") is None:
            return state
        return state | {"_stream": None, "_stream_state": state["_stream"].state_dict()}

    def _weights(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> np.ndarray | None:
        """The weight of each sample, or None if all are 1."""
        weights = _check_sample_weight(
            sample_weight, X, dtype=X.dtype, copy=True, ensure_non_negative=True
        )
        if self.class_weight is not None:
            of_class = compute_class_weight(
                self.class_weight, classes=self.classes_, y=y, sample_weight=weights
            )
            weights *= of_class[np.searchsorted(self.classes_, y)]
        return None if (weights == 1).all() else weights

    def _data(self, X: np.ndarray, y: np.ndarray, weights: Any = None) -> tuple[Tensor, Tensor]:
        """Samples and labels as tensors; with weights, the labels are rows that carry them."""
        dtype = self._layers()[-1].weight.dtype
        labels = torch.from_numpy(np.searchsorted(self.classes_, y))
        if weights is not None:
            weights = torch.from_numpy(weights).to(dtype)
            labels = weighted_rows(labels, weights, len(self.classes_))
        return tensor(X, "X").to(dtype), labels

    def _train(self, data: Any, has_weights: bool, **more: Any) -> None:
        """Train the net by its rule."""
        rule = weighted(self._rule()) if has_weights else self._rule()
        self._run(data, rule, weighted_cross_entropy if has_weights else cross_entropy, **more)

    def _learn_pass(self, X: Any, y: Any, weights: Any, learned: np.ndarray) -> None:
        """One pass over some of the samples."""
        if not learned.any():
            return
        parts = [X, y] if weights is None else [X, y, weights]
        if not learned.all():
            parts = [part[learned] for part in parts]
        self._stream_for(weights is not None).partial_fit(*self._data(*parts))
        self.n_iter_ = 1

    def _held_out(self, X: np.ndarray) -> np.ndarray:
        """Which samples early stopping holds out, by a hash of their numbers."""
        hashes = np.fromiter((crc32(sample.tobytes(), self._seed) for sample in X), np.uint32)
        return hashes < self.validation_fraction * 2**32

    def _loss(self, X: np.ndarray, y: np.ndarray) -> float:
        """The mean cross-entropy of the net's output."""
        loss = float(cross_entropy.value(self._outputs(X), self._data(X, y)[1]))
        return loss if math.isfinite(loss) else math.inf


def _refuse_one_class(y: np.ndarray) -> None:
    present = np.unique(y)
    if len(present) < 2:
        raise TpsgdError(
            f"a classifier needs samples of at least 2 classes, but y has {len(present)} class"
            + (f": {present[0]}" if len(present) else "")
        )
