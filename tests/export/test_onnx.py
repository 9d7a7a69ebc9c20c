"""ONNX graphs against `fit` in float64: all layers, rules and optimizers; epochs; files; refusals.

After some steps a graph may be a few times as far from float64 as torch's own float32.
"""

import copy
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from helpers import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import TpsgdError, losses, projections, rules
from tpsgd.nets.recurrent import connect
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import BlockRecipe, Convolution
from tpsgd_export.records import read_weights
from tpsgd_export.to_c.check import keeping_codes
from tpsgd_export.to_c.codes import drawn as codes_of_classes
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_onnx import step
from tpsgd_export.to_onnx.export import onnx as export
from tpsgd_export.to_onnx.graph import Graph, Port, as_model
from tpsgd_export.to_onnx.layers import gradients
from tpsgd_export.to_onnx.step import epoch_model, predict_model, step_model

pytest.importorskip("onnx", reason="onnx writes the graphs, and is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the graphs")
pytestmark = [
    pytest.mark.usefixtures("unwatched"),
    pytest.mark.filterwarnings("ignore:.*without bound"),
]

STEPS, BATCH, CLASSES = 20, 6, 4
RATE = {"sgd": 0.01, "momentum": 0.003, "adam": 0.001}
OPTIMIZERS = tuple(RATE)


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.LeakyReLU(0.1), nn.MaxPool2d(2),
        nn.Conv2d(5, 6, (3, 2), stride=(2, 1), padding=(2, 0), bias=False), nn.Tanh(),
        nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(24, CLASSES),
    )  # fmt: skip


def grouped():  # depthwise, groups, dilation; cells of 4 x 4 over 7 x 7 overlap
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2, stride=2), nn.Sigmoid(),
        nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(), nn.Linear(36, CLASSES),
    )  # fmt: skip


def one_dimension():
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=2, dilation=2, stride=2), nn.Sigmoid(), nn.MaxPool1d(2),
        nn.Conv1d(6, 8, 3, groups=2, bias=False), nn.ReLU(), nn.AvgPool1d(2),
        nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def flat_rows():  # of a table: three sensors, 17 readings each
    return nn.Sequential(nn.Unflatten(1, (3, 17)), one_dimension())


def dense():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 7, bias=False), nn.LeakyReLU(),
        nn.Linear(7, 6), nn.Linear(6, CLASSES),
    )  # fmt: skip


def cells():
    first = tpsgd.Recurrent(3, 8, leak=0.3, sequence=True)
    return nn.Sequential(first, tpsgd.Recurrent.paper(8, 5), nn.Linear(5, CLASSES))


def torch_rnn():
    return nn.Sequential(nn.RNN(1, 6, num_layers=2, batch_first=True), nn.Linear(6, CLASSES))


def no_bias():
    return nn.Sequential(
        nn.RNN(2, 6, nonlinearity="relu", bias=False, batch_first=True), nn.Linear(6, CLASSES)
    )


NETS = {
    cnn: (2, 8, 8), grouped: (4, 7, 7), one_dimension: (3, 17), dense: (1, 3, 3),
    cells: (7, 3), torch_rnn: (5,), no_bias: (6, 2),
}  # fmt: skip
RULES = {
    "readout": rules.readout(),
    "learned": rules.default(),
    "learned, by hand": rules.readout(True, projections.uniform(0.5), features=12, scale=4.0),
    "learned, with a gain": rules.readout(True, scale=2.0, gain=2.0),
    "fixed": rules.readout(scale=4.0, projection=projections.binary()),
    "l1": rules.tpsgd_l1(projection=projections.uniform(0.5)),
    "l2": rules.tpsgd_l2(),
    "drtp": rules.drtp(projection=projections.normal(0.3)),
    "frozen": rules.frozen(),
}
CASES = [  # every net with every rule, every rule with every optimizer, every net with each, too
    (net, rule, OPTIMIZERS[(i + j) % 3])
    for (i, net), (j, rule) in product(enumerate(NETS), enumerate(RULES))
]
NETS[flat_rows] = (3 * 17,)
CASES.append((flat_rows, "readout", "adam"))


