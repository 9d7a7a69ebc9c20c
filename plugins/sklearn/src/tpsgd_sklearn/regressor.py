"""`TPSGDRegressor`: a perceptron by local rules for numbers instead of classes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.optimizers import OptimizerFactory
from tpsgd.engine.sources.inputs import tensor
from tpsgd.losses import mse
from tpsgd.rules import Rule
from tpsgd_sklearn.perceptron import Perceptron


class TPSGDRegressor(RegressorMixin, Perceptron):
    """A multi-layer perceptron that learns block by block, as a scikit-learn regressor.

    It is `tpsgd.fit` on labels that are numbers: they are standardised, `readout` reads them out of
    every hidden layer through fixed random weights, by squared error, and other rules get them as
    projected targets P y*. `readout` and `dfa` are the rules that beat random hidden
    layers. `readout-learned`, elsewhere the default, was no better here.

    Args:
        hidden: the widths of the hidden layers; `()` is linear regression.
        rule: how hidden layers learn, as for `TPSGDClassifier`; not `predsim`.
        activation: as for `TPSGDClassifier`, and so are the other settings.
        epochs: the most passes over the samples for each layer.
        batch_size: samples per step.
        optimizer: a factory, `params -> torch.optim.Optimizer`; default Adam.
        lr: the learning rate; None is the optimizer's own.
        tol: how much a layer's loss must improve within `n_iter_no_change` epochs.
        n_iter_no_change: the patience, in epochs.
        early_stopping: hold samples out and look at the loss of these.
        validation_fraction: the share of samples that early stopping holds out.
        warm_start: `fit` goes on from the weights of the last `fit`.
        random_state: of all random choices.
        device: where to train.
        verbose: show a progress bar with the time left, on a terminal, for a call of more than two
            seconds.

    Attributes:
        model_: the trained `nn.Sequential`, whose outputs are the targets.
        run_: the record of the last call, a `tpsgd.Run`.
        n_iter_: the most epochs that a layer has taken.
        constants_: of targets that are the same in all samples, this number, else NaN: they are
            predicted as they are.

    Examples:
        >>> from sklearn.datasets import make_friedman1
        >>> X, y = make_friedman1(500, random_state=0)
        >>> regressor = TPSGDRegressor((64,), lr=0.01, epochs=30, random_state=0).fit(X, y)
        >>> regressor.score(X, y) > 0.8
        True
    """

    def __init__(
        self,
        hidden: int | Sequence[int] = (256,),
        rule: str | Rule | Callable[[], Rule] = "readout",
        *,
        activation: str = "relu",
        epochs: int = 200,
        batch_size: int = 128,
        optimizer: OptimizerFactory | None = None,
        lr: float | None = None,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        random_state: Any = None,
        device: torch.device | str = "cpu",
        verbose: bool = False,
    ) -> None:
        self._store(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> "TPSGDRegressor":
        """Train a new net (with `warm_start`, the net of the last `fit`).

        Args:
            X: samples, (samples, features).
            y: their targets, (samples,) or (samples, targets).
        """
        warm = self.warm_start and hasattr(self, "model_")
        X, y = self._samples(X, y, not warm, multi_output=True, y_numeric=True)
        rows = y.astype(np.float64).reshape(len(y), -1)
        if warm and rows.shape[1] != self._layers()[-1].out_features:
            raise TpsgdError("y has another number of targets than before: set warm_start=False")
        if not warm:
            self._one_target = y.ndim == 1
            self.constants_ = _constants(rows)
            self._start(rows.shape[1], X.dtype)
        elif (rows != self.constants_)[:, ~np.isnan(self.constants_)].any():
            raise TpsgdError("y had the same value in all samples before: set warm_start=False")
        self._train([X, rows], self._rule(), mse)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The target of each sample."""
        outputs = self._predictions(X).double().numpy()
        outputs = np.where(np.isnan(self.constants_), outputs, self.constants_)
        return outputs[:, 0] if self._one_target else outputs

    def _data(self, *arrays: Any) -> tuple[Tensor, Tensor]:
        dtype = self._layers()[-1].weight.dtype
        return tensor(arrays[0], "X").to(dtype), torch.from_numpy(arrays[1])


def _constants(rows: np.ndarray) -> np.ndarray:
    """The targets that are the same in all samples; NaN for the others."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(rows.std(0)).all():
            raise TpsgdError(
                f"y has numbers of up to {np.abs(rows).max():.3g}, too large for a deviation: "
                "divide y"
            )
    return np.where((rows == rows[0]).all(0), rows[0], np.nan)
