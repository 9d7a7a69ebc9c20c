"""Models of any class: their blocks compute what they compute, and learn what they should."""

import operator

import pytest
import torch
from helpers import leaves, same, seeded, state
from published import DENSE_OUTPUTS, NETS, params
from torch import fx, nn
from torch.nn import functional as F

import tpsgd
from tpsgd import TpsgdError, rules, split
from tpsgd.engine.sources.inputs import inputs
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.cuts import traced
from tpsgd.nets.cuts.sections import Section
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.model_inputs import Called, ModelInputs, answer, data_of

ALL = NETS | DENSE_OUTPUTS


def blocks_of(model, x, **words):
    return split(model, inputs(x)[:2], **words)


def through(blocks, x):
    for block in blocks:
        x = block(x)
    return data_of(x)


# ---- every net on the list -----------------------------------------------------------------------


@pytest.mark.parametrize("name", params(ALL))
def test_blocks_compute_what_the_model_computes(name):
    make, samples, count = ALL[name]
    model, x = seeded(make), inputs(samples(3))
    blocks = blocks_of(model, x)
    assert len(blocks) == count, str(blocks)
    for training in (False, True):
        model.train(training)
        for block in blocks:
            block.train(training)
        torch.manual_seed(3)  # masks are drawn in the same order
        expected = Called(model)(x.clone())
        torch.manual_seed(3)
        assert torch.allclose(through(blocks, x.clone()), expected, atol=1e-5), (name, training)


@pytest.mark.parametrize("name", params(ALL))
def test_every_parameter_belongs_to_one_block_and_the_model_stays_what_it_is(name):
    make, samples, _ = ALL[name]
    model = seeded(make)
    before, kind, modes = state(model), type(model), [m.training for m in model.modules()]
    blocks = blocks_of(model, samples(3), blocks="layers")
    learned = [id(p) for block in blocks for p in block.named_parameters().values()]
    assert len(learned) == len(set(learned))
    assert set(learned) == {id(p) for p in model.parameters()}
    assert type(model) is kind and same(before, state(model))
    assert [m.training for m in model.modules()] == modes
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())


def trained(name, train, **settings):
    make, samples, _ = ALL[name]
    model = seeded(make)
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd) or hasattr(m, "drop_rate"):
            m.p = m.drop_rate = 0.0  # masks are drawn in another order
    x = samples(24)
    x = (
        {k: t.double() if t.is_floating_point() else t for k, t in x.items()}
        if isinstance(x, dict)
        else x
    )
    run = train(
        model, (x, torch.arange(24) % 4), epochs=2, batch_size=8, lr=0.05,
        optimizer=tpsgd.sgd, **settings,
    )  # fmt: skip
    return state(model), run


