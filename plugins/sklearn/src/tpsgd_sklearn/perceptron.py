"""What the estimators share: a perceptron by its settings, trained by `fit`, and its outputs."""

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.engine.device import resolve_device
from tpsgd.engine.fit import fit
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.lengths import batch_size_for, epochs_for
from tpsgd.engine.record import Run
from tpsgd.engine.settings import EarlyStopping, Memory
from tpsgd.engine.sources.inputs import tensor
from tpsgd.losses import Loss
from tpsgd.rules import Rule, resolve
from tpsgd.zoo.words import ACTIVATIONS, mlp

AT_A_TIME = 1 << 13  # samples whose outputs are computed together
STEPS = 1000  # of a layer: half of those of `fit`, which gain little on tables
NUMBERS = (np.float64, np.float32, np.uint8)  # what X may be of; all else becomes the first


class Perceptron(BaseEstimator):
    """An estimator with a perceptron; the class that inherits it has the settings."""

    hidden: Any
    rule: Any
    activation: str
    epochs: int | None
    batch_size: int | None
    optimizer: Any
    lr: float | None
    tol: float | None
    n_iter_no_change: int
    early_stopping: bool
    validation_fraction: float
    warm_start: bool
    random_state: Any
    device: Any
    verbose: bool
    n_features_in_: int  # set by scikit-learn's `validate_data`
    model_: nn.Sequential
    run_: Run
    n_iter_: int
    _of_bytes: bool

    def _store(self, settings: dict[str, Any]) -> None:
        """Keep the arguments of `__init__` as they are, under their names."""
        for name in self._get_param_names():
            setattr(self, name, settings[name])

    def _samples(self, X: Any, y: Any, first: bool, **checks: Any) -> tuple[np.ndarray, np.ndarray]:
        """Samples and labels as arrays, checked as scikit-learn does; and the settings."""
        X, y = validate_data(self, X, y, dtype=NUMBERS, order="C", reset=first, **checks)
        self._check_settings(first)
        return self._numbers(X, first), y

    def _check_settings(self, first: bool) -> None:
        """Refuse settings that the library does not check itself."""
        if self.activation not in ACTIVATIONS:
            hint = suggestion(str(self.activation), ACTIVATIONS)
            raise TpsgdError(f"unknown activation {self.activation!r}: {hint}")
        for name in ("epochs", "batch_size", "n_iter_no_change"):
            value = getattr(self, name)
            by_the_data = value is None and name != "n_iter_no_change"
            if not by_the_data and (not isinstance(value, (int, np.integer)) or value < 1):
                raise TpsgdError(f"{name} must be a whole number, 1 or more, got {value!r}")
        if self.early_stopping and not 0 < (share := self.validation_fraction) < 1:
            raise TpsgdError(f"validation_fraction must be a number between 0 and 1, got {share!r}")
        if not isinstance(self.verbose, bool | int):
            raise TpsgdError(f"verbose must be True or False, got {self.verbose!r}")
        self._rule()
        widths = self._widths()
        if not first and [m.out_features for m in self._layers()[:-1]] != widths:
            raise TpsgdError(
                f"the net has other hidden layers than hidden={self.hidden!r}: set "
                "warm_start=False and call fit"
            )

    def _widths(self) -> list[int]:
        widths = [self.hidden] if isinstance(self.hidden, int) else list(self.hidden)
        if not all(isinstance(w, (int, np.integer)) and w > 0 for w in widths):
            raise TpsgdError(f"hidden must be widths of 1 or more, got {self.hidden!r}")
        return [int(width) for width in widths]

    def _layers(self) -> list[nn.Linear]:
        return [m for m in self.model_ if isinstance(m, nn.Linear)]

    def _rule(self) -> Rule:
        rule = self.rule() if callable(self.rule) else resolve(self.rule)
        if not isinstance(rule, Rule):
            raise TpsgdError(f"rule must be a word or a tpsgd.rules value, got {self.rule!r}")
        if rule.predictor:
            raise TpsgdError(f"{rule.name} does not predict by the model's output: use tpsgd.fit")
        return rule

    def _start(self, outputs: int, dtype: Any) -> None:
        """A new net."""
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        device, widths = resolve_device(self.device), self._widths()
        number = torch.float32 if dtype == np.float32 else torch.float64
        with torch.random.fork_rng([]):
            torch.manual_seed(self._seed)
            try:
                model = mlp((self.n_features_in_,), widths, outputs, ACTIVATIONS[self.activation])
                self.model_ = model.to(device, number)
            except (MemoryError, RuntimeError, TypeError) as error:  # torch raises all three
                raise TpsgdError(
                    f"a net with hidden={self.hidden!r} does not fit in memory: choose smaller "
                    "widths"
                ) from error

    def _data(self, *arrays: Any) -> tuple[Tensor, Tensor]:
        """Samples and labels as tensors."""
        raise NotImplementedError

    def _train(self, arrays: list[Any], rule: Rule, loss: Loss, stratify: Any = None) -> None:
        """Train the net; early stopping holds a share of the samples out."""
        validation = None
        if self.early_stopping:
            split: Any = train_test_split(
                *arrays, test_size=self.validation_fraction, random_state=self._seed,
                stratify=stratify,
            )  # fmt: skip
            arrays, validation = split[::2], self._data(*split[1::2])
        samples = len(arrays[0])
        batch_size = int(self.batch_size or batch_size_for(samples))
        with warnings.catch_warnings():  # a class may be missing in a call, or weigh nothing
            warnings.filterwarnings("ignore", r"\d+ of \d+ classes have no samples", UserWarning)
            self.run_ = fit(
                self.model_, self._data(*arrays), rule=rule, loss=loss, lr=self.lr,
                epochs=int(self.epochs or epochs_for(-(-samples // batch_size), STEPS)),
                batch_size=batch_size, optimizer=self.optimizer or adam, validation=validation,
                early_stopping=self._early_stopping(),
                seed=self._seed, memory=Memory(measure=False), progress=bool(self.verbose),
            )  # fmt: skip
        self.n_iter_ = max((e.epoch for e in self.run_.history), default=0)

    def _early_stopping(self) -> EarlyStopping | None:
        return None if self.tol is None and not self.early_stopping else self._patience()

    def _patience(self) -> EarlyStopping:
        return EarlyStopping(self.n_iter_no_change, self.tol or 0.0)

    def _numbers(self, X: Any, first: bool) -> np.ndarray:
        """Bytes as pixels, divided by 255; all samples of a net must be bytes, or none."""
        of_bytes = X.dtype == np.uint8
        if first:
            self._of_bytes = of_bytes
        elif of_bytes != self._of_bytes:
            kinds = ("numbers", "bytes (uint8), which are divided by 255")
            raise TpsgdError(
                f"X is of {kinds[of_bytes]}, but the net was trained on {kinds[self._of_bytes]}: "
                "convert X as for training"
            )
        return np.divide(X, 255, dtype=np.float32) if of_bytes else X

    def _predictions(self, X: Any) -> Tensor:
        """The outputs of a trained net for samples that scikit-learn checks."""
        check_is_fitted(self, "model_")
        X = validate_data(self, X, dtype=NUMBERS, order="C", reset=False)
        return self._outputs(self._numbers(X, False))

    @torch.no_grad()
    def _outputs(self, X: np.ndarray) -> Tensor:
        """The net's outputs."""
        first = next(self.model_.parameters())
        self.model_.eval()
        return torch.cat([self.model_(x.to(first)).cpu() for x in tensor(X, "X").split(AT_A_TIME)])
