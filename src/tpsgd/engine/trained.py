"""`load`: a trained model out of a folder that `Run.save` wrote, ready to predict."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.confusion import Confusion, confusion
from tpsgd.engine.device import resolve_device
from tpsgd.engine.evaluate import all_outputs, answers, evaluate, evaluate_numbers, last_module
from tpsgd.engine.record import Run
from tpsgd.engine.settings import ProgressFunction
from tpsgd.engine.sources.inputs import inputs as as_inputs
from tpsgd.engine.sources.inputs import tensor
from tpsgd.losses import mse
from tpsgd.nets.layers import ends_in_maps
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded, as_pixels
from tpsgd.saved import trained
from tpsgd.saved.checkpoint import readable
from tpsgd.saved.scaling import as_trained


@dataclass
class Trained:
    """A trained model with its record, the names of its classes and what its samples look like.

    Samples are given as they were given to `fit`: what `tpsgd.data.load` has scaled is not scaled
    again here. For samples as they are in a file, see `scaled`.

    Attributes:
        model: the model, in evaluation mode.
        run: the record of its training.
        classes: the names of the classes, in the order of the outputs; empty if none were saved.
        inputs: what samples look like, as it was given to `Run.save`.
        versions: of Python, torch and tpsgd when it was saved.
    """

    model: nn.Module
    run: Run
    classes: tuple[str, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.run)

    def scaled(self, x: Any) -> Any:
        """Samples as they were before `tpsgd.data.load` scaled them, scaled in the same way.

        `inputs`, which `run.save(inputs=data.inputs)` stores, says how: bytes are divided by 255,
        tables and series get the shift and the scale of the training samples, and blank cells
        (NaN), if the model was trained with some, their values. Otherwise x is returned as it is.

        Examples:
            >>> scaling = {"method": "standard", "shift": [10.0], "scale": [2.0]}
            >>> trained = Trained(
            ...     nn.Linear(1, 2), Run("readout", 0, {}), inputs={"scaling": scaling}
            ... )
            >>> trained.scaled([[10.0], [14.0]])
            tensor([[0.],
                    [2.]])
        """
        samples: Any = as_inputs(x)
        scaling = self.inputs.get("scaling") or {}
        if scaling.get("method") == "bytes":
            if samples.dtype is not torch.uint8:
                raise TpsgdError("the model was trained on bytes (uint8), over 255: pass bytes")
            return as_pixels(samples, samples.to(samples.device, torch.float32))
        new = as_trained(samples, self.inputs)
        return new if isinstance(new, (Padded, ModelInputs)) else torch.as_tensor(new)

    @property
    def gives_numbers(self) -> bool:
        """Whether it was trained on numbers, not on classes."""
        return "targets" in self.run.settings

    def outputs(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> Tensor:
        """The model's outputs, one number per class for each sample, in the order of samples.

        Of steps and pixels, classes or numbers are in the last dimension. `progress` is called with
        (samples done, total).
        """
        outputs = all_outputs(self.model, x, batch_size, progress)
        if outputs.dim() > 2:
            order = "last" if ends_in_maps(self.model) else "first"
            order = self.run.settings.get("positions", order)
            outputs = outputs.movedim(1, -1) if order == "last" else outputs
        count = max(2, outputs.shape[-1])  # one output is a yes or a no
        if self.classes and len(self.classes) != count:
            names = f"was saved with {len(self.classes)} names of classes"
            raise TpsgdError(f"the model tells {count} classes apart, but {names}")
        return outputs

    def probabilities(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> Tensor:
        """The probability of each class, by the link of the loss that the model was trained with.

        For cross-entropy that is the softmax, for `bce` the sigmoid of each output: rows then need
        not sum to 1, except for a single output, which gives two columns, no and yes. Least squares
        (`mse`, `ridge`, `rls`) estimates probabilities themselves: they are cut off at 0 and
        divided by their sum. None of them is calibrated. Of steps and pixels, classes are in the
        last dimension.
        """
        return self.predict_with_probabilities(x, batch_size=batch_size, progress=progress)[1]

    def predict(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> Tensor:
        """The class with the largest output, as an index into `classes`; or the numbers.

        One for each sample, step or pixel; several numbers are in the last dimension.
        """
        if self.gives_numbers:
            numbers = self.outputs(x, batch_size=batch_size, progress=progress)
            return numbers[..., 0] if numbers.shape[-1] == 1 else numbers
        return self.predict_with_probabilities(x, batch_size=batch_size, progress=progress)[0]

    def predict_with_probabilities(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `predict` and `probabilities` return, with one pass through the model."""
        self._check_of_classes("probabilities: use predict")
        outputs = self.outputs(x, batch_size=batch_size, progress=progress)
        rows = outputs.flatten(0, -2)
        shares = _probabilities(rows, self.model, self.run)
        classes = (shares if rows.shape[1] == 1 else rows).argmax(1)
        return classes.view(outputs.shape[:-1]), shares.view(*outputs.shape[:-1], -1)

    def evaluate(self, data: Any, *, batch_size: int = 1024) -> float:
        """The share of samples that are classified correctly, or R² of numbers."""
        if not self.gives_numbers:
            return evaluate(self.model, data, batch_size=batch_size)
        return evaluate_numbers(self.model, _with_numbers(data), batch_size)

    @torch.no_grad()
    def errors(self, data: Any, *, batch_size: int = 1024) -> Tensor:
        """The mean absolute error of each number, in the units of the labels."""
        if not self.gives_numbers:
            raise TpsgdError("the model was trained on classes: evaluate gives their accuracy")
        pairs = answers(self.model, _with_numbers(data), batch_size, mse)
        return torch.cat([(out - y).abs() for out, y, _ in pairs]).double().mean(0)

    def _check_of_classes(self, noun: str) -> None:
        if self.gives_numbers:
            raise TpsgdError(f"the model was trained on numbers, which have no {noun}")

    def confusion(self, data: Any, *, batch_size: int = 1024) -> Confusion:
        """Figures per class and the confusion matrix, as by `tpsgd.confusion`."""
        self._check_of_classes("confusion matrix: use evaluate")
        return confusion(self.model, data, classes=self.classes, batch_size=batch_size)


