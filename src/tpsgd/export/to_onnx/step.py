"""A recipe as three ONNX models: a training step, an epoch of steps, a prediction.

A step reads a batch, the learning rate, which blocks learn, and the *state*: parameters by their
names in the torch model, class codes that learn (`codes/1` of block 1), what the optimizer keeps of
them (`m/...`, `v/...`, `momentum/...`), and for each block Adam's 1 - beta^t (`q1/...`, `q2/...`)
and the gain of a calibrated readout (`gain/...`, 0 before the first batch). It gives the state
after the step under `new/...`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import BlockRecipe, Diagonal, Recipe, Shape
from tpsgd.export.to_c.codes import drawn
from tpsgd.export.to_onnx.graph import LARGEST, Dims, Graph, Port, as_model
from tpsgd.export.to_onnx.layers import (
    CODES,
    CellScan,
    Grads,
    Labels,
    Params,
    as_maps,
    calibrated_gain,
    features,
    forward,
    gradients,
    head_loss,
    layer_input,
    local_loss,
    pooled,
    times_derivative,
)

MOMENTUM, BETA_1, BETA_2, EPS = 0.9, 0.9, 0.999, 1e-8


@dataclass
class Step:
    """The nodes of a training step, and its state.

    `sample` is the shape of an input, a sequence's (steps, features).
    """

    recipe: Recipe
    sample: Shape
    g: Graph
    state: dict[str, np.ndarray] = field(default_factory=dict)  # as training begins
    new: dict[str, str] = field(default_factory=dict)  # the tensors after the step
    losses: list[str] = field(default_factory=list)  # of the blocks that learn
    logits: str = ""

    def tensor(self, name: str, start: np.ndarray) -> str:
        """A tensor of the state."""
        self.state[name] = start
        return self.g.prefix + name


def step_model(recipe: Recipe, sample: Shape) -> tuple[Any, dict[str, np.ndarray]]:
    """The model of a training step, and the state with which training begins.

    `sample` is the shape of an input, a sequence's (steps, features).
    """
    step = _written(recipe, sample)
    inputs, outputs = _ports(step)
    settings = _settings(recipe)
    graph = step.g.proto("step", [*inputs[:2], *settings, *inputs[2:]], outputs)
    return as_model(graph, _about(recipe, "A training step")), step.state


def epoch_model(recipe: Recipe, sample: Shape) -> tuple[Any, dict[str, np.ndarray]]:
    """The model of many steps in a Scan that carries the state, and the state to begin with.

    All tensors of the step have names of their own, `step/...`: an inner graph finds the weights
    that are carried, and cannot reach those that the epoch began with.
    """
    step, g = _written(recipe, sample, "step/"), Graph()
    (x, labels, *state), outputs = _ports(step)
    body = step.g.proto("step", [*state, x, labels], outputs)
    x, labels, *state = (_without("step/", port) for port in (x, labels, *state))
    *new, losses, logits = (_without("step/", port) for port in outputs)
    sources = [port.name for port in (*state, x, labels)]
    targets = [port.name for port in (*new, losses, logits)]
    scan = g.onnx.helper.make_node("Scan", sources, targets, body=body, num_scan_inputs=2)
    g.nodes.append(scan)
    inputs = [_stacked(x), _stacked(labels), *_settings(recipe), *state]
    graph = g.proto("epoch", inputs, [*new, _stacked(losses), _stacked(logits)])
    return as_model(graph, _about(recipe, "An epoch of training steps")), step.state


def predict_model(recipe: Recipe, sample: Shape) -> Any:
    """The model that gives the logits of samples."""
    g = Graph()
    step = Step(recipe, sample, g)
    x, shape = _first_input(step), recipe.shape
    for block, params in _blocks(step):
        if block.recurrent:
            x = CellScan(g, block, x, params).read(_feeds_recurrent(recipe, block))
            shape = block.shape[-1:]
        else:
            x = layer_input(g, block, x, shape)
            x, shape = _pooled(g, block, forward(g, block, x, params))
    g.output(x, "logits")
    outputs = [Port("logits", ("batch", recipe.outputs))]
    graph = g.proto("predict", [_samples(step), *_state(step)], outputs)
    return as_model(graph, _about(recipe, "The prediction"))


def _about(recipe: Recipe, what: str) -> str:
    return f"{what} of {recipe.rule} with {recipe.optimizer}, written by tpsgd.export.onnx"


def _settings(recipe: Recipe) -> list[Port]:
    """The learning rate, and which of the blocks that can learn do."""
    learning = sum(block.learns for block in recipe.blocks)
    return [Port("lr", ()), Port("learn", (learning,), np.bool_)]


def _samples(step: Step) -> Port:
    """The input x; sequences may have any number of steps."""
    dims = ("steps", *step.sample[1:]) if step.recipe.recurrent else step.sample
    return Port(f"{step.g.prefix}x", ("batch", *dims))


def _state(step: Step) -> list[Port]:
    return [Port(step.g.prefix + name, value.shape) for name, value in step.state.items()]


def _ports(step: Step) -> tuple[list[Port], list[Port]]:
    """Inputs of a step: samples, labels, the state; outputs: the new state, losses, logits."""
    prefix = step.g.prefix
    labels = Port(f"{prefix}labels", ("batch",), np.int64)
    inputs = [_samples(step), labels, *_state(step)]
    g, outputs = step.g, []
    for name, value in step.state.items():
        outputs.append(Port(f"{prefix}new/{name}", value.shape))
        g.output(step.new[name], outputs[-1].name)
    losses = g.Concat(*(g.Reshape(loss, [1]) for loss in step.losses), axis=0)
    ends: list[tuple[str, str, Dims]] = [
        (losses, "losses", (len(step.losses),)),
        (step.logits, "logits", ("batch", step.recipe.outputs)),
    ]
    for tensor, name, dims in ends:
        outputs.append(Port(prefix + name, dims))
        g.output(tensor, outputs[-1].name)
    return inputs, outputs


def _without(prefix: str, port: Port) -> Port:
    return Port(port.name.removeprefix(prefix), port.dims, port.dtype)


def _stacked(port: Port) -> Port:
    """Of all batches of an epoch."""
    return Port(port.name, ("batches", *port.dims), port.dtype)


def _written(recipe: Recipe, sample: Shape, prefix: str = "") -> Step:
    """All nodes of a step."""
    step = Step(recipe, sample, Graph(prefix))
    g, labels = step.g, _labels(step)
    x, shape = _first_input(step), recipe.shape
    for block, params in _blocks(step):
        learn = g.Gather("learn", len(step.losses)) if block.learns else ""
        if block.recurrent:
            x, grads = _cell(step, block, x, params, labels, learn)
            shape = block.shape[-1:]
        else:
            x = layer_input(g, block, x, shape)
            y, grads = _layer(step, block, x, params, labels, learn)
            x, shape = _pooled(g, block, y)
        if block.learns:
            _update(step, block, params, grads, learn)
    step.logits = x
    return step


def _labels(step: Step) -> Labels:
    g, indices = step.g, f"{step.g.prefix}labels"
    count = g.Cast(g.Squeeze(g.Shape(indices)), to=1)
    rows = g.OneHot(indices, step.recipe.outputs, np.array([0, 1], np.float32), axis=-1)
    return Labels(indices, rows, g.Reciprocal(count))


def _first_input(step: Step) -> str:
    """Samples; sequences of numbers get a dimension of one feature."""
    x, numbers = f"{step.g.prefix}x", step.recipe.recurrent and len(step.sample) == 1
    return step.g.Unsqueeze(x, [2]) if numbers else x


def _blocks(step: Step) -> list[tuple[BlockRecipe, Params]]:
    """The blocks with their parameters: those that learn belong to the state."""
    recipe, blocks = step.recipe, []
    for block in recipe.blocks:
        _refuse(recipe, block)
        values = {name: p.numpy() for name, p in block.parameters.items()}
        if block.learns:
            params = {name: step.tensor(block.names[name], v) for name, v in values.items()}
        else:
            params = {name: step.g.constant(v) for name, v in values.items()}
        blocks.append((block, params))
    return blocks


def _refuse(recipe: Recipe, block: BlockRecipe) -> None:
    if isinstance(block.layer, Diagonal):
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


def _feeds_recurrent(recipe: Recipe, block: BlockRecipe) -> bool:
    return recipe.blocks[block.number + 1].recurrent


def _pooled(g: Graph, block: BlockRecipe, y: str) -> tuple[str, Shape]:
    """The output of a block after its pools, and its shape."""
    shape = as_maps(block.shape) if len(block.shape) > 1 else block.shape
    for pool in block.pools:
        y, shape = pooled(g, pool, y), (pool.channels, *pool.out)
    return y, shape


def _layer(
    step: Step, block: BlockRecipe, x: str, params: Params, labels: Labels, learn: str
) -> tuple[str, Grads]:
    """A block's output before its pools, and the gradients of its parameters if it learns."""
    g, y, codes = step.g, forward(step.g, block, x, params), ""
    if not block.learns:
        return y, {}
    if block.local is None:
        loss, dz = head_loss(g, step.recipe.loss, y, labels)
    else:
        gain = _gain(step, block, y, learn)
        loss, dy, codes = local_loss(g, block.local, y, labels, _codes(step, block), gain)
        dz = times_derivative(g, block, dy, y)
    step.losses.append(loss)
    grads = gradients(g, block, x, dz)
    return y, grads | ({CODES: codes} if codes else {})


