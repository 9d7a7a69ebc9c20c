"""`export.onnx`: the training step as a graph for stock onnxruntime, checked before it is written.

Beside the graph: `predict.onnx`, the weights to begin with, and `run.py`, which trains and
evaluates with onnxruntime and numpy alone.
"""

import copy
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tpsgd.engine.settings import Memory
from tpsgd.errors import TpsgdError
from tpsgd.export.exported import Exported
from tpsgd.export.inputs import Inputs, read_inputs
from tpsgd.export.read_model import as_samples, check_shape, read_model
from tpsgd.export.recipe import Recipe, Shape
from tpsgd.export.to_onnx.graph import count_nodes
from tpsgd.export.to_onnx.step import MOMENTUM, epoch_model, predict_model, step_model
from tpsgd.files import writable_folder, write_together
from tpsgd.losses import Loss
from tpsgd.nets.precision import without_autocast
from tpsgd.nets.recurrent import connect
from tpsgd.rules import Rule, resolve
from tpsgd.train import simultaneous
from tpsgd.training.fit import fit

State = dict[str, np.ndarray]
STEPS, SAMPLES = 3, 6  # of the check: steps, and samples of a batch
LONGEST = 8  # time steps of its sequences
RATE = 1e-3  # its learning rate
DRAWS = 2  # of other samples, where a sample was at a jump of a derivative
MARK = b"ritten by tpsgd.export.onnx"  # in the first bytes of every file but the weights
RATES = {"sgd": 0.1, "momentum": 0.01, "adam": 0.003}  # that run.py begins with

STEP_BATCHES = "    return np.split(samples, range(options.batch, len(samples), options.batch))"
EPOCH_BATCHES = '''\
    """All whole batches together, then the rest."""
    whole = len(samples) // options.batch * options.batch
    stacks = samples[:whole].reshape(-1, options.batch), samples[whole:].reshape(1, -1)
    return [stack for stack in stacks if stack.size]'''