@pytest.mark.parametrize("name", params(NETS))
def test_one_block_is_backprop(name):
    """The local gradient of a block that is the whole net is the gradient of the net."""
    ours, run = trained(name, tpsgd.fit, blocks=1, rule=rules.readout())
    theirs, _ = trained(name, tpsgd.fit_backprop)
    assert len(run.blocks) == 1
    for key, expected in theirs.items():
        torch.testing.assert_close(ours[key], expected, rtol=2e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("name", params(NETS))
def test_every_block_learns_in_place(name, order):
    make, samples, count = NETS[name]
    model, labels = seeded(make), torch.arange(24) % 4
    before = state(model)
    run = tpsgd.fit(model, (samples(24), labels), order=order, epochs=1, batch_size=8)
    assert len(run.blocks) == count
    changed = {k for k, t in state(model).items() if not torch.equal(t, before[k])}
    assert {k for k, _ in model.named_parameters()} <= changed
    assert 0 <= tpsgd.evaluate(model, (samples(24), labels)) <= 1
    if name in ("GRU", "LSTM"):
        assert run.blocks[0].learning == "autograd through time"


@pytest.mark.parametrize("rule", ["auxiliary", "tpsgd-l2", "dfa"])
@pytest.mark.parametrize("name", params(ALL))
def test_a_graph_ends_at_the_parameters_of_its_block(name, rule, monkeypatch):
    learning = set()

    def watched(self, params, x, forward=Autograd.forward):
        saved = forward(self, params, x)
        parameters = set(map(id, self.block.named_parameters().values()))
        reached = {id(leaf) for y in saved.values() if torch.is_tensor(y) for leaf in leaves(y)}
        assert reached <= parameters and not data_of(x).requires_grad
        if reached:
            learning.add(self.block.index)
        return saved

    monkeypatch.setattr(Autograd, "forward", watched)
    make, samples, count = ALL[name]
    model, x = seeded(make), samples(8)
    y = torch.arange(8) % 4 if name in NETS else labels_of_positions(model, x)
    order = tpsgd.simultaneous if rule == "dfa" else tpsgd.sequential
    run = tpsgd.fit(model, (x, y), rule=rule, order=order, loss="cross_entropy", epochs=1)
    by_autograd = [i for i, b in enumerate(run.blocks) if b.learning != "closed form"]
    assert len(run.blocks) == count and learning == set(by_autograd)


def labels_of_positions(model, x):
    out = answer(model(inputs(x)))
    classes_last = out.movedim(1, -1) if out.dim() == 4 else out
    shape, classes = classes_last.shape[:-1], classes_last.shape[-1]
    return (torch.arange(shape.numel()) % classes).view(shape)


# ---- against Sequentials and loops by hand -------------------------------------------------------


class Plain(nn.Module):
    """A net whose activations and shapes are functions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dense = nn.Linear(4 * 2 * 2, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.max_pool2d(F.leaky_relu(self.norm(self.conv(x)), 0.1), kernel_size=2)
        x = x.view(x.size(0), -1)
        return self.head(torch.tanh(self.dense(x)))

    def chain(self):
        return nn.Sequential(
            self.conv, self.norm, nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten(), self.dense,
            nn.Tanh(), self.head,
        )  # fmt: skip


IMAGES = torch.randn(32, 2, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(32) % 3


@pytest.mark.parametrize("rule", ["readout-learned", "tpsgd-l2", "drtp", "frozen"])
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_a_class_learns_what_its_sequential_learns_bit_for_bit(rule, order):
    ours, theirs = seeded(Plain), seeded(Plain)
    settings = {"rule": rule, "order": order, "epochs": 3, "batch_size": 8}
    run = tpsgd.fit(ours, (IMAGES, LABELS), **settings)
    tpsgd.fit(theirs.chain(), (IMAGES, LABELS), **settings)
    assert same(state(ours), state(theirs))
    assert {b.learning for b in run.blocks[:2]} == {"frozen" if rule == "frozen" else "closed form"}


class Skips(nn.Module):
    """Two residual parts, written in the model's own forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(5, 5) for _ in range(4))
        self.stop = lambda y: y

    def forward(self, x):
        x = self.stop(self.a(x))
        x = self.stop(x + torch.tanh(self.b(x)))
        return self.head(self.stop(x + torch.tanh(self.c(x))))


def test_blocks_learn_what_a_loop_with_detach_learns():
    """The gradients of four blocks by one backward pass through a graph that is cut by hand."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 5, generator=g).double(), torch.arange(20) % 5
    codes = {}

    def rule():
        made = rules.readout(calibrate=False)

        def draw(site):
            objective = made.objective(site)
            codes[site.key.block] = objective.tensors[0]
            return objective

        return tpsgd.Rule("kept", draw, per_step=False, classifies=True)

    ours, theirs = seeded(Skips).double(), seeded(Skips).double()
    tpsgd.fit(
        ours, (x, y), rule=rule(), order=tpsgd.simultaneous, epochs=1, batch_size=20,
        optimizer=tpsgd.sgd, lr=0.5,
    )  # fmt: skip
    outputs = []
    theirs.stop = lambda y: outputs.append(y) or y.detach()
    logits = theirs(x)
    losses = [F.cross_entropy(out @ P.T, y) for out, P in zip(outputs, codes.values(), strict=True)]
    (sum(losses) + F.cross_entropy(logits, y)).backward()
    for p in theirs.parameters():
        p.data -= 0.5 * p.grad
    assert len(codes) == 3
    for key, expected in state(theirs).items():
        torch.testing.assert_close(state(ours)[key], expected, rtol=1e-10, atol=1e-12)


# ---- where a net can be cut ----------------------------------------------------------------------


def test_a_skip_stays_in_its_block_and_is_called_by_its_class():
    names = [str(b) for b in split(seeded(NETS["ResNet18"].make), blocks="layers")]
    assert names[0] == "conv1: Conv2d + BatchNorm2d + ReLU"
    assert names[1:3] == ["layer1.0: BasicBlock", "layer1.1: BasicBlock"]
    assert names[-2:] == [
        "layer4.1: BasicBlock + AdaptiveAvgPool2d + Flatten", "fc: Linear",
    ]  # fmt: skip


class LongSkip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.a(x)
        return x + self.c(torch.relu(self.b(x)))


def test_layers_that_a_skip_passes_are_one_block_and_inputs_may_be_read_again():
    assert [str(b) for b in split(LongSkip())] == ["a: Linear", "b: Linear"]
    model, x = seeded(LongSkip), torch.randn(3, 4)
    assert torch.equal(through(blocks_of(model, x), x), model(x))

    class AddsInput(LongSkip):
        def forward(self, x):
            return x + self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    model = seeded(AddsInput)
    assert len(split(model)) == 3
    assert torch.equal(through(blocks_of(model, x), x), model(x))
    tpsgd.fit(model, (torch.randn(20, 4), torch.arange(20) % 4), epochs=2)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.act(self.first(x))
        x = self.act(self.twice(x))
        return self.head(self.act(self.twice(x)))


def test_a_layer_that_is_called_twice_is_one_block_and_an_activation_may_be():
    names = [str(b) for b in split(Shared())]
    assert names == ["first: Linear + ReLU", "twice: 2 x Linear", "head: Linear"]
    ours, theirs = seeded(Shared), seeded(Shared)
    data = torch.randn(20, 4), torch.arange(20) % 3
    settings = {"optimizer": tpsgd.sgd, "lr": 0.1, "epochs": 2, "batch_size": 10}
    tpsgd.fit(ours, data, blocks=1, **settings)
    tpsgd.fit_backprop(theirs, data, **settings)
    for key, expected in state(theirs).items():
        torch.testing.assert_close(state(ours)[key], expected, rtol=1e-5, atol=1e-6)


def test_a_depthwise_convolution_learns_with_the_layer_behind_it():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(),
        nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    assert [len(b.layers) for b in split(net)] == [1, 2, 1]
    assert [len(b.layers) for b in split(net, blocks=2)] in ([1, 3], [3, 1])
    assert [len(b.layers) for b in split(net, blocks="layers")] == [1, 1, 1, 1]
    assert [len(b.layers) for b in split(net, blocks=[1, 1, 2])] == [1, 1, 2]
    with pytest.raises(TpsgdError, match="blocks must be a number from 1 to 3"):
        split(net, blocks=4)
    with pytest.raises(TpsgdError, match="adds up to 3, not to the 4 layers"):
        split(net, blocks=[1, 2])
    last = nn.Sequential(nn.Conv1d(2, 2, 2, groups=2), nn.Flatten())
    assert len(split(last)) == 1


def test_an_embedding_of_a_class_learns_with_the_layer_behind_it():
    assert str(split(seeded(NETS["LSTM"].make))[0]).startswith("embedding-lstm: Embedding + LSTM")
    sequential = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    assert len(split(sequential)) == 2


def test_deep_classes_are_four_blocks_and_shallow_ones_a_block_a_layer():
    assert len(split(seeded(NETS["ResNet18"].make))) == 4
    assert len(split(seeded(NETS["LeNet"].make))) == 5
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)])
    assert len(split(deep)) == 10 and len(split(deep, blocks="auto")) == 4


# ---- words that choose -----------------------------------------------------------------------


def test_split_points_begin_blocks():
    resnet = seeded(NETS["ResNet18"].make)
    blocks = split(resnet, split_points=["layer2", "layer3.1"])
    assert [b.ends[0] for b in blocks] == ["conv1", "layer2.0", "layer3.1"]
    run = tpsgd.fit(
        resnet, (torch.randn(8, 3, 8, 8), torch.arange(8) % 4), epochs=1,
        split_points=["layer2", "layer3.1"],
    )  # fmt: skip
    assert len(run.blocks) == 3 and run.settings["split_points"] == ["layer2", "layer3.1"]
    chain = Plain().chain()
    assert [b.name for b in split(chain, split_points=["5"])] == ["0", "5-7"]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("layer1.0.conv2", r"'layer1.0.conv2' lies inside block layer1.0: BasicBlock"),
        ("bn1", r"a block begins with a layer, and 'bn1' is no layer.*conv1: Conv2d"),
        ("layer9", r"no module 'layer9': did you mean 'layer"),
    ],
)
def test_split_points_that_are_none_are_named(point, message):
    with pytest.raises(TpsgdError, match=message):
        split(seeded(NETS["ResNet18"].make), split_points=[point])


def test_split_points_leave_blocks_out():
    with pytest.raises(TpsgdError, match="leave blocks out"):
        split(Plain(), blocks=2, split_points=["dense"])


class Stage(nn.Sequential):
    pass


@pytest.mark.parametrize("what", [Stage, "Stage", "0"])
def test_no_split_keeps_a_module_in_one_block(what):
    inside = Stage(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    net = nn.Sequential(inside, nn.Linear(4, 3))
    assert len(split(net)) == 3
    assert [len(b.layers) for b in split(net, no_split=[what])] == [2, 1]
    run = tpsgd.fit(net, (torch.randn(9, 4), torch.arange(9) % 3), epochs=1, no_split=[what])
    assert len(run.blocks) == 2


def test_no_split_of_what_is_no_module_is_named():
    with pytest.raises(TpsgdError, match=r"no_split: 'Block' is no module of the model"):
        split(Plain(), no_split=["Block"])
    with pytest.raises(TpsgdError, match="no_split must be a list"):
        split(Plain(), no_split="conv")


def test_the_table_of_a_cut_has_parameters_outputs_and_bytes():
    text = str(split(Plain(), (2, 6, 6)))
    lines = text.splitlines()
    assert lines[0].split() == ["block", "layers", "parameters", "output", "stored"]
    assert lines[1].split()[-4:-2] == ["84", "16"] and lines[1].endswith("KB"), lines[1]
    assert "stored: what the gradients of one sample need" in lines[-1]
    assert "output" not in str(split(Plain()))
    two = split(seeded(NETS["two inputs"].make), ((1, 8, 8), (4,)))
    assert two.outputs[0] == (128,)
    with pytest.raises(TpsgdError, match="shape must be one sample's sizes"):
        split(Plain(), 3)


# ---- what stays whole, and modes -----------------------------------------------------------------


class Looks(nn.Module):
    """Control flow on numbers: it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x) if x.sum() > 0 else x