def session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    content = model if isinstance(model, bytes | str) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])


def drawn(shape, steps=STEPS, batch=BATCH, classes=CLASSES):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(steps, batch, *shape, generator=g)
    return x, torch.randint(0, classes, (steps, batch), generator=g)


def factory(optimizer, lr=None):
    lr = RATE[optimizer] if lr is None else lr
    if optimizer == "adam":
        return lambda params: torch.optim.Adam(params, lr=lr)
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9 * (optimizer == "momentum"))


def fitted(model, data, rule, optimizer, dtype=torch.float64, **settings):
    """A copy of the model after `fit` on these batches, in their order; and the record."""
    model, (x, labels) = copy.deepcopy(model).to(dtype), data
    batches = TensorDataset(x.flatten(0, 1).to(dtype), labels.flatten())
    settings = {"order": tpsgd.simultaneous, "epochs": 1} | settings
    settings["blocks"] = "layers"
    loader = DataLoader(batches, x.shape[1])
    run = tpsgd.fit(model, loader, rule=rule, optimizer=factory(optimizer), **settings)
    return model, run


def take(running, state, x, labels, optimizer="sgd", learn=None, lr=None):
    """One call of a graph: the state after it, and all outputs."""
    names = [output.name for output in running.get_outputs()]
    (blocks,) = (port.shape[0] for port in running.get_inputs() if port.name == "learn")
    lr = RATE[optimizer] if lr is None else lr
    feed = {
        "x": x.numpy(), "labels": labels.numpy(), "lr": np.array(lr, np.float32),
        "learn": np.ones(blocks, bool) if learn is None else np.array(learn), **state,
    }  # fmt: skip
    out = dict(zip(names, running.run(None, feed), strict=True))
    return {name: out[f"new/{name}"] for name in state}, out


def step_by_step(running, state, data, optimizer="sgd", **settings):
    for x, labels in zip(*data, strict=True):
        state, _ = take(running, state, x, labels, optimizer, **settings)
    return state


def distance(state, model):
    """The largest difference between parameters that learn."""
    return max(
        float(np.abs(state[name] - p.detach().numpy()).max())
        for name, p in model.named_parameters()
        if name in state
    )


def assert_near(state, exact, rounded):
    """As near to float64 as torch's float32, but for a factor of 4 and a few roundings."""
    own = distance({name: p.detach().numpy() for name, p in rounded.named_parameters()}, exact)
    largest = max(float(p.detach().abs().max()) for p in exact.parameters())
    assert distance(state, exact) <= 4 * own + 2e-7 * max(1.0, largest)


def assert_codes_near(state, exact, rounded):
    """The same for class codes that learn."""
    learned = [value for name, value in state.items() if name.startswith("codes/")]
    for value, P, in_float32 in zip(learned, exact, rounded, strict=True):
        own = (in_float32.double() - P).abs().max()
        assert np.abs(value - P.detach().numpy()).max() <= 4 * own + 2e-7 * P.abs().max()


