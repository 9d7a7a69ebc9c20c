"""`TPSGDClassifier`: an MLP trained without backpropagation, in scikit-learn's conventions."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

import tpsgd
from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.optimizers import OptimizerFactory, adam
from tpsgd.engine.lengths import LARGEST
from tpsgd.engine.record import Patience
from tpsgd.engine.sources.inputs import tensor
from tpsgd.losses import Loss, cross_entropy
from tpsgd.rules import Rule
from tpsgd_sklearn.perceptron import Perceptron
from tpsgd_sklearn.weights import weighted, weighted_cross_entropy, weighted_rows


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

    class_weight: dict[Any, float] | str | None

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
        self._store(locals())

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
        present = np.unique(y)
        if len(present) < 2:
            raise TpsgdError(
                f"a classifier needs samples of at least 2 classes, but y has {len(present)} class"
                + (f": {present[0]}" if len(present) else "")
            )
        if not warm:
            self._start(len(classes), X.dtype)
        arrays = [X, y] if weights is None else [X, y, weights]
        self._train(arrays, *self._rule_and_loss(weights is not None), stratify=y)
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
        held_out = learned & self._held_out(X) if self.early_stopping else np.zeros_like(learned)
        if (rows := learned & ~held_out).any():
            arrays = [array[rows] for array in (X, y, weights) if array is not None]
            self._stream_for(weights is not None).partial_fit(*self._data(*arrays))
            self.n_iter_ = 1
        if held_out.any():
            self._watch(X[held_out], y[held_out])
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, (samples, classes), in the order of `classes_`."""
        return torch.softmax(self._predictions(X), 1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each sample."""
        best = self._predictions(X).argmax(1).numpy()
        return self.classes_[best]

    def _samples(self, X: Any, y: Any, first: bool, **checks: Any) -> tuple[np.ndarray, np.ndarray]:
        X, y = super()._samples(X, y, first, **checks)
        check_classification_targets(y)
        return X, y

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
        self._stream: Any = None  # a tpsgd.Stream, from the first call on
        self._stream_state: dict[str, Any] | None = None
        self._stream_settings: tuple[Any, ...] = ()
        self._mean_loss: float | None = None  # of held-out samples, over the latest calls
        self._waiting: Patience | None = None
        self.stopped_early_ = False

    def _stream_for(self, has_weights: bool) -> Any:
        """The stream that the net learns from, which goes on where it was with other settings."""
        settings = has_weights, self.lr, self.batch_size, self.verbose
        if self._stream is not None and settings != self._stream_settings:
            self._stream_state = self._stream.state_dict()
            self._stream = None
        if self._stream is None:
            rule, loss = self._rule_and_loss(has_weights)
            self._stream = tpsgd.Stream(
                self.model_, rule=rule, loss=loss, optimizer=self.optimizer or adam, lr=self.lr,
                seed=self._seed, batch_size=int(self.batch_size or LARGEST),
                progress=bool(self.verbose),
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

    def _rule_and_loss(self, has_weights: bool) -> tuple[Rule, Loss]:
        rule = self._rule()
        return (weighted(rule), weighted_cross_entropy) if has_weights else (rule, cross_entropy)

    def _data(self, *arrays: Any) -> tuple[Tensor, Tensor]:
        """Samples and labels as tensors; with weights, the labels are rows that carry them."""
        dtype, labels = self._layers()[-1].weight.dtype, np.searchsorted(self.classes_, arrays[1])
        y = torch.from_numpy(labels)
        if len(arrays) == 3:
            weights = torch.from_numpy(arrays[2]).to(dtype)
            y = weighted_rows(y, weights, len(self.classes_))
        return tensor(arrays[0], "X").to(dtype), y

    def _held_out(self, X: np.ndarray) -> np.ndarray:
        """Which samples early stopping holds out, by a hash of their numbers."""
        hashes = np.fromiter((crc32(sample.tobytes(), self._seed) for sample in X), np.uint32)
        return hashes < self.validation_fraction * 2**32

    def _watch(self, X: np.ndarray, y: np.ndarray) -> None:
        """Stop learning if the mean loss of held-out samples has not improved for long enough.

        It is an exponential mean over about as many calls as the patience has.
        """
        loss = float(cross_entropy.value(self._outputs(X), self._data(X, y)[1]))
        loss = loss if math.isfinite(loss) else math.inf
        stopping = self._patience()
        self._waiting = self._waiting or Patience(stopping)
        before = loss if self._mean_loss is None else self._mean_loss
        self._mean_loss = before + (loss - before) * 2 / (stopping.patience + 1)
        self.stopped_early_ = self._waiting.spent(self._mean_loss)