def test_a_module_that_cannot_be_traced_stays_whole():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.looks, self.head = nn.Linear(4, 4), Looks(), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.looks(torch.relu(self.stem(x))))

    blocks = split(Net())
    assert [str(b) for b in blocks] == ["stem: Linear + ReLU", "looks: Looks", "head: Linear"]
    assert blocks[1].layer.__class__ is Looks


def test_a_module_with_hooks_stays_whole_and_its_hooks_run():
    net, calls = seeded(NETS["VGG"].make), []
    net.features.register_forward_hook(lambda *_: calls.append(1))
    assert str(split(net)[0]).startswith("features: Sequential")
    tpsgd.fit(net, (torch.randn(8, 3, 8, 8), torch.arange(8) % 4), epochs=1, batch_size=8)
    assert calls
    net.register_forward_hook(lambda *_: None)
    with pytest.raises(TpsgdError, match="the model has hooks"):
        split(net)


class Modes(nn.Module):
    """Dropout as a function, in a part that is no module of its own."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 50), nn.Linear(4, 50)
        self.head = nn.Linear(50, 3)

    def forward(self, x):
        x = self.stem(x)
        both = F.dropout(self.a(x), 0.5, self.training) + self.b(x)
        return self.head(F.dropout(torch.relu(both), p=0.5, training=self.training))


def test_dropout_as_a_function_follows_the_mode():
    model, x = seeded(Modes), torch.ones(2, 4)
    _, first, second = split(model)
    assert isinstance(first.layer, Section) and first.layer.evaluating is not None
    assert [type(m) for m in second.prologue] == [nn.Dropout]
    first.train(True)
    assert not torch.equal(first(x), first(x))
    first.train(False)
    assert torch.equal(first(x), first(x))
    assert torch.allclose(first(x), torch.relu(model.a(x) + model.b(x)))


def test_a_part_that_is_another_in_training_stays_whole():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = torch.relu(self.first(x))
            return torch.relu(self.second(x)) if self.training else x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep, self.head = Deep(), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.deep(x))

    assert [str(b) for b in split(Net())] == ["deep: Deep", "head: Linear"]
    with pytest.raises(TpsgdError, match="something else in training mode"):
        split(Deep())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.a(x)
        y = x.view(-1, 2, 2)
        y.add_(1.0)
        x += self.b(x)
        return self.head(F.relu(x, inplace=True))


def test_what_writes_into_an_activation_leaves_that_of_the_block_before_alone():
    model, x = seeded(InPlace), torch.randn(5, 4)
    blocks = split(model)
    y = blocks[0](x)
    before = y.clone()
    assert torch.equal(through(blocks[1:], y), model(x)) and torch.equal(y, before)


def test_blocks_that_do_not_compute_what_the_model_does_are_refused():
    class Counts(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            self.calls += 1
            return self.head(torch.relu(self.layer(x))) * self.calls

    with pytest.raises(TpsgdError, match="do not compute what its forward does"):
        tpsgd.fit(Counts(), (torch.randn(9, 4), torch.arange(9) % 3), epochs=1)


def test_an_encoder_of_torch_is_cut_between_its_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.stem = nn.Linear(4, 8)
            self.encoder = nn.TransformerEncoder(
                layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False
            )
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.encoder(self.stem(x)).mean(1))

    model, x = seeded(Net).eval(), torch.randn(2, 5, 4)
    blocks = blocks_of(model, x)
    assert [b.ends[0] for b in blocks] == [
        "stem", "encoder.layers.0", "encoder.layers.1", "head",
    ]  # fmt: skip
    assert torch.allclose(through(blocks, x), model(x), atol=1e-5)


# ---- inputs, answers -----------------------------------------------------------------------------


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, scale=None):
        x = torch.relu(self.layer(x))
        if scale is not None:
            x = x * scale[:, None]
        return {"logits": self.head(x), "hidden": x}


def test_an_argument_that_is_not_given_has_its_default():
    model, x, scale = seeded(Optional), torch.randn(6, 4), torch.rand(6)
    for values in (x, (x, scale), {"x": x, "scale": scale}):
        samples = inputs(values)
        expected = answer(samples.call(model)) if isinstance(samples, ModelInputs) else model(x)
        expected = expected["logits"] if isinstance(expected, dict) else expected
        assert torch.equal(through(blocks_of(model, samples), samples), expected)
        tpsgd.fit(model, (values, torch.arange(6) % 3), epochs=1)
        assert 0 <= tpsgd.evaluate(model, (values, torch.arange(6) % 3)) <= 1


def test_inputs_of_different_lengths_are_refused():
    with pytest.raises(TpsgdError, match="must have a row for each sample, got a: 3, b: 4"):
        inputs({"a": torch.zeros(3, 1), "b": torch.zeros(4, 1)})
    with pytest.raises(TpsgdError, match=r"the model needs the input 'scale' \(argument 1\)"):
        ModelInputs({"x": torch.zeros(3)}).get("scale", 1)


def test_batches_that_are_dicts_have_labels():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return {"x": torch.full((4,), float(i)), "labels": i % 3}

    run = tpsgd.fit(seeded(Optional), torch.utils.data.DataLoader(Rows(), 4), epochs=2)
    assert run.sample_passes == 2 * 2 * 12


def test_a_graph_of_the_library_is_that_of_torch_fx():
    """The nodes of a trace are those that fx itself finds; nothing is left out."""
    model = seeded(Plain)
    targets = [n.target for n in fx.symbolic_trace(model).graph.nodes if n.op != "output"]
    nodes = traced.trace(model).nodes
    assert [n.target for n in nodes if n.op != "output"] == targets
    assert operator.getitem not in targets and len(layers_of(model)) == 3


def test_a_softmax_at_the_end_is_a_module_after_the_last_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return F.log_softmax(self.b(torch.relu(self.a(x))), dim=1)

    last = split(Net())[-1]
    assert type(last.layer) is nn.Linear and isinstance(last.modules[-1], nn.LogSoftmax)


class Three(nn.Module):
    """Three layers; what `forward` does between them is a test's."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def rest(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