@pytest.mark.cover(1)
@pytest.mark.parametrize(("net", "word", "optimizer"), CASES)
def test_graphs_equal_fit(net, word, optimizer):
    model, shape, rule = seeded(net), NETS[net], RULES[word]
    data = drawn(shape)
    recipe = read_model(model, rule, shape, optimizer=optimizer)
    (step, state), (epoch, _) = step_model(recipe, shape), epoch_model(recipe, shape)
    after = step_by_step(session(step), state, data, optimizer)
    together, _ = take(session(epoch), state, *data, optimizer)
    codes, in_float32 = {}, {}
    exact, _ = fitted(model, data, keeping_codes(rule, codes), optimizer)
    rounded, _ = fitted(model, data, keeping_codes(rule, in_float32), optimizer, torch.float32)
    assert_near(after, exact, rounded)
    assert_codes_near(after, list(codes.values()), list(in_float32.values()))
    assert distance(state, exact) > 1e-3  # it has learned
    for name, value in after.items():
        np.testing.assert_array_equal(together[name], value, name)
    predict = session(predict_model(recipe, shape))
    weights = {p.name: after[p.name] for p in predict.get_inputs() if p.name != "x"}
    (logits,) = predict.run(None, {"x": data[0][0].numpy(), **weights})
    with torch.no_grad():
        expected = connect(exact.eval())(data[0][0].double()).numpy()
        usual = connect(rounded.eval())(data[0][0]).numpy()
    factor = 16 if optimizer == "adam" else 4  # which divides rounding by itself at first
    assert np.abs(logits - expected).max() <= factor * np.abs(usual - expected).max() + 1e-6


def test_learning_one_block_after_another_is_the_sequential_schedule():
    model, rule, optimizer, data = seeded(cnn), rules.readout(), "adam", drawn(NETS[cnn])
    recipe = read_model(model, rule, NETS[cnn], optimizer=optimizer)
    step, state = step_model(recipe, NETS[cnn])
    running = session(step)
    for learn in np.eye(3, dtype=bool):
        before = state
        state = step_by_step(running, state, data, optimizer, learn=learn)
        for block, learns in enumerate(learn):
            name = recipe.blocks[block].names["weight"]
            for key in (name, f"m/{name}", f"v/{name}", f"q1/{block + 1}", f"q2/{block + 1}"):
                assert np.array_equal(before[key], state[key]) != learns
    settings = {"order": tpsgd.sequential, "memory": tpsgd.Memory(reuse=False)}  # no shuffling
    exact, _ = fitted(model, data, rule, optimizer, **settings)
    rounded, _ = fitted(model, data, rule, optimizer, torch.float32, **settings)
    assert_near(state, exact, rounded)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_block_that_does_not_learn_keeps_every_bit(optimizer):
    recipe = read_model(seeded(cells), rules.readout(), NETS[cells], optimizer=optimizer)
    step, state = step_model(recipe, NETS[cells])
    (x, labels), running = drawn(NETS[cells]), session(step)
    start, _ = take(running, state, x[0], labels[0], optimizer, learn=[False] * 3)
    assert all(np.array_equal(start[name], value) for name, value in state.items())
    state, _ = take(running, state, x[0], labels[0], optimizer)
    after, _ = take(running, state, x[1], labels[1], optimizer, learn=[False] * 3)
    for name, value in state.items():
        np.testing.assert_array_equal(after[name], value, name)


@pytest.mark.parametrize("loss", [losses.mse, losses.cross_entropy, losses.bce])
@pytest.mark.parametrize("rule", [rules.readout(), rules.tpsgd_l2()])
def test_losses_of_all_heads(loss, rule):
    model, data = seeded(dense), drawn(NETS[dense], steps=1)
    recipe = read_model(model, rule, NETS[dense], loss=loss)
    step, state = step_model(recipe, NETS[dense])
    after, out = take(session(step), state, *(t[0] for t in data))
    exact, run = fitted(model, data, rule, "sgd", loss=loss)
    rounded, _ = fitted(model, data, rule, "sgd", torch.float32, loss=loss)
    assert_near(after, exact, rounded)
    np.testing.assert_allclose(out["losses"], [e.loss for e in run.history], rtol=1e-6)
    with torch.no_grad():
        np.testing.assert_allclose(out["logits"], model(data[0][0]).numpy(), atol=1e-6)


@pytest.mark.parametrize("net", [cnn, cells])
def test_losses_of_hidden_blocks(net):
    for rule in (RULES["l1"], RULES["drtp"], RULES["readout"]):
        model, data = seeded(net), drawn(NETS[net], steps=1)
        step, state = step_model(read_model(model, rule, NETS[net]), NETS[net])
        _, out = take(session(step), state, *(t[0] for t in data))
        _, run = fitted(model, data, rule, "sgd")
        np.testing.assert_allclose(out["losses"], [e.loss for e in run.history], rtol=2e-6)


