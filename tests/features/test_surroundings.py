"""What is around `fit`, or hangs on its model: threads, dtypes, hooks, norms, callbacks."""

import copy
import warnings
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from helpers import mlp, points, same, state
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as spectral_norm_by_hook
from torch.nn.utils import weight_norm as weight_norm_by_hook

import tpsgd
from tpsgd import TpsgdError, rules
from tpsgd.engine.fast import replay

X, Y = points(256)
IMAGES = torch.randn(96, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 3
pytestmark = pytest.mark.usefixtures("unwatched")


def cnn() -> nn.Sequential:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers)


def recurrent() -> nn.Sequential:
    return nn.Sequential(tpsgd.Recurrent(2, 4), nn.Linear(4, 3))


CASES = {
    "mlp": (lambda: mlp(6, 8, 8, 3), (X, Y), {}),
    "simultaneous": (lambda: mlp(6, 8, 8, 3), (X, Y), {"order": tpsgd.simultaneous}),
    "ridge": (lambda: mlp(6, 8, 3), (X, Y), {"optimizer": [tpsgd.sgd, tpsgd.ridge()]}),
    "dfa": (lambda: mlp(6, 8, 3), (X, Y), {"rule": rules.dfa()}),
    "predsim": (cnn, IMAGES, {"rule": rules.predsim()}),
    "auxiliary": (cnn, IMAGES, {"rule": rules.auxiliary()}),
    "orthogonal": (
        lambda: mlp(6, 8, 3),
        (X, Y),
        {"rule": rules.readout(projection=tpsgd.projections.orthogonal())},
    ),
    "cnn": (cnn, IMAGES, {}),
    "recurrent": (recurrent, (X.view(256, 3, 2), Y), {}),
    "budget": (lambda: mlp(6, 8, 8, 3), (X, Y), {"memory": "64KB"}),
}


def fresh(name: str) -> nn.Module:
    torch.manual_seed(1)
    return CASES[name][0]().float()