def _codes(step: Step, block: BlockRecipe) -> str:
    """The class codes of a readout's features, or of the output's shape; state if they learn."""
    local = block.local
    assert local is not None
    P = drawn(local.codes, step.recipe.outputs).numpy()
    if local.learned:
        return step.tensor(f"codes/{block.number + 1}", P)
    if local.name != "readout" and len(block.shape) > 1 and not block.recurrent:
        P = P.reshape(-1, *as_maps(block.shape))
    return step.g.constant(P)


def _gain(step: Step, block: BlockRecipe, y: str, learn: str) -> float | str:
    """The factor of a readout's logits; measured in the first batch, if it is not yet."""
    local, g = block.local, step.g
    assert local is not None
    if local.gain or not local.target:
        return local.gain
    name, gain = _gain_of_state(step, block)
    f = features(g, local, y)
    measured = calibrated_gain(g, local.target, g.ReduceMean(g.Mul(f, f), keepdims=0))
    first = g.And(learn, g.Equal(gain, 0.0))
    step.new[name] = g.Where(first, measured, gain)
    return step.new[name]


def _gain_of_state(step: Step, block: BlockRecipe) -> tuple[str, str]:
    """The name of a measured gain in the state, and its tensor: 0 before it is measured."""
    name = f"gain/{block.number + 1}"
    return name, step.tensor(name, np.zeros((), np.float32))


