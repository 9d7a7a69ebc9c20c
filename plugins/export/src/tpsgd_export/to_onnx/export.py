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

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import writable_folder, write_together
from tpsgd.engine.fit import fit
from tpsgd.engine.settings import Memory
from tpsgd.losses import Loss, huber, l1
from tpsgd.losses import resolve as resolve_loss
from tpsgd.nets.precision import without_autocast
from tpsgd.nets.recurrent import connect
from tpsgd.rules import Rule, resolve
from tpsgd.train import simultaneous
from tpsgd_export.exported import Exported
from tpsgd_export.inputs import SampleFormat, read_inputs
from tpsgd_export.plain_steps import read_with_plain_scales
from tpsgd_export.read_model import as_samples, check_shape
from tpsgd_export.recipe import Shape, StepRecipe, refuse_joined
from tpsgd_export.to_c.check import LR, OPTIMIZERS, as_in, keeping_codes
from tpsgd_export.to_onnx.graph import count_nodes
from tpsgd_export.to_onnx.step import epoch_model, predict_model, step_model

State = dict[str, np.ndarray]
STEPS, SAMPLES = 3, 6  # of the check: steps, and samples of a batch
LONGEST = 8  # time steps of its sequences
DRAWS = 2  # of other samples, where a sample was at a jump of a derivative
LOGITS = "logits of predict.onnx"
NO_NUMBERS = "labels that are numbers are not exported to ONNX; tpsgd.export.c writes them as C"
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
        rule: one rule, or one for each block. Default: `rules.default()`. Readouts whose
            scale nobody has set have that of `tpsgd.export.c`.
        optimizer: sgd, momentum (0.9) or adam.
        epoch: write the steps of many batches as one graph: `x` and `labels` have a dimension of
            batches before the others. Its weights are those of step after step, bit for bit.
        loss: of the last block, if not the rule's own.
        seed: of the class codes.
        samples: inputs in which readouts measure their features. Without them calibrated ones do it
            in the first batch.
        inputs: `data.inputs`: if they were scaled for training, `FILE.weights.npz` has their
            `inputs/shift` and `inputs/scale`, and `run.py` takes x as it was measured; the graph
            itself takes (x - shift) / scale.
        overwrite: replace the four files of an earlier export.

    Returns:
        The paths, the number of nodes, and how the graph was checked.
    """
    path, rule = _graph_path(file, overwrite), resolve(rule)
    if (chosen := resolve_loss(loss)) in (l1, huber):
        raise TpsgdError(f"loss {chosen.name} learns numbers, and {NO_NUMBERS}")
    sample = check_shape(shape)
    learning, recipe = read_with_plain_scales(
        model, rule, sample, optimizer=optimizer, loss=loss, seed=seed, samples=samples
    )
    refuse_joined(recipe, "ONNX")
    if recipe.outputs == 1:
        raise TpsgdError(
            "a single yes-or-no output is not exported to ONNX: give the last layer two outputs; "
            f"{NO_NUMBERS}"
        )
    scaling = read_inputs(inputs, None, recipe)
    step, state = (epoch_model if epoch else step_model)(recipe, sample)
    graphs = [each.SerializeToString() for each in (step, predict_model(recipe, sample))]
    samples = None if samples is None else as_samples(samples, sample, recipe.recurrent)
    trial = _Trial(graphs, epoch, recipe, state, model, learning, loss)
    checked = trial.check(sample, samples)
    writable_folder(path.parent)
    weights = io.BytesIO()
    np.savez_compressed(weights, **state, **_shift_and_scale(scaling))  # type: ignore[arg-type]
    program = _program(path, recipe, sample, epoch, scaling)
    contents = dict(zip(_files(path), (*graphs, weights.getvalue(), program.encode()), strict=True))
    paths = write_together(contents)
    return Exported(paths, checked, count_nodes(step.graph), note=scaling.note("run.py"))


def _shift_and_scale(scaling: SampleFormat) -> State:
    """Shift and scale of each feature for `run.py`, which divides bytes by 255 itself."""
    if not scaling.shift or scaling.method == "bytes":
        return {}
    pair = {"inputs/shift": scaling.shift, "inputs/scale": scaling.scale}
    return {name: np.array(values) for name, values in pair.items()}


def _files(path: Path) -> list[Path]:
    """The graph and the files beside it."""
    names = "predict.onnx", f"{path.stem}.weights.npz", "run.py"
    return [path, *map(path.with_name, names)]


def _graph_path(file: str | Path, overwrite: bool) -> Path:
    """The path of the graph; nothing of the user's is overwritten by it or the files beside it."""
    path = Path(file).expanduser()
    if path.suffix != ".onnx" or path.name == "predict.onnx" or set(path.name) & set('"\\\n'):
        raise TpsgdError(
            "the file must end with .onnx, without quotes in its name, and predict.onnx will lie "
            f"beside it; got {path.name}"
        )
    for other in filter(Path.exists, _files(path)):
        if other.suffix != ".npz" and MARK not in other.read_bytes()[:1000]:
            raise TpsgdError(
                f"{other} exists and was not written by export.onnx; name a file in another folder"
            )
        if not overwrite:
            raise TpsgdError(
                f"{other} is already there, from an earlier export: name a file in another folder, "
                "or replace it with overwrite=True (--overwrite)"
            )
    return path