def onnx(
    model: nn.Module,
    file: str | Path,
    *,
    shape: Sequence[int],
    rule: Rule | str | Sequence[Rule | str] | None = None,
    optimizer: str = "sgd",
    epoch: bool = False,
    loss: Loss | None = None,
    seed: int = 0,
    samples: Any = None,
    inputs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model's training step as an ONNX graph (opset 17), which stock onnxruntime runs.

    The graph takes `x` and `labels` of a batch of any size, the learning rate `lr`, `learn` (for
    each block that can learn, whether it does), and the state: the parameters by their names in
    the model and what the optimizer keeps of them. It gives the state after the step as
    `new/NAME`, the local `losses` and the `logits`. All blocks learn from a batch, as under
    `tpsgd.simultaneous`; with one True in `learn` after another, it is `tpsgd.sequential`.

    Beside it are written `predict.onnx`, which takes `x` and the parameters, `FILE.weights.npz`,
    the state to begin with, and `run.py`, which trains on the x and y of an .npz file. Before
    anything is written, the graph takes a few steps beside `tpsgd.fit` in float64; a graph that
    differs is an error.

    Args:
        model: as for `tpsgd.fit`; it stays as it is.
        file: of the graph, `step.onnx` for example.
        shape: of one sample, such as (64,) or (1, 28, 28); of sequences, (steps, features).
        rule: one rule, or one for each block. Default: `rules.default()`.
        optimizer: sgd, momentum (0.9) or adam.
        epoch: write the steps of many batches as one graph: `x` and `labels` have a dimension of
            batches before the others. Its weights are those of step after step, bit for bit.
        loss: of the last block, if not the rule's own.
        seed: of the class codes.
        samples: inputs that calibrated readouts measure. Without them the first batch does it.
        inputs: `data.inputs`: if they were scaled for training, `FILE.weights.npz` has their
            `inputs/shift` and `inputs/scale`, and `run.py` takes x as it was measured; the graph
            itself takes (x - shift) / scale.
        overwrite: replace the four files of an earlier export.

    Returns:
        The paths, the number of nodes, and how the graph was checked.
    """
    path, rule = _graph_path(file, overwrite), resolve(rule)
    sample: Shape = check_shape(shape)
    recipe = read_model(
        model, rule, sample, optimizer=optimizer, loss=loss, seed=seed, samples=samples
    )
    if recipe.outputs == 1:
        raise TpsgdError(
            "a single yes-or-no output is not exported to ONNX: give the last layer two outputs"
        )
    samples = None if samples is None else as_samples(samples, sample, recipe.recurrent)
    meaning = read_inputs(inputs, None, recipe)
    written, state = (epoch_model if epoch else step_model)(recipe, sample)
    graph = written.SerializeToString()
    prediction = predict_model(recipe, sample)
    files = _Files(graph, prediction.SerializeToString(), epoch)
    reference = _Reference(model, rule, loss, optimizer, seed)
    checked = _check(files, recipe, state, reference, _batches(sample, recipe, samples))
    writable_folder(path.parent)
    weights = io.BytesIO()
    np.savez_compressed(weights, **state, **_scaling(meaning))  # type: ignore[arg-type]
    contents = {
        path: graph,
        path.with_name("predict.onnx"): files.prediction,
        path.with_name(f"{path.stem}.weights.npz"): weights.getvalue(),
        path.with_name("run.py"): _program(path, recipe, sample, epoch, meaning).encode(),
    }
    paths = write_together(contents)
    note = meaning.note("run.py")
    return Exported(paths, checked, count_nodes(written.graph), note=note)


def _scaling(inputs: Inputs) -> State:
    """Shift and scale of each feature for `run.py`, which divides bytes by 255 itself."""
    if not inputs.shift or inputs.method == "bytes":
        return {}
    pair = {"inputs/shift": inputs.shift, "inputs/scale": inputs.scale}
    return {name: np.array(values, np.float32) for name, values in pair.items()}


def _graph_path(file: str | Path, overwrite: bool) -> Path:
    """The path of the graph; nothing of the user's is overwritten by it or the files beside it."""
    path = Path(file).expanduser()
    if path.suffix != ".onnx" or path.name == "predict.onnx" or set(path.name) & set('"\\\n'):
        raise TpsgdError(
            "the file must end with .onnx, without quotes in its name, and predict.onnx will lie "
            f"beside it; got {path.name}"
        )
    weights = path.with_name(f"{path.stem}.weights.npz")
    for other in (path, path.with_name("predict.onnx"), path.with_name("run.py"), weights):
        if other.exists() and other != weights and MARK not in other.read_bytes()[:1000]:
            raise TpsgdError(
                f"{other} exists and was not written by export.onnx; name a file in another folder"
            )
        if other.exists() and not overwrite:
            raise TpsgdError(
                f"{other} is already there, from an earlier export: name a file in another folder, "
                "or replace it with overwrite=True (--overwrite)"
            )
    return path


def _program(path: Path, recipe: Recipe, sample: Shape, epoch: bool, inputs: Inputs) -> str:
    """The text of run.py."""
    scaled = "as it was measured, " if _scaling(inputs) else ""
    text = package_files("tpsgd.export.to_onnx").joinpath("run.txt").read_text(encoding="utf-8")
    return Template(text).substitute(
        file=path.name, weights=f"{path.stem}.weights.npz", shape=sample,
        reshaped=(-1, *sample[1:]) if recipe.recurrent else sample, last=recipe.outputs - 1,
        rate=RATES[recipe.optimizer], blocks=sum(block.learns for block in recipe.blocks),
        batches=EPOCH_BATCHES if epoch else STEP_BATCHES, measured=scaled,
    )  # fmt: skip


@dataclass(frozen=True)
class _Files:
    """What will be written, in bytes."""

    graph: bytes
    prediction: bytes
    epoch: bool


@dataclass(frozen=True)
class _Batches:
    """Samples and labels of a few steps, `(steps, batch, ...)`."""

    x: Tensor
    labels: Tensor


def _batches(sample: Shape, recipe: Recipe, samples: Tensor | None) -> list[_Batches]:
    """What the check learns from: `samples`, if readouts have measured them, in every batch."""
    draws, random = [], torch.Generator().manual_seed(0)
    shape = (min(sample[0], LONGEST), *sample[1:]) if recipe.recurrent else sample
    for _ in range(DRAWS):
        if samples is None:
            sizes = STEPS, SAMPLES, *shape
            x = torch.randn(sizes, generator=random, dtype=torch.float32)
        else:
            x = samples.float().expand(STEPS, *samples.shape)
        labels = torch.randint(0, recipe.outputs, x.shape[:2], generator=random)
        draws.append(_Batches(x, labels))
    return draws


@dataclass(frozen=True)
class _Reference:
    """`tpsgd.fit` on the same batches."""

    model: nn.Module
    rule: Rule | Sequence[Rule]
    loss: Loss | None
    optimizer: str
    seed: int

    def trained(self, data: _Batches, rate: float, dtype: torch.dtype) -> nn.Module:
        """A copy of the model after a step for each batch."""
        model = copy.deepcopy(self.model).cpu().float().to(dtype)
        batches = TensorDataset(data.x.flatten(0, 1).to(dtype), data.labels.flatten())
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            fit(
                model, DataLoader(batches, data.x.shape[1]), rule=self.rule, loss=self.loss,
                schedule=simultaneous, optimizer=self._optimizer(rate), epochs=1, seed=self.seed,
                progress=False, memory=Memory(measure=False),
            )  # fmt: skip
        return model.eval()

    def _optimizer(self, rate: float) -> Any:
        if self.optimizer == "adam":
            return lambda params: torch.optim.Adam(params, lr=rate)
        momentum = MOMENTUM if self.optimizer == "momentum" else 0.0
        return lambda params: torch.optim.SGD(params, lr=rate, momentum=momentum)


def _check(
    files: _Files, recipe: Recipe, state: State, reference: _Reference, draws: list[_Batches]
) -> str:
    """Compare the graph with `fit` over a few steps; how, in one sentence."""
    try:
        import onnxruntime
    except ImportError:
        return "Not checked against tpsgd.fit, because onnxruntime is not installed."
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    step, predict = (
        onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
        for content in (files.graph, files.prediction)
    )
    far: list[str] = []
    for data in draws:
        new, logits = _run(step, predict, state, data, files.epoch)
        if not np.isfinite(logits).all():
            raise TpsgdError(
                "the outputs are too large for float32, and the graph was not written: scale the "
                "weights or the inputs down"
            )
        exact, rounded = (
            reference.trained(data, RATE, dtype) for dtype in (torch.float64, torch.float32)
        )
        far = _differences(state, new, *(dict(m.named_parameters()) for m in (exact, rounded)))
        if not _close(logits, *(_logits(m, data.x[0]) for m in (exact, rounded)), moved=0.0):
            far.append("logits of predict.onnx")
        if not far:
            steps = f"{STEPS} steps of {data.x.shape[1]} samples"
            return f"Checked in onnxruntime {onnxruntime.__version__} against tpsgd.fit: {steps}."
    raise TpsgdError(
        f"the graph was not written, because it differs from tpsgd.fit in {', '.join(far)}; "
        "please report the model and the rule"
    )


def _logits(model: nn.Module, x: Tensor) -> np.ndarray:
    dtype = next(model.parameters()).dtype
    with torch.no_grad(), without_autocast():
        return connect(model)(x.to(dtype)).numpy()


def _run(
    step: Any, predict: Any, state: State, data: _Batches, epoch: bool
) -> tuple[State, np.ndarray]:
    """The state after all batches, and the logits of the first."""
    names = [output.name for output in step.get_outputs()]
    (learn,) = (port.shape for port in step.get_inputs() if port.name == "learn")
    settings = {"lr": np.array(RATE, np.float32), "learn": np.ones(learn, bool)}
    x, labels = data.x.numpy(), data.labels.numpy()
    for i in range(1 if epoch else len(x)):
        batch = {"x": x, "labels": labels} if epoch else {"x": x[i], "labels": labels[i]}
        results = dict(zip(names, step.run(None, batch | settings | state), strict=True))
        state = {name: results[f"new/{name}"] for name in state}
    weights = {p.name: state[p.name] for p in predict.get_inputs() if p.name != "x"}
    return state, predict.run(None, {"x": x[0], **weights})[0]


def _differences(
    start: State, new: State, exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor]
) -> list[str]:
    """The parameters that are further from float64 than float32 can explain."""
    far = []
    for name, p in exact.items():
        if name in start:
            reference = p.detach().numpy()
            moved = float(np.abs(reference - start[name]).max())
            if not _close(new[name], reference, rounded[name].detach().numpy(), moved):
                far.append(name)
    return far


def _close(ours: np.ndarray, exact: np.ndarray, rounded: np.ndarray, moved: float) -> bool:
    """Whether numbers are as near to float64 as torch's float32, but for a factor and rounding."""
    torchs = float(np.abs(rounded - exact).max())
    allowed = 10 * torchs + 1e-6 * float(np.abs(exact).max()) + 1e-4 * moved
    return bool(np.abs(ours - exact).max() <= allowed)