def load(
    folder: str | Path, *, factory: str | None = None, device: torch.device | str = "cpu"
) -> Trained:
    """Load a model that `Run.save` or `tpsgd train --save` wrote.

    Nothing in the folder is run: a model is built of modules on a list, and its tensors are plain
    numbers with a checksum. A file that is cut off, edited, of a newer format or of another program
    is refused.

    Args:
        folder: where the model was saved.
        factory: `FILE.py:FUNCTION`, only for a model that was saved with it. The file is run, if
            it has not changed since.
        device: where to put the model.

    Examples:
        >>> import tempfile, tpsgd
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> run = tpsgd.fit(nn.Sequential(nn.Linear(8, 2)), (x, y), epochs=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = run.save(folder)
        ...     trained = tpsgd.load(folder)
        >>> torch.equal(trained.model(x), run.model(x))
        True
    """
    model, content = trained.read(folder, factory)
    model = model.to(resolve_device(device)).eval()
    with readable(Path(folder), "record of the model"):
        run = Run.of(content["run"], model)
        if not isinstance(run.settings, dict) or not isinstance(run.seed, int):
            raise TypeError("settings or seed")
    return Trained(model, run, tuple(content["classes"]), content["inputs"], content["versions"])


def _with_numbers(data: Any) -> Any:
    """Arrays with labels as real numbers, which whole ones may be."""
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    return (data[0], tensor(data[1], "y").float()) if pair else data


def _probabilities(outputs: Tensor, model: nn.Module, run: Run) -> Tensor:
    solved = bool(run.blocks) and run.blocks[-1].learning == "solved"
    loss, last = run.settings.get("loss"), last_module(model)
    if isinstance(last, nn.LogSoftmax):
        return outputs.exp()
    if isinstance(last, nn.Softmax):
        return outputs
    if loss == "bce" or outputs.shape[1] == 1 or isinstance(last, nn.Sigmoid):
        if isinstance(last, nn.Sigmoid):
            yes = outputs
        else:  # solvers aim at 1 for yes and at -1 for no
            yes = ((outputs + 1) / 2).clamp(0, 1) if solved else outputs.sigmoid()
        return yes if outputs.shape[1] > 1 else torch.cat([1 - yes, yes], 1)
    if loss == "mse" or solved:
        positive = outputs.clamp(min=0)
        total = positive.sum(1, keepdim=True)
        return torch.where(total > 0, positive / total.clamp(min=1e-12), outputs.softmax(1))
    return outputs.softmax(1)