def _cell(
    step: Step, block: BlockRecipe, x: str, params: Params, labels: Labels, learn: str
) -> tuple[str, Grads]:
    """The output of a recurrent block, and its gradients if it learns."""
    g, local, all_states = step.g, block.local, _feeds_recurrent(step.recipe, block)
    cell = CellScan(g, block, x, params)
    if local is None:
        return cell.read(all_states), {}
    gain = _cell_gain(step, block, x, params, learn)
    codes, classes = _cell_codes(step, block), step.recipe.outputs
    y, loss, grads = cell.learn(local, labels, codes, gain, all_states, classes)
    step.losses.append(loss)
    return y, grads


def _cell_codes(step: Step, block: BlockRecipe) -> str:
    """The class codes of a recurrent block, of all time steps if each has its own."""
    local, classes, steps = block.local, step.recipe.outputs, step.sample[0]
    assert local is not None
    if not local.codes.per_step:
        return _codes(step, block)
    if (size := 4 * steps * classes * local.codes.size) > LARGEST:
        raise TpsgdError(
            f"class codes for each of {steps:,} time steps would take {size:,} bytes; use "
            "rules.readout(), whose codes are the same at every step"
        )
    return step.g.constant(np.stack([drawn(local.codes, classes, t) for t in range(steps)]))