ROWS, NUMBERED = torch.randn(20, 8), torch.arange(20) % 3


def test_a_trace_leaves_the_model_as_it_was():
    class Keeps(Three):
        def __init__(self):
            super().__init__()
            self.calls, self.norm = 0, nn.BatchNorm1d(8).eval()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.count += 1
            self.hidden = self.norm(x)
            return self.rest(self.hidden)

    model = Keeps()
    before, modes = state(model), [m.training for m in model.modules()]
    assert len(split(model, (8,))) == 3
    tpsgd.fit(model, (ROWS, NUMBERED), epochs=1)
    assert model.calls == 0 and model.count == 0 and not hasattr(model, "hidden")
    assert [m.training for m in model.modules()] == modes and state(model).keys() == before.keys()


def test_constants_that_forward_makes_go_with_their_block():
    class Scales(Three):
        def forward(self, x):
            return self.rest(x) * torch.tensor([1.0, 2.0, 3.0])

    model = Scales()
    assert torch.allclose(through(split(model), ROWS), model(ROWS))
    tpsgd.fit(model, (ROWS, NUMBERED), epochs=1)
    assert not any("constant" in name for name in vars(model))


def test_random_numbers_in_evaluation_mode_are_no_other_function():
    class Noise(Three):
        def forward(self, x):
            return self.rest(F.dropout(x, 0.3) + torch.randn_like(x))

    assert len(tpsgd.fit(Noise(), (ROWS, NUMBERED), epochs=1).blocks) == 3