def trained(name: str, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The state of a net after `fit`."""
    _, data, settings = CASES[name]
    model = fresh(name) if model is None else model
    tpsgd.fit(model, data, epochs=2, batch_size=8, seed=3, **settings)
    return state(model)


@pytest.fixture(scope="module")
def expected():
    return {name: trained(name) for name in CASES}


def test_several_threads_train_what_one_would(expected):
    models, states = {name: fresh(name) for name in CASES}, {}

    def train(name):
        states[name] = trained(name, models[name])

    threads = [Thread(target=train, args=(name,)) for name in CASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in CASES:
        assert same(states[name], expected[name]), name


@contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_a_default_dtype_changes_nothing(name, expected):
    model = fresh(name)
    with double():
        assert same(trained(name, model), expected[name])


@double()
def test_exports_and_adaptors_under_a_default_dtype(tmp_path):
    model, x = mlp(6, 4, 3).float(), torch.rand(40, 6, dtype=torch.float32)
    exported = tpsgd.export.c(model, tmp_path / "net", shape=(6,), samples=x)
    assert exported.checked.startswith(("run beside", "not run"))
    pytest.importorskip("onnxruntime")
    exported = tpsgd.export.onnx(model, tmp_path / "step.onnx", shape=(6,))
    assert exported.checked.startswith("Checked")
    backbone = tpsgd.adapt.Backbone(model, ["1"])
    adaptor = tpsgd.adapt.fit(backbone, (x, torch.arange(40) % 2), taps="1", epochs=1)
    assert adaptor(x).shape == (40, 2)


@pytest.mark.parametrize("name", CASES)
def test_autocast_is_ignored(name, expected):
    model = fresh(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(trained(name, model), expected[name])


@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_weights_that_autocast_has_rounded_before_are_not_taken_again(fit):
    def losses():
        torch.manual_seed(0)
        run = fit(mlp(6, 32, 3), (X, Y), epochs=3, batch_size=16, precision=torch.bfloat16)
        return [epoch.loss for epoch in run.history]

    plain = losses()
    with torch.autocast("cpu", torch.bfloat16):
        assert losses() == plain and plain[-1] < 0.97 * plain[-3]


def test_autocast_is_ignored_in_plans_streams_and_exports(tmp_path):
    def results():
        torch.manual_seed(0)
        model = mlp(6, 4, 3)
        plan = str(tpsgd.plan(model, (6,), batch_size=8, samples=64))
        stream = tpsgd.Stream(copy.deepcopy(model)).partial_fit(X[:16], Y[:16])
        exported = tpsgd.export.c(
            model, tmp_path / "net", shape=(6,), samples=X[:32], overwrite=True
        )
        return plan, [p.tolist() for p in stream.model.parameters()], exported.checked

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert results() == plain


# ---- hooks and norms of weights ------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def halve_input(module, arguments):
    return (arguments[0] / 2,)


def halve_output(module, arguments, output):
    return output / 2


def quietly(norm, layer):
    with warnings.catch_warnings():  # torch has newer ones
        warnings.simplefilter("ignore")
        return norm(layer)


def halve_forward(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) / 2


CHANGED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm by hook": lambda layer: quietly(weight_norm_by_hook, layer),
    "spectral_norm by hook": lambda layer: quietly(spectral_norm_by_hook, layer),
    "parametrization": lambda layer: parametrize.register_parametrization(
        layer, "weight", Halved()
    ),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "input hook": lambda layer: layer.register_forward_pre_hook(halve_input),
    "output hook": lambda layer: layer.register_forward_hook(halve_output),
    "gradient hook": lambda layer: layer.weight.register_hook(lambda grad: grad / 2),
    "backward hook": lambda layer: layer.register_full_backward_pre_hook(lambda m, g: (g[0] / 2,)),
    "patched forward": halve_forward,
}
LAYERS = {"linear": (lambda: nn.Linear(6, 3), X), "conv": (lambda: nn.Conv1d(1, 3, 6), X[:, None])}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("change", CHANGED)
def test_gradients_go_where_a_changed_layer_has_its_parameters(change, kind):
    """One step with all samples, against one that is written out in torch."""
    make, x = LAYERS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Flatten())
    CHANGED[change](model[0])
    twin = nn.Sequential(make(), nn.Flatten())
    CHANGED[change](twin[0])
    twin.load_state_dict(model.state_dict())
    run = tpsgd.fit(model, (x, Y), epochs=1, batch_size=256, optimizer=tpsgd.sgd, lr=0.5)
    optimizer = torch.optim.SGD(twin.train().parameters(), lr=0.5)
    F.cross_entropy(twin(x), Y).backward()
    optimizer.step()
    assert run.blocks[0].learning == "autograd"
    expected = twin.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-6), name


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("change", CHANGED)
def test_a_hidden_layer_that_was_changed_learns(change):
    torch.manual_seed(0)
    model = mlp(6, 8, 3)
    CHANGED[change](model[0])
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = tpsgd.fit(model, (X, Y), epochs=2, batch_size=32)
    assert [block.learning for block in run.blocks] == ["autograd", "closed form"]
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


RECURRENT = {
    "output hook": lambda model: model[0].register_forward_hook(halve_output),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0].cells[0], "weight_h"),
    "gradient hook": lambda model: model[0].cells[0].weight_h.register_hook(lambda grad: grad),
    "patched forward": lambda model: halve_forward(model[0]),
}


@pytest.mark.parametrize("change", RECURRENT)
def test_a_recurrent_layer_that_was_changed_is_refused_and_backprop_takes_it(change):
    model, data = recurrent(), (X.view(256, 3, 2), Y)
    RECURRENT[change](model)
    with pytest.raises(TpsgdError, match=r"Recurrent \(module '0'\) has hooks or a parametrizat"):
        tpsgd.fit(model, data, epochs=1)
    tpsgd.fit_backprop(model, data, epochs=1)
    rnn = nn.Sequential(nn.RNN(2, 4, batch_first=True), nn.Linear(4, 3))
    rnn[0].register_forward_hook(lambda *_: None)
    with pytest.raises(TpsgdError, match=r"RNN \(module '0'\) has hooks"):
        tpsgd.split(rnn)


def test_hooks_on_the_whole_model_are_refused_and_backprop_runs_them():
    calls = []
    model = nn.Sequential(*mlp(6, 8, 3), nn.LogSoftmax(1))
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(TpsgdError, match="the model has hooks, which blocks that learn one by one"):
        tpsgd.fit(model, (X, Y))
    tpsgd.fit_backprop(model, (X, Y), epochs=1, batch_size=64)
    assert len(calls) >= 4


def test_a_hook_that_waits_for_accumulated_gradients_is_refused():
    model = mlp(6, 8, 3)
    model[0].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(TpsgdError, match=r"0\.weight has a hook that waits for gradients"):
        tpsgd.fit(model, (X, Y))


@pytest.mark.parametrize("change", ["weight_norm by hook", "output hook", "patched forward"])
def test_a_layer_that_was_changed_is_not_exported(change, tmp_path):
    model = mlp(6, 8, 3)
    CHANGED[change](model[0])
    with pytest.raises(TpsgdError, match=r"hooks, .* are not exported"):
        tpsgd.export.c(model, tmp_path / "net", shape=(6,))


# ---- callbacks that change the model -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fit", "settings"),
    [
        (tpsgd.fit, {}),
        (tpsgd.fit, {"memory": tpsgd.Memory(reuse=False)}),
        (tpsgd.fit, {"order": tpsgd.simultaneous}),
        (tpsgd.fit_backprop, {}),
    ],
)
def test_a_callback_may_evaluate_the_model(fit, settings):
    def trained(*modes):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), *mlp(8, 8, 3), nn.BatchNorm1d(3)
        )
        callbacks = [lambda epoch, mode=mode: model.train(mode) and None for mode in modes]
        fit(model, (X, Y), epochs=2, batch_size=64, callbacks=callbacks, **settings)
        return state(model)

    expected = trained()
    assert same(trained(False), expected) and same(trained(False, True), expected)


def half_of(model, layer):
    return {k: v / 2 if k == f"{layer}.weight" else v for k, v in model.state_dict().items()}


@torch.no_grad()
def in_place(model, layer):
    model[layer].weight.div_(2)


def by_data(model, layer):
    model[layer].weight.data.div_(2)


def other_data(model, layer):
    model[layer].weight.data = model[layer].weight.data / 2


def by_state(model, layer):
    model.load_state_dict(half_of(model, layer))


def assigned(model, layer):
    model.load_state_dict(half_of(model, layer), assign=True)


def other_module(model, layer):
    model[layer] = copy.deepcopy(model[layer])


def frozen(model, layer):
    model[layer].weight.requires_grad_(False)


def converted(model, layer):
    model.double()


def with_hook(model, layer):
    model[layer].register_forward_hook(halve_output)


NUMBERS = [in_place, by_data, other_data, by_state]


def fit_and_change(change, layer, block, **settings):
    torch.manual_seed(0)
    model = mlp(6, 8, 8, 3)

    def callback(epoch):
        if (epoch.block, epoch.epoch) == (block, 2):
            change(model, layer)

    tpsgd.fit(model, (X, Y), epochs=4, batch_size=8, callbacks=[callback], **settings)
    return state(model)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_numbers_that_a_callback_changes_are_followed(layer, order, tapes, monkeypatch):
    """In the block that learns, and where nothing is kept, in blocks before it."""
    settings = {"order": order, "memory": tpsgd.Memory(reuse=False)}
    quick = [fit_and_change(change, layer, 2, **settings) for change in NUMBERS]
    assert len(tapes) >= len(NUMBERS)
    monkeypatch.setattr(replay, "_can_replay", lambda *_: False)
    plain = fit_and_change(in_place, layer, 2, **settings)
    assert all(same(weights, plain) for weights in quick)
    assert not same(plain, fit_and_change(lambda *_: None, layer, 2, **settings))


@pytest.mark.parametrize("change", NUMBERS)
def test_a_block_whose_outputs_are_kept_cannot_change(change):
    with pytest.raises(TpsgdError, match=r"a callback changed block 1 \(0: Linear .* were kept"):
        fit_and_change(change, 0, 2, memory=tpsgd.Memory(reuse=True))


@pytest.mark.parametrize("change", [assigned, other_module, frozen, converted, with_hook])
def test_a_callback_replaces_nothing(change):
    with pytest.raises(TpsgdError, match=r"a callback replaced, froze or converted .*'0"):
        fit_and_change(change, 0, 1)