@pytest.mark.parametrize("net", [dense, cnn, cells])
def test_gains_are_measured_in_the_first_batch_and_stay(net):
    model, data = seeded(net), drawn(NETS[net])
    recipe = read_model(model, rules.readout(), NETS[net])
    step, state = step_model(recipe, NETS[net])
    running = session(step)
    first, _ = take(running, state, data[0][0], data[1][0])
    later, _ = take(running, first, 9 * data[0][1], data[1][1])
    _, run = fitted(model, data, rules.readout(), "sgd")
    gains = [name for name in state if name.startswith("gain/")]
    assert len(gains) == len(recipe.blocks) - 1 and not any(state[name] for name in gains)
    for name, block, info in zip(gains, recipe.blocks, run.blocks, strict=False):
        assert first[name] == pytest.approx(info.scale / block.local.codes.size**0.5, rel=1e-6)
        assert later[name] == first[name]


@pytest.mark.parametrize("measured", [False, True])
def test_samples_fix_the_gains(tmp_path, measured):
    model, shape = seeded(cnn), NETS[cnn]
    settings = {"samples": drawn(shape)[0][0]} if measured else {}
    file = tmp_path / "step.onnx"
    written = export(model, file, shape=shape, optimizer="adam", **settings)
    gains = [name for name in np.load(written.paths[2]) if name.startswith("gain/")]
    assert len(gains) == (0 if measured else 2)


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("net", [cnn, dense])
@pytest.mark.parametrize("rule", [rules.readout(), None])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("measured", [False, True])
def test_a_graph_learns_what_the_exported_c_learns(tmp_path, net, rule, optimizer, measured):
    """By the default scale and gain of plain steps, fixed codes and learned ones."""
    model, shape = seeded(net), NETS[net]
    x, labels = drawn(shape, steps=10, batch=1)
    samples = 9 * x[:, 0] if measured else None  # their features are too large for the scale 4
    settings = {"shape": shape, "rule": rule, "optimizer": optimizer, "samples": samples}
    step = export(model, tmp_path / "step.onnx", **settings).paths[0]
    tpsgd.export.c(model, tmp_path / "net", **settings)
    board, state = CompiledNet(tmp_path / "net"), dict(np.load(tmp_path / "step.weights.npz"))
    state = step_by_step(session(str(step)), state, (x, labels), optimizer)
    for sample, label in zip(x, labels, strict=True):
        board.step(sample, label, RATE[optimizer])
    start = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    read_weights(model, board.save())
    assert distance(state, model) < 1e-6
    assert max(np.abs(state[name] - p).max() for name, p in start.items()) > 1e-3


def test_dead_features_have_a_gain_of_their_own():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    recipe = read_model(model, rules.readout(), (3,))
    step, state = step_model(recipe, (3,))
    after, _ = take(session(step), state, *(t[0] for t in drawn((3,), classes=2)))
    assert after["gain/1"] == np.float32(recipe.blocks[0].local.target)


@pytest.mark.parametrize("net", [cnn, cells])
def test_batches_and_sequences_of_any_size(net):
    model, shape = seeded(net), NETS[net]
    recipe = read_model(model, rules.readout(), shape)
    step, state = step_model(recipe, shape)
    running = session(step)
    for batch in (1, 5):
        data = drawn((4, 3) if net is cells else shape, 1, batch)
        after, out = take(running, state, data[0][0], data[1][0])
        exact, _ = fitted(model, data, rules.readout(), "sgd")
        rounded, _ = fitted(model, data, rules.readout(), "sgd", torch.float32)
        assert_near(after, exact, rounded)
        assert out["logits"].shape == (batch, CLASSES)


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.bce])
def test_large_logits_do_not_overflow(loss):
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[300.0, 0.0], [-300.0, 0.0], [0.0, 300.0]]))
    step, state = step_model(read_model(model, rules.readout(), (2,), loss=loss), (2,))
    x, labels = torch.tensor([[3.0, 1.0], [-3.0, 1.0]]), torch.tensor([1, 1])
    after, out = take(session(step), state, x, labels)
    exact, run = fitted(model, (x[None], labels[None]), rules.readout(), "sgd", loss=loss)
    np.testing.assert_allclose(out["losses"], [e.loss for e in run.history], rtol=1e-6)
    assert distance(after, exact) < 1e-4


