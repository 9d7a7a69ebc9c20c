"""`load`: a trained model out of a folder that `Run.save` wrote, ready to predict."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.confusion import Confusion, confusion
from tpsgd.engine.device import resolve_device
from tpsgd.engine.evaluate import all_outputs, evaluate, last_module
from tpsgd.engine.record import Run
from tpsgd.engine.settings import ProgressFunction
from tpsgd.engine.sources.inputs import inputs as as_inputs
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
        samples, scaling = as_inputs(x), self.inputs.get("scaling") or {}
        if scaling.get("method") == "bytes":
            if samples.dtype is not torch.uint8:
                raise TpsgdError("the model was trained on bytes (uint8), over 255: pass bytes")
            return as_pixels(samples, samples.to(samples.device, torch.float32))
        new = as_trained(samples, self.inputs)
        return new if isinstance(new, Padded) else torch.as_tensor(new)

    def outputs(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> Tensor:
        """The model's outputs, one number per class for each sample, in the order of samples.

        `progress` is called with (samples done, total).
        """
        outputs = all_outputs(self.model, x, batch_size, progress)
        count = max(2, outputs.shape[1])  # one output is a yes or a no
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
        divided by their sum. None of them is calibrated.
        """
        return self.predict_with_probabilities(x, batch_size=batch_size, progress=progress)[1]

    def predict(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> Tensor:
        """The class with the largest output for each sample, as an index into `classes`."""
        return self.predict_with_probabilities(x, batch_size=batch_size, progress=progress)[0]

    def predict_with_probabilities(
        self, x: Any, *, batch_size: int = 1024, progress: ProgressFunction | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `predict` and `probabilities` return, with one pass through the model."""
        outputs = self.outputs(x, batch_size=batch_size, progress=progress)
        probabilities = _probabilities(outputs, self.model, self.run)
        return (probabilities if outputs.shape[1] == 1 else outputs).argmax(1), probabilities

    def evaluate(self, data: Any, *, batch_size: int = 1024) -> float:
        """The share of samples that are classified correctly, as by `tpsgd.evaluate`."""
        return evaluate(self.model, data, batch_size=batch_size)

    def confusion(self, data: Any, *, batch_size: int = 1024) -> Confusion:
        """Figures per class and the confusion matrix, as by `tpsgd.confusion`."""
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