def _cell_gain(step: Step, block: BlockRecipe, x: str, params: Params, learn: str) -> float | str:
    """As `_gain`; the sequences are read once more, but only while it is not measured."""
    local, g = block.local, step.g
    assert local is not None
    if local.gain or not local.target:
        return local.gain
    name, gain = _gain_of_state(step, block)
    measuring, unchanged = g.inner(), g.inner()
    square = CellScan(measuring, block, x, params).mean_square()
    measured = calibrated_gain(measuring, local.target, square)
    step.new[name] = g.If(
        g.And(learn, g.Equal(gain, 0.0)),
        then_branch=measuring.proto("measure", [], [Port(measured, ())]),
        else_branch=unchanged.proto("keep", [], [Port(unchanged.Identity(gain), ())]),
    )
    return step.new[name]


def _update(step: Step, block: BlockRecipe, params: Params, grads: Grads, learn: str) -> None:
    """The optimizer's step of a block's parameters; a block that does not learn stays as it is."""
    optimizers = {"sgd": _Sgd, "momentum": _Momentum, "adam": _Adam}
    optimizer = optimizers[step.recipe.optimizer](step, f"{block.number + 1}", learn)
    tensors = {key: (block.names[key], params[key]) for key in block.parameters}
    if block.learned_codes:
        name = f"codes/{block.number + 1}"
        tensors[CODES] = name, step.g.prefix + name
    for key, (name, tensor) in tensors.items():
        change = optimizer.change(name, grads[key], np.zeros_like(step.state[name]))
        step.new[name] = step.g.Sub(tensor, change)


class _Sgd:
    """Plain SGD: the gradient times the learning rate."""

    def __init__(self, step: Step, block: str, learn: str) -> None:
        self.step, self.g, self.learn = step, step.g, learn
        self.rate = self.if_learning("lr")

    def if_learning(self, value: Any, otherwise: float = 0.0) -> str:
        """A number of the optimizer, and the one that leaves everything as it is."""
        return self.g.Where(self.learn, value, otherwise)

    def change(self, name: str, grad: str, zeros: np.ndarray) -> str:
        """What is subtracted from a parameter; `zeros` has its shape."""
        return self.g.Mul(grad, self.rate)


class _Momentum(_Sgd):
    """SGD on a sum of gradients in which the older ones fade."""

    def __init__(self, step: Step, block: str, learn: str) -> None:
        super().__init__(step, block, learn)
        self.fade, self.share = self.if_learning(MOMENTUM, 1.0), self.if_learning(1.0)

    def change(self, name: str, grad: str, zeros: np.ndarray) -> str:
        g, key = self.g, f"momentum/{name}"
        before = g.Mul(self.step.tensor(key, zeros), self.fade)
        self.step.new[key] = g.Add(before, g.Mul(grad, self.share))
        return g.Mul(self.step.new[key], self.rate)


class _Adam(_Sgd):
    """Adam: lr m / q1 / (sqrt(v / q2) + eps), with both terms of the quotient times sqrt(q2).

    q = 1 - beta^t comes from q <- q + (1 - q) (1 - beta): in float32, 1 - beta^t loses five digits.
    """

    def __init__(self, step: Step, block: str, learn: str) -> None:
        super().__init__(step, block, learn)
        self.shares = [self.if_learning(1 - beta) for beta in (BETA_1, BETA_2)]
        zero = np.zeros((), np.float32)
        q1, q2 = (self._moved(f"q{i + 1}/{block}", 1.0, i, zero) for i in (0, 1))
        root = self.g.Sqrt(q2)
        self.rate = self.if_learning(self.g.Mul(self.g.Div("lr", q1), root))
        self.eps = self.if_learning(self.g.Mul(root, EPS), EPS)

    def _moved(self, name: str, goal: str | float, moment: int, zeros: np.ndarray) -> str:
        """A tensor of the state, moved towards a goal by the moment's share."""
        g, before = self.g, self.step.tensor(name, zeros)
        self.step.new[name] = g.Add(before, g.Mul(g.Sub(goal, before), self.shares[moment]))
        return self.step.new[name]

    def change(self, name: str, grad: str, zeros: np.ndarray) -> str:
        g = self.g
        m = self._moved(f"m/{name}", grad, 0, zeros)
        v = self._moved(f"v/{name}", g.Mul(grad, grad), 1, zeros)
        return g.Div(g.Mul(m, self.rate), g.Add(g.Sqrt(v), self.eps))