def inner_graphs(graph):
    for attribute in (a for node in graph.node for a in node.attribute if a.HasField("g")):
        yield attribute.g
        yield from inner_graphs(attribute.g)


@pytest.mark.parametrize("net", [cells, torch_rnn])
def test_inner_graphs_of_an_epoch_cannot_reach_its_first_weights(net):
    """A Scan inside a Scan sees all names outside: it would learn with old weights, silently."""
    epoch, state = epoch_model(read_model(seeded(net), rules.readout(), NETS[net]), NETS[net])
    inside = list(inner_graphs(epoch.graph))
    assert len(inside) >= 3  # the step, and the cells in it
    read = {name for graph in inside for node in graph.node for name in node.input}
    assert not read & {"x", "labels", *state}
    outside = {name for name in read if not name.startswith("step/")}
    assert outside == {"lr", "learn"}


def test_models_are_of_opset_17_with_the_models_names():
    recipe = read_model(seeded(torch_rnn), rules.readout(), (5,), optimizer="adam")
    for model in (step_model(recipe, (5,))[0], predict_model(recipe, (5,))):
        assert model.opset_import[0].version == 17 and model.ir_version == 8
        names = {port.name for port in model.graph.input}
        assert {name for name, _ in seeded(torch_rnn).named_parameters()} <= names
    alone = read_model(nn.Linear(3, 2), rules.readout(), (3,))
    assert set(step_model(alone, (3,))[1]) == {"weight", "bias"}


def test_a_frozen_batch_norm_is_folded(tmp_path):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    for p in (*model[0].parameters(), *model[1].parameters()):
        p.requires_grad_(False)
    rule = [rules.frozen(), rules.tpsgd_l2(), rules.tpsgd_l2()]
    written = export(model, tmp_path / "step.onnx", rule=rule, shape=(1, 4, 4))
    assert set(np.load(written.paths[2])) == {"4.weight", "4.bias", "6.weight", "6.bias"}
    assert "Checked" in written.checked


@pytest.mark.parametrize("projection", ["normal", "uniform", "binary", "per_filter", "orthogonal"])
def test_class_codes_are_those_of_the_library(projection):
    """Bit for bit: small differences in codes hide in the steps."""
    draw = getattr(projections, projection)(0.7)
    recipe = read_model(seeded(cnn), rules.tpsgd_l2(draw), NETS[cnn], seed=5)
    for block in recipe.blocks[:2]:
        P = draw(block.shape, CLASSES, tpsgd.objectives.Key(5, block.number))
        ours = codes_of_classes(block.local.codes, CLASSES).numpy().reshape(P.shape)
        np.testing.assert_array_equal(ours, P.numpy())


@st.composite
def convolutions(draw):
    def pair(low, high):
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    groups = draw(st.integers(1, 3))
    channels, filters = (groups * draw(st.integers(1, 3)) for _ in "io")
    kernel, stride, padding, dilation = pair(1, 4), pair(1, 3), pair(0, 3), pair(1, 3)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(1, s - 2 * p) + n for s, p, n in zip(spans, padding, pair(0, 5), strict=True))
    out = tuple(
        (n + 2 * p - s) // step + 1
        for n, p, s, step in zip(size, padding, spans, stride, strict=True)
    )
    return Convolution(channels, size, filters, kernel, out, stride, padding, dilation, groups)