def test_arguments_that_are_not_read_may_be_any():
    class Options(Three):
        def forward(self, x=None, *more, **options):
            return self.rest(x)

    class First(Three):
        def forward(self, *inputs):
            return self.rest(inputs[0])

    assert len(split(Options(), (8,))) == len(split(Options())) == 3
    tpsgd.fit(Options(), (ROWS, NUMBERED), epochs=1)
    with pytest.raises(TpsgdError, match=r"it reads \*inputs"):
        split(First())


class Two(Three):
    def forward(self, x, z):
        return self.rest(x + z)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (ROWS, "x, 1 input: missing a required argument: 'z'"),
        ((ROWS, ROWS, ROWS), "x, 3 inputs: too many positional arguments"),
        ({"x": ROWS, "y": ROWS}, "x, 2 inputs: missing a required argument: 'z'"),
    ],
    ids=["one", "three", "another"],
)
def test_inputs_that_forward_does_not_take_are_refused(x, said):
    with pytest.raises(TpsgdError, match=f"Two.forward does not fit {said}; several inputs"):
        tpsgd.fit(Two(), (x, NUMBERED), epochs=1)


def test_held_out_samples_with_too_few_inputs_are_refused():
    with pytest.raises(TpsgdError, match="it takes several inputs: pass x as a tuple or a dict"):
        tpsgd.fit(Two(), ((ROWS, ROWS), NUMBERED), epochs=1, validation=(ROWS, NUMBERED))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_refused():
    compiled = [torch.compile(nn.Linear(8, 3)), torch.jit.script(nn.Linear(8, 3))]
    for module in [*compiled, *map(nn.Sequential, compiled)]:
        with pytest.raises(TpsgdError, match="is compiled: pass the module as it was before"):
            split(module)


