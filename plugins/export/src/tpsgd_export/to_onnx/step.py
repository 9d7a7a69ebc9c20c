"""A recipe as three ONNX models: a training step, an epoch of steps, a prediction.

A step reads a batch, the learning rate, which blocks learn, and the *state*: parameters by their
names in the torch model, class codes that learn (`codes/1` of block 1), what the optimizer keeps of
them (`m/...`, `v/...`, `momentum/...`), and for each block Adam's 1 - beta^t (`q1/...`, `q2/...`)
and the gain of a calibrated readout (`gain/...`, 0 before the first batch). It gives the state
after the step under `new/...`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd_export.recipe import BlockRecipe, DiagonalLayer, Shape, StepRecipe
from tpsgd_export.to_c.codes import drawn
from tpsgd_export.to_onnx.graph import LARGEST, Graph, Port, as_model
from tpsgd_export.to_onnx.layers import (
    CODES,
    BlockLoss,
    Grads,
    Params,
    as_maps,
    features,
    forward,
    layer_input,
    learn,
    pooled,
)

MOMENTUM, BETA_1, BETA_2, EPS = 0.9, 0.9, 0.999, 1e-8
ZERO = np.zeros((), np.float32)

Change = Callable[[str, str], str]  # a parameter's name and gradient: what is subtracted from it


def step_model(recipe: StepRecipe, sample: Shape) -> tuple[Any, dict[str, np.ndarray]]:
    """The model of a training step, and the state with which training begins.

    `sample` is the shape of an input, a sequence's (steps, features).
    """
    step = Step(recipe, sample)
    step.write(learning=True)
    x, labels, *state = step.inputs()
    graph = step.g.proto("step", [x, labels, *_settings(recipe), *state], step.outputs())
    return as_model(graph, _about(recipe, "A training step")), step.state


def epoch_model(recipe: StepRecipe, sample: Shape) -> tuple[Any, dict[str, np.ndarray]]:
    """The model of many steps in a Scan that carries the state, and the state to begin with.

    All tensors of the step have names of their own, `step/...`: an inner graph finds the weights
    that are carried, and cannot reach those that the epoch began with.
    """
    step, g = Step(recipe, sample, "step/"), Graph()
    step.write(learning=True)
    x, labels, *state = step.inputs()
    *new, losses, logits = step.outputs()
    sources, results = [*state, x, labels], [*new, losses, logits]
    body = step.g.proto("step", sources, results)
    ports = [[_outside(port) for port in ports] for ports in (sources, results)]
    names = [[port.name for port in outside] for outside in ports]
    g.nodes.append(g.onnx.helper.make_node("Scan", *names, body=body, num_scan_inputs=2))
    *state, x, labels = ports[0]
    *new, losses, logits = ports[1]
    inputs = [_stacked(x), _stacked(labels), *_settings(recipe), *state]
    graph = g.proto("epoch", inputs, [*new, _stacked(losses), _stacked(logits)])
    return as_model(graph, _about(recipe, "An epoch of training steps")), step.state


def predict_model(recipe: StepRecipe, sample: Shape) -> Any:
    """The model that gives the logits of samples."""
    step = Step(recipe, sample)
    step.g.output(step.write(learning=False), "logits")
    x, _, *state = step.inputs()
    graph = step.g.proto("predict", [x, *state], [Port("logits", ("batch", recipe.outputs))])
    return as_model(graph, _about(recipe, "The prediction"))


def _about(recipe: StepRecipe, what: str) -> str:
    return f"{what} of {recipe.rule} with {recipe.optimizer}, written by tpsgd.export.onnx"


def _settings(recipe: StepRecipe) -> list[Port]:
    """The learning rate, and which of the blocks that can learn do."""
    learning = sum(block.learns for block in recipe.blocks)
    return [Port("lr", ()), Port("learn", (learning,), np.bool_)]


def _outside(port: Port) -> Port:
    """A port of a step, as the epoch names it."""
    return replace(port, name=port.name.removeprefix("step/"))


def _stacked(port: Port) -> Port:
    """Of all batches of an epoch."""
    return replace(port, dims=("batches", *port.dims))


class Step:
    """The nodes of a training step, and its state.

    `sample` is the shape of an input, a sequence's (steps, features). All tensors begin with
    `prefix`.
    """

    def __init__(self, recipe: StepRecipe, sample: Shape, prefix: str = "") -> None:
        self.recipe, self.sample, self.g, self.prefix = recipe, sample, Graph(prefix), prefix
        self.state: dict[str, np.ndarray] = {}  # as training begins
        self.new: dict[str, str] = {}  # the tensors after the step
        self.losses: list[str] = []  # of the blocks that learn

    def tensor(self, name: str, start: np.ndarray) -> str:
        """A tensor of the state."""
        self.state[name] = start
        return self.prefix + name

    def inputs(self) -> list[Port]:
        """Samples, labels and the state; sequences may have any number of steps."""
        shape = ("steps", *self.sample[1:]) if self.recipe.recurrent else self.sample
        state = [Port(self.prefix + name, value.shape) for name, value in self.state.items()]
        labels = Port(f"{self.prefix}labels", ("batch",), np.int64)
        return [Port(f"{self.prefix}x", ("batch", *shape)), labels, *state]

    def outputs(self) -> list[Port]:
        """The new state, the losses and the logits."""
        new = {f"new/{name}": value.shape for name, value in self.state.items()}
        logits = "batch", self.recipe.outputs
        dims = {**new, "losses": (len(self.losses),), "logits": logits}
        return [Port(self.prefix + name, each) for name, each in dims.items()]

    def write(self, learning: bool) -> str:
        """Write all nodes: the logits. If it learns, the outputs have their names."""
        g, recipe = self.g, self.recipe
        x, shape = f"{self.prefix}x", recipe.shape
        if recipe.recurrent and len(self.sample) == 1:  # numbers get a dimension of one feature
            x = g.Unsqueeze(x, [2])
        loss = self._loss() if learning else None
        for block in recipe.blocks:
            _refuse(recipe, block)
            x = layer_input(g, block, x, shape)
            x, shape = pooled(g, block, self._block(block, x, loss))
        if learning:
            losses = g.Concat(*(g.Reshape(value, [1]) for value in self.losses), axis=0)
            tensors = [*(self.new[name] for name in self.state), losses, x]
            for tensor, port in zip(tensors, self.outputs(), strict=True):
                g.output(tensor, port.name)
        return x

    def _loss(self) -> BlockLoss:
        """The loss of the last block; what others need of it is the same."""
        g, labels, classes = self.g, f"{self.prefix}labels", self.recipe.outputs
        rows = g.OneHot(labels, classes, np.array([0, 1], np.float32), axis=-1)
        share = g.Reciprocal(g.Cast(g.Squeeze(g.Shape(labels)), to=1))
        return BlockLoss(labels, rows, share, classes, self.recipe.loss)

    def _block(self, block: BlockRecipe, x: str, loss: BlockLoss | None) -> str:
        """The output of a block before its pools; it learns if there is a loss."""
        blocks, following = self.recipe.blocks, block.number + 1
        all_states = following < len(blocks) and blocks[following].recurrent
        values = {name: p.numpy() for name, p in block.parameters.items()}
        if block.learns:
            params = {name: self.tensor(block.names[name], v) for name, v in values.items()}
        else:
            params = {name: self.g.constant(v) for name, v in values.items()}
        if loss is None or not block.learns:
            return forward(self.g, block, x, params, all_states)
        learns = self.g.Gather("learn", len(self.losses))
        if block.local is not None:
            codes, gain = self._codes(block), self._gain(block, x, params, learns)
            loss = replace(loss, local=block.local, codes=codes, gain=gain)
        y, value, grads = learn(self.g, block, x, params, loss, all_states)
        self.losses.append(value)
        self._update(block, params, grads, learns)
        return y

    def _codes(self, block: BlockRecipe) -> str:
        """The class codes of a block; those that learn are state."""
        local, classes = block.local, self.recipe.outputs
        assert local is not None
        if local.codes.per_step:
            steps = self.sample[0]
            if (size := 4 * steps * classes * local.codes.size) > LARGEST:
                raise TpsgdError(
                    f"class codes for each of {steps:,} time steps would take {size:,} bytes; use "
                    "rules.readout(), whose codes are the same at every step"
                )
            return self.g.constant(np.stack([drawn(local.codes, classes, t) for t in range(steps)]))
        P = drawn(local.codes, classes).numpy()
        if local.learned:
            return self.tensor(f"codes/{block.number + 1}", P)
        if local.name != "readout" and len(block.shape) > 1 and not block.recurrent:
            P = P.reshape(-1, *as_maps(block.shape))
        return self.g.constant(P)

    def _gain(self, block: BlockRecipe, x: str, params: Params, learns: str) -> float | str:
        """The factor of a readout's logits; if it is not yet, it is measured in the first batch.

        The block is read once more for it: target / the root mean square of its features, or
        the target if they are all 0.
        """
        local, g = block.local, self.g
        assert local is not None
        if local.gain or not local.target:
            return local.gain
        name = f"gain/{block.number + 1}"
        gain, inner, unchanged = self.tensor(name, ZERO), g.inner(), g.inner()
        f = features(inner, local, forward(inner, block, x, params))
        rms = inner.Sqrt(inner.ReduceMean(inner.Mul(f, f), keepdims=0))
        measured = inner.Div(local.target, inner.Where(inner.Greater(rms, 0.0), rms, 1.0))
        self.new[name] = g.If(
            g.And(learns, g.Equal(gain, 0.0)),
            then_branch=inner.proto("measure", [], [Port(measured, ())]),
            else_branch=unchanged.proto("keep", [], [Port(unchanged.Identity(gain), ())]),
        )
        return self.new[name]

    def _update(self, block: BlockRecipe, params: Params, grads: Grads, learns: str) -> None:
        """The optimizer's step of a block; a block that does not learn stays as it is."""
        optimizers = {"sgd": self._sgd, "momentum": self._momentum, "adam": self._adam}
        change = optimizers[self.recipe.optimizer](learns, block.number + 1)
        codes = f"codes/{block.number + 1}"
        for key, grad in grads.items():
            name = codes if key == CODES else block.names[key]
            self.new[name] = self.g.Sub(self.prefix + name, change(name, grad))

    def _sgd(self, learns: str, block: int) -> Change:
        rate = self.g.Where(learns, "lr", 0.0)

        def change(name: str, grad: str) -> str:
            return self.g.Mul(grad, rate)

        return change

    def _momentum(self, learns: str, block: int) -> Change:
        g = self.g
        rate, fade = g.Where(learns, "lr", 0.0), g.Where(learns, MOMENTUM, 1.0)
        share = g.Where(learns, 1.0, 0.0)

        def change(name: str, grad: str) -> str:
            key = f"momentum/{name}"
            before = g.Mul(self.tensor(key, np.zeros_like(self.state[name])), fade)
            self.new[key] = g.Add(before, g.Mul(grad, share))
            return g.Mul(self.new[key], rate)

        return change

    def _adam(self, learns: str, block: int) -> Change:
        """Adam: lr m / q1 / (sqrt(v / q2) + eps), with both terms of the quotient times sqrt(q2).

        q = 1 - beta^t comes from q <- q + (1 - q) (1 - beta): in float32, 1 - beta^t loses five
        digits.
        """
        g = self.g
        shares = [g.Where(learns, 1 - beta, 0.0) for beta in (BETA_1, BETA_2)]

        def moved(name: str, goal: str | float, share: str, start: np.ndarray) -> str:
            """A tensor of the state, moved towards a goal by a share of the way."""
            before = self.tensor(name, start)
            self.new[name] = g.Add(before, g.Mul(g.Sub(goal, before), share))
            return self.new[name]

        q1, q2 = (moved(f"q{i + 1}/{block}", 1.0, shares[i], ZERO) for i in (0, 1))
        root = g.Sqrt(q2)
        rate = g.Where(learns, g.Mul(g.Div("lr", q1), root), 0.0)
        eps = g.Where(learns, g.Mul(root, EPS), EPS)

        def change(name: str, grad: str) -> str:
            start = np.zeros_like(self.state[name])
            m = moved(f"m/{name}", grad, shares[0], start)
            v = moved(f"v/{name}", g.Mul(grad, grad), shares[1], start)
            return g.Div(g.Mul(m, rate), g.Add(g.Sqrt(v), eps))

        return change


def _refuse(recipe: StepRecipe, block: BlockRecipe) -> None:
    if isinstance(block.layer, DiagonalLayer):
        raise TpsgdError(
            f"block {block.number + 1} ({block.name}) is not written as ONNX: of recurrent layers, "
            "tpsgd.Recurrent and nn.RNN are"
        )
    before = recipe.blocks[block.number - 1] if block.number else block
    if before.recurrent and not block.recurrent and block.layer.inputs != before.layer.outputs:
        raise TpsgdError(
            f"block {block.number + 1} ({block.name}) reads the states of all time steps together; "
            "only the last state is exported: leave out sequence=True in the layer before"
        )