@given(convolutions(), st.integers(1, 4))
@settings(max_examples=40)
def test_gradient_of_a_convolutions_weight(layer, batch):
    """On random layers, against autograd."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, layer.channels, *layer.size, generator=g, dtype=torch.float64)
    dz = torch.randn(batch, layer.filters, *layer.out, generator=g, dtype=torch.float64)
    shape = layer.filters, layer.channels // layer.groups, *layer.kernel
    weight, bias = torch.zeros(shape).double(), torch.zeros(layer.filters).double()
    weight.requires_grad_(), bias.requires_grad_()
    z = F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    z.backward(dz)
    parameters = {"weight": weight, "bias": bias}
    block = BlockRecipe(0, "", layer, "none", 0.0, (), (), None, True, parameters)
    graph = Graph()
    outputs = []
    for name, grad in gradients(graph, block, "x", "dz").items():
        graph.output(grad, name)
        outputs.append(Port(name, parameters[name].shape))
    inputs = [Port("x", ("batch", *x.shape[1:])), Port("dz", ("batch", *dz.shape[1:]))]
    model = as_model(graph.proto("gradient", inputs, outputs), "")
    grads = session(model).run(None, {"x": x.float().numpy(), "dz": dz.float().numpy()})
    for ours, exact in zip(grads, (weight.grad, bias.grad), strict=True):
        np.testing.assert_allclose(ours, exact.numpy(), atol=2e-6 * max(1, exact.abs().max()))


def without_torch(file, *words):
    """Run a program, in its own folder, in a Python that has neither torch nor this library."""
    hidden = "import sys, runpy; sys.modules['torch'] = sys.modules['tpsgd'] = None; "
    start = f"sys.argv = {[str(w) for w in (file, *words)]!r}; "
    run = f"runpy.run_path({str(file)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", hidden + start + run],
        capture_output=True, cwd=file.parent, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("epoch", "order"), [(False, "--sequential"), (True, "")])
def test_run_py_learns_digits_with_onnxruntime_and_numpy_alone(tmp_path, epoch, order):
    x, y = tpsgd.data.load("digits").train
    np.savez(tmp_path / "digits.npz", x=x.numpy(), y=y.numpy())
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
    )
    file = tmp_path / "net.onnx"
    written = export(model, file, shape=(1, 8, 8), optimizer="adam", epoch=epoch)
    program, trained = written.paths[3], tmp_path / "trained.npz"
    words = [tmp_path / "digits.npz", "--lr", "0.01", "--epochs", "5", "--out", trained, order]
    ended = without_torch(program, *filter(None, words))
    assert not ended.returncode, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == (10 if order else 5)
    assert float(lines[-1].split()[2].rstrip("%")) > 90
    learned = {name: torch.tensor(value) for name, value in np.load(trained).items()}
    model.load_state_dict({name: learned[name] for name, _ in model.named_parameters()})
    assert tpsgd.evaluate(model, (x, y)) > 0.9


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_run_py_learns_digits_by_its_own_settings(tmp_path, optimizer):
    x, y = tpsgd.data.load("digits").train
    np.savez(tmp_path / "digits.npz", x=x.numpy(), y=y.numpy())
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
    )
    export(model, tmp_path / "net.onnx", shape=(1, 8, 8), optimizer=optimizer)
    ended = without_torch(
        tmp_path / "run.py", tmp_path / "digits.npz", "--out", tmp_path / "trained.npz"
    )
    assert float(ended.stdout.splitlines()[-1].split()[2].rstrip("%")) > 85


def test_run_py_refuses_labels_that_are_no_classes(tmp_path):
    export(seeded(cells), tmp_path / "net.onnx", shape=NETS[cells])
    for name, y in (("many", np.full(9, CLASSES)), ("few", np.zeros(3))):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((9, 7, 3)), y=y)
        ended = without_torch(tmp_path / "run.py", tmp_path / f"{name}.npz")
        assert ended.returncode == 1 and ended.stderr.startswith("y must have a class from 0 to 3")


@pytest.mark.parametrize(
    ("arrays", "words", "sentence"),
    [
        ({"x": np.zeros((9, 2)), "y": np.zeros(9)}, (), "x must have numbers of shape (1, 3, 3)"),
        ({"x": np.zeros((9, 9)), "y": np.zeros(9)}, ("--batch", "0"), "--batch and --epochs"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ({"x": np.full((9, 9), "a"), "y": np.zeros(9)}, (), "x must have numbers"),
                ({"x": np.zeros((9, 9))}, (), "must be an .npz file with arrays x and y"),
                ({"x": np.zeros((9, 9)), "y": np.full(9, "a")}, (), "y must have whole numbers"),
                ({"x": np.full((9, 9), np.nan), "y": np.zeros(9)}, (), "not finite"),
                ({"x": np.zeros((9, 9)), "y": np.zeros(9)}, ("--lr", "nan"), "--lr above 0"),
            ]
        ),
    ],
)
def test_run_py_refuses_in_one_sentence(tmp_path, arrays, words, sentence):
    export(seeded(dense), tmp_path / "net.onnx", shape=(1, 3, 3))
    np.savez(tmp_path / "data.npz", **arrays)
    ended = without_torch(tmp_path / "run.py", tmp_path / "data.npz", *words)
    assert ended.returncode == 1 and sentence in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_run_py_scales_as_for_training(tmp_path):
    scaling = {"method": "standard", "shift": [5.0, -1e4], "scale": [1e-3, 1e4]}
    model = seeded(lambda: nn.Sequential(nn.Linear(2, 2)))
    inputs = {"shape": [2], "scaling": scaling}
    written = export(model, tmp_path / "net.onnx", shape=(2,), inputs=inputs)
    assert "run.py standardises them" in str(written)
    random = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = np.stack(
        [5 + 1e-3 * (4 * y - 2 + random.normal(size=200)), -1e4 + 1e4 * random.normal(size=200)], 1
    )
    np.savez(tmp_path / "data.npz", x=x, y=y)
    ended = without_torch(tmp_path / "run.py", tmp_path / "data.npz", "--lr", "0.1")
    assert float(ended.stdout.splitlines()[-1].split()[2].rstrip("%")) > 90, ended.stderr


def test_another_net_is_replaced_only_if_asked(tmp_path):
    first = export(seeded(dense), tmp_path / "step.onnx", shape=(1, 3, 3))
    before = [path.read_bytes() for path in first.paths]
    for name in ("it's.onnx", "step.onnx"):
        with pytest.raises(TpsgdError, match="name a file in another folder, or replace it"):
            export(seeded(dense), tmp_path / name, shape=(1, 3, 3), optimizer="adam")
    assert [path.read_bytes() for path in first.paths] == before
    export(seeded(dense), tmp_path / "step.onnx", shape=(1, 3, 3), optimizer="adam", overwrite=True)
    assert first.paths[0].read_bytes() != before[0]


def test_weights_that_leave_float32_are_refused(tmp_path):
    model = seeded(dense)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e30)
    with pytest.raises(TpsgdError, match="too large for float32"):
        export(model, tmp_path / "new" / "step.onnx", shape=(1, 3, 3))
    assert not list(tmp_path.iterdir())


def test_one_output_that_says_yes_or_no_is_refused(tmp_path):
    with pytest.raises(TpsgdError, match="single yes-or-no output"):
        export(nn.Linear(3, 1), tmp_path / "step.onnx", shape=(3,), loss=losses.bce)


def test_what_was_written(tmp_path):
    model = seeded(dense)
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    written = export(model, tmp_path / "a" / "step.onnx", shape=(1, 3, 3), epoch=True)
    assert [p.name for p in written.paths] == [
        "step.onnx", "predict.onnx", "step.weights.npz", "run.py",
    ]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(
        p.name for p in written.paths
    )
    assert written.bytes == written.paths[0].stat().st_size and 50 < written.nodes < 200
    assert written.checked.startswith("Checked in onnxruntime") and "step.onnx" in str(written)
    state = np.load(written.paths[2])
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and np.array_equal(state[name], p.detach().numpy())
    assert torch.equal(random, torch.get_rng_state())
    export(model, tmp_path / "a" / "step.onnx", shape=(1, 3, 3), overwrite=True)


@pytest.mark.parametrize("constant", ["BETA_1", "BETA_2"])
def test_a_graph_that_differs_from_fit_is_not_left(tmp_path, monkeypatch, constant):
    monkeypatch.setattr(step, constant, 0.95)
    with pytest.raises(TpsgdError, match=r"differs from tpsgd.fit in 1.weight, 1.bias"):
        export(seeded(dense), tmp_path / "step.onnx", shape=(1, 3, 3), optimizer="adam")
    assert not list(tmp_path.iterdir())


def test_without_onnxruntime_the_record_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    written = export(seeded(dense), tmp_path / "step.onnx", shape=(1, 3, 3))
    assert written.checked.startswith("Not checked") and written.paths[0].exists()


def test_without_onnx_an_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(TpsgdError, match="pip install onnx"):
        export(seeded(dense), tmp_path / "step.onnx", shape=(1, 3, 3))


def diagonal():
    return nn.Sequential(tpsgd.Recurrent.diagonal(3, 8), nn.Linear(8, CLASSES))


def all_states():
    first = tpsgd.Recurrent(3, 8, sequence=True)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(7 * 8, CLASSES))


def steps_of_rows():
    return nn.Sequential(nn.Unflatten(1, (7, 3)), cells())


REFUSED = {
    "Unflatten before a recurrent layer": (steps_of_rows, (21,), {}),
    "Recurrent and nn.RNN are": (diagonal, (7, 3), {}),
    "reads the states of all time steps": (all_states, (7, 3), {}),
    "needs the error of the output": (dense, (1, 3, 3), {"rule": rules.dfa()}),
    "optimizer must be one of": (dense, (1, 3, 3), {"optimizer": "rmsprop"}),
    "time steps would take": (cells, (1 << 24, 3), {"rule": rules.tpsgd_l2()}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(tmp_path, sentence):
    net, shape, settings = REFUSED[sentence]
    if shape[0] > 100:  # the sequence itself need not be read
        recipe = read_model(seeded(net), settings["rule"], NETS[net])
        with pytest.raises(TpsgdError, match=sentence):
            step_model(recipe, shape)
        return
    with pytest.raises(TpsgdError, match=sentence):
        export(seeded(net), tmp_path / "new" / "step.onnx", shape=shape, **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["step.txt", "predict.onnx", 'a"b.onnx'])
def test_the_file_has_the_name_of_a_graph(tmp_path, name):
    with pytest.raises(TpsgdError, match=r"must end with \.onnx"):
        export(seeded(dense), tmp_path / name, shape=(1, 3, 3))


@pytest.mark.parametrize("name", ["step.onnx", "predict.onnx", "run.py"])
def test_files_of_the_user_stay(tmp_path, name):
    mine = "import tpsgd\ntpsgd.export.onnx(model, 'step.onnx')"
    (tmp_path / name).write_text(mine)
    with pytest.raises(TpsgdError, match=r"was not written by export\.onnx"):
        export(seeded(dense), tmp_path / "step.onnx", shape=(1, 3, 3))
    assert (tmp_path / name).read_text() == mine


def test_constants_that_no_file_can_have_are_refused(monkeypatch):
    monkeypatch.setattr("tpsgd_export.to_onnx.graph.LARGEST", 1000)
    with pytest.raises(TpsgdError, match="more than an ONNX file can have"):
        step_model(read_model(seeded(cnn), rules.tpsgd_l2(), NETS[cnn]), NETS[cnn])