def test_split_points_are_names():
    with pytest.raises(TpsgdError, match="must be a list of names of modules, got 3"):
        split(nn.Sequential(nn.Linear(8, 3)), split_points=3)


def test_an_output_without_a_dimension_for_numbers_is_refused():
    class Squeezed(Three):
        def forward(self, x):
            return self.rest(x)[:, 0]

    with pytest.raises(TpsgdError, match=r"\(batch,\).*so that it gives \(batch, 1\)"):
        tpsgd.fit(Squeezed(), (ROWS, ROWS[:, 0]), epochs=1)


@pytest.mark.parametrize("name", ["prediction_logits", "logits", "other", "tuple"])
def test_the_answer_among_several_outputs(name):
    class Several(Three):
        def forward(self, x):
            hidden, out = torch.relu(self.a(x)), self.rest(x)
            if name == "tuple":
                return None, out, hidden
            return {name: out, "hidden": hidden} if name == "other" else {"h": hidden, name: out}

    model = Several()
    assert split(model, (8,)).outputs[-1] == (3,)
    tpsgd.fit(model, (ROWS, NUMBERED), epochs=1)
    assert 0 <= tpsgd.evaluate(model, (ROWS, NUMBERED)) <= 1


def test_outputs_inside_of_others_are_refused():
    class Nested(Three):
        def forward(self, x):
            return (self.rest(x), x), x

    with pytest.raises(TpsgdError, match="it does not return a tensor"):
        tpsgd.fit(Nested(), (ROWS, NUMBERED), epochs=1)


class WithoutGradients(nn.Module):
    """A part that shall not learn."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return F.relu(self.second(x))


def test_a_part_without_gradients_stays_whole():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = WithoutGradients(), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.part(x))

    model = Net()
    before = model.part.first.weight.clone()
    assert len(split(model)) == 2
    tpsgd.fit(model, (torch.randn(16, 4), torch.arange(16) % 3), epochs=2, lr=0.1)
    assert torch.equal(model.part.first.weight, before)
    with pytest.raises(TpsgdError, match="it turns gradients off"):
        split(WithoutGradients())