def _program(
    path: Path, recipe: StepRecipe, sample: Shape, epoch: bool, scaling: SampleFormat
) -> str:
    """The text of run.py."""
    measured = "as it was measured, " if _shift_and_scale(scaling) else ""
    text = package_files("tpsgd_export.to_onnx").joinpath("run.txt").read_text(encoding="utf-8")
    return Template(text).substitute(
        file=path.name, weights=f"{path.stem}.weights.npz", shape=sample,
        reshaped=(-1, *sample[1:]) if recipe.recurrent else sample, last=recipe.outputs - 1,
        rate=RATES[recipe.optimizer], blocks=sum(block.learns for block in recipe.blocks),
        batches=EPOCH_BATCHES if epoch else STEP_BATCHES, measured=measured,
    )  # fmt: skip


@dataclass(frozen=True)
class _Trial:
    """Graphs that are about to be written, beside `fit`."""

    graphs: list[bytes]  # of the step, or epoch, and of the prediction
    epoch: bool
    recipe: StepRecipe
    state: State
    model: nn.Module
    rule: Rule | Sequence[Rule]
    loss: Loss | None

    def check(self, shape: Shape, samples: Tensor | None) -> str:
        """Take a few steps, and say in one sentence that they are those of `fit`.

        If readouts have measured `samples`, every batch consists of these.
        """
        try:
            import onnxruntime
        except ImportError:
            return "Not checked against tpsgd.fit, because onnxruntime is not installed."
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level, settings.intra_op_num_threads = 3, 1
        step, predict = (
            onnxruntime.InferenceSession(graph, settings, ["CPUExecutionProvider"])
            for graph in self.graphs
        )
        if self.recipe.recurrent:
            shape = min(shape[0], LONGEST), *shape[1:]
        size, far = SAMPLES if samples is None else len(samples), list[str]()
        for seed in range(DRAWS):
            random = torch.Generator().manual_seed(seed)
            x = torch.randn(STEPS, size, *shape, generator=random, dtype=torch.float32)
            x = x if samples is None else samples.expand(STEPS, *samples.shape)
            labels = torch.randint(0, self.recipe.outputs, (STEPS, size), generator=random)
            far = self._differences(step, predict, x, labels)
            if not far:
                version, steps = onnxruntime.__version__, f"{STEPS} steps of {size} samples"
                return f"Checked in onnxruntime {version} against tpsgd.fit: {steps}."
        raise TpsgdError(
            f"the graph was not written, because it differs from tpsgd.fit in {', '.join(far)}; "
            "please report the model and the rule"
        )

    def _differences(self, step: Any, predict: Any, x: Tensor, labels: Tensor) -> list[str]:
        """The tensors that are further from float64 than float32 can explain."""
        names = [port.name for port in predict.get_inputs() if port.name != "x"]
        (logits,) = predict.run(None, {"x": x[0].numpy()} | {n: self.state[n] for n in names})
        new = {LOGITS: logits, **self._by_graph(step, x.numpy(), labels.numpy())}
        if not all(np.isfinite(values).all() for values in new.values()):
            raise TpsgdError(
                "the outputs are too large for float32, and the graph was not written: scale the "
                "weights or the inputs down"
            )
        exact, rounded = (self._by_fit(x.to(t), labels) for t in (torch.float64, torch.float32))
        far = []
        for name, values in exact.items():
            moved = np.abs(values - self.state.get(name, values).ravel()).max()
            rounding = np.abs(rounded[name] - values).max()
            allowed = 10 * rounding + 1e-6 * np.abs(values).max() + 1e-4 * moved
            if np.abs(new[name].ravel() - values).max() > allowed:
                far.append(name)
        return far

    def _by_graph(self, step: Any, x: np.ndarray, labels: np.ndarray) -> State:
        """The state after all batches."""
        names, state = [output.name for output in step.get_outputs()], self.state
        (blocks,) = (port.shape for port in step.get_inputs() if port.name == "learn")
        rate = np.array(LR[self.recipe.optimizer], np.float32)
        for batch in [(x, labels)] if self.epoch else zip(x, labels, strict=True):
            feed = {"x": batch[0], "labels": batch[1], "lr": rate, "learn": np.ones(blocks, bool)}
            results = dict(zip(names, step.run(None, feed | state), strict=True))
            state = {name: results[f"new/{name}"] for name in state}
        return state

    def _by_fit(self, x: Tensor, labels: Tensor) -> State:
        """What `fit` learns from all batches, and the logits of the first before: flat."""
        model = as_in(self.recipe, copy.deepcopy(self.model).cpu()).to(x.dtype).eval()
        codes = dict[int, Tensor]()
        with torch.no_grad(), without_autocast():
            logits = connect(model)(x[0])
        rules = [self.rule] * len(self.recipe.blocks) if isinstance(self.rule, Rule) else self.rule
        batches = DataLoader(TensorDataset(x.flatten(0, 1), labels.flatten()), x.shape[1])
        optimizer = self.recipe.optimizer
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            fit(
                model, batches, rule=[keeping_codes(rule, codes) for rule in rules],
                loss=self.loss, order=simultaneous, optimizer=OPTIMIZERS[optimizer],
                lr=LR[optimizer], epochs=1, seed=self.recipe.seed, progress=False,
                memory=Memory(measure=False), blocks="layers",
            )  # fmt: skip
        learned = {name: p for name, p in model.named_parameters() if name in self.state}
        names = [name for name in self.state if name.startswith("codes/")]
        learned |= dict(zip(names, codes.values(), strict=True)) | {LOGITS: logits}
        return {name: tensor.detach().flatten().numpy() for name, tensor in learned.items()}
