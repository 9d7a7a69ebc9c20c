"""Which steps may be captured and replayed, those that never wait for the device; and replays."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import close, folded, images, mlp, quartic, seeded, state
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tpsgd
from tpsgd import rules, split
from tpsgd.engine.fast import cuda_graphs, wrapper
from tpsgd.engine.fast.cuda_graphs import CapturedStep, _can_capture, _capturable, suits_two_streams
from tpsgd.engine.learners.learner import BlockLearner
from tpsgd.engine.learners.optimizers import momentum
from tpsgd.engine.learners.updaters import OptimizerSteps
from tpsgd.engine.settings import BlockSettings
from tpsgd.engine.sources.augment import (
    RandomNumbers,
    chain,
    crop,
    cutout,
    flip,
    jitter,
    resized_crop,
)
from tpsgd.maths.kernels import through_norm
from tpsgd.maths.random import Key
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.objectives import Site, differentiate

pytestmark = pytest.mark.usefixtures("unwatched")

WHOLE = {  # whose losses look at the whole batch
    "predsim": rules.predsim,
    "auxiliary": rules.auxiliary,
    "standardised": lambda: rules.tpsgd_l2(standardise=True),
    "standardised, pooled": lambda: rules.drtp(features=8, standardise=True),
}
EACH = {
    "readout": rules.readout,
    "readout, learned": lambda: rules.readout(learned=True),
    "l1": rules.tpsgd_l1,
    "pooled": lambda: rules.tpsgd_l2(features=8),
}
TRACED = {  # a loss of the caller's own, which autograd differentiates
    "own": lambda: rules.tpsgd(quartic),
    "own, pooled": lambda: rules.tpsgd(quartic, features=8),
    "own, standardised": lambda: rules.tpsgd(quartic, standardise=True),
}
SITES = [Site((6,), 3, Key()), Site((4, 6, 6), 3, Key(), maps=True)]


def learner(rule, site):
    """A block that is about to learn by a rule."""
    net = mlp(5, 6, 3) if len(site.shape) == 1 else nn.Sequential(nn.Conv2d(2, 4, 3, padding=1))
    block = split(net)[0]
    settings = BlockSettings(1, torch.optim.SGD, 0.1)
    params = {f"0.{name}": p for name, p in block.layer.named_parameters()}
    gradient, updater = ClosedForm(block, rule.at), OptimizerSteps()
    made = BlockLearner(block, gradient, updater, lambda: rule.objective(site), settings, params)
    made.start()
    return made


@pytest.mark.parametrize("site", SITES, ids=["vectors", "maps"])
@pytest.mark.parametrize("name", [*WHOLE, *EACH, *TRACED])
def test_a_step_is_captured_where_its_loss_has_a_written_derivative(name, site):
    made = learner((WHOLE | EACH | TRACED)[name](), site)
    assert made.written_out is _capturable(made) is (name not in TRACED)
    assert made.mean_over_samples is (name in EACH)


class Elsewhere(TorchDispatchMode):
    """Notes every operation that touches a tensor which is not on the device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.found = device, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        self.found += [str(function) for t in tensors if t.device.type != self.device]
        return out


@pytest.mark.parametrize("site", SITES, ids=["vectors", "maps"])
@pytest.mark.parametrize("name", [*WHOLE, *EACH])
def test_an_objective_with_a_written_derivative_stays_on_the_device_and_never_waits_for_it(
    name, site
):
    """Tensors of the meta device have no numbers: to look at one, or to bring one, would fail."""
    wish = (WHOLE | EACH)[name]().objective(site)
    y, *own = (t.to("meta") for t in (torch.zeros(5, *site.shape), *wish.tensors))
    for s in (torch.zeros(5, dtype=torch.long), torch.zeros(5, site.classes)):
        with Elsewhere("meta") as watch:
            local = wish(y, s.to("meta"), *own)
        assert watch.found == ["aten._to_copy.default"]  # the labels', here
        assert local.dy.shape == y.shape and local.loss.is_meta


def test_what_waits_or_brings_a_number_would_be_seen():
    y = torch.zeros(5, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        y.sum().item()
    with Elsewhere("meta") as watch:
        y + torch.zeros(())
    assert watch.found == ["aten.zeros.default", "aten.add.Tensor"]


# ---- replays -------------------------------------------------------------------------------------

EVERY = chain(flip(), crop(1), crop(1, reflect=True), cutout(2), resized_crop(), jitter())
SETTINGS = {
    "plain": {},
    "augmented": {"augment": EVERY},
    "micro-batches": {"micro_batch": 3},  # of 2, 3 and 3 samples
    "two micro-batches": {"micro_batch": 4},
    "augmented micro-batches": {"micro_batch": 2, "augment": chain(flip(), crop(1))},
    "inputs recomputed": {"reuse": False},
    "several optimizers": {"optimizer": tpsgd.sgd, "lr": 0.1},
    "a rate per batch": {"lr_schedule": tpsgd.one_cycle(), "lr": 0.01},
    "a rate per batch of micro-batches": {"lr_schedule": tpsgd.one_cycle(), "micro_batch": 3},
}
RULES = {
    "readout": rules.readout,
    "readout, learned": lambda: rules.readout(learned=True),
    "l2": rules.tpsgd_l2,
    "l2, standardised": lambda: rules.tpsgd_l2(standardise=True),
    "predsim": rules.predsim,
    "auxiliary": rules.auxiliary,
    "auxiliary, as published": lambda: rules.auxiliary(kernels=(1, 3), share=0),
    "predsim, no convolution": lambda: rules.predsim(convolve=False),
    "sdfa": rules.sdfa,
}
ORDERS = {f.__name__: f for f in (tpsgd.sequential, tpsgd.simultaneous)}


def convnet(norm: bool = False):
    def make():
        norms = [nn.BatchNorm2d(4)] if norm else []
        first = nn.Conv2d(2, 4, 3, padding=1), *norms, nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(
            *first, nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
        )

    return seeded(make)


def trained(rule, order, norm=False, **settings):
    """Weights after two epochs of nine batches and a smaller one."""
    settings = folded(**({"epochs": 2, "batch_size": 8} | settings))
    model = convnet(norm)
    tpsgd.fit(model, images(75), rule=rule, order=ORDERS[order], **settings)
    return state(model)


class Replayed(CapturedStep):
    """A graph that computes its step again, on the tensors that it was captured with."""

    captures = 0

    def _warm_up(self, learners, batch):
        self.step(learners, batch)

    def _capture(self, learners, batch):
        type(self).captures += 1
        for tensor in cuda_graphs.tensors_of(batch.index):
            assert tensor._base is None  # no view of an epoch's tensors, which would not change
        return SimpleNamespace(replay=lambda: self.step(learners, batch))


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_replays_read_what_differs_between_batches(name, order, monkeypatch):
    settings = SETTINGS[name]
    plain = trained(rules.readout(), order, **settings)
    monkeypatch.setattr(cuda_graphs, "_can_capture", lambda *arguments: True)
    monkeypatch.setattr(cuda_graphs, "CapturedStep", Replayed)
    monkeypatch.setattr(Replayed, "captures", 0)
    close(plain, trained(rules.readout(), order, **settings))
    parts = 3 if settings.get("micro_batch") in (2, 3) else 2 if "micro_batch" in settings else 1
    assert Replayed.captures == parts * (3 if order == "sequential" else 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_which_sources_are_captured(name, monkeypatch):
    """On a net whose device is said to be a GPU."""
    nets = []
    settings = folded(**(SETTINGS[name] | {"batch_size": 8}))
    tpsgd.fit(convnet(), images(75), order=nets.append, **settings)
    form = nets[0].source.form
    gpu = SimpleNamespace(type="cuda")

    def asked(net, source):
        while not hasattr(source, "x"):
            source = source.source
        source.form = replace(form, device=gpu)
        source.x = source.x.as_subclass(OnGpu)
        return _can_capture([], net.source, library_only=True)

    class OnGpu(torch.Tensor):
        device = gpu

    assert asked(nets[0], nets[0].source)
    for own in (lambda x: x, chain(flip(), lambda x: x)):
        tpsgd.fit(convnet(), images(75), order=nets.append, augment=own, batch_size=8)
        assert not asked(nets[-1], nets[-1].source)


def test_updates_run_on_a_second_stream_where_outputs_are_small():
    def asked(model=None, **settings):
        nets = []
        settings = folded(**({"batch_size": 8} | settings))
        model = model or convnet()
        tpsgd.fit(model, images(75), order=nets.append, **settings)
        form = replace(nets[0].source.form, device=torch.device("cuda"))
        return suits_two_streams(nets[0].learners, form)

    assert asked()
    assert not asked(micro_batch=4)
    assert not asked(batch_size=64 << 10)
    assert not asked(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)))
    odd = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Hardtanh(), nn.Flatten(), nn.Linear(64, 3))
    assert not asked(odd)  # autograd has streams of its own


# ---- on a GPU, where there is one ----------------------------------------------------------------


def on_cuda(form):
    return form.device.type == "cuda"


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture
def both(monkeypatch):
    """Train on a GPU with steps captured and with plain ones."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    def call(rule, order, captures=True, **settings):
        made = []
        capture = CapturedStep._capture
        settings |= {"device": "cuda"}
        with monkeypatch.context() as patch:
            watched = lambda *a: made.append(1) or capture(*a)  # noqa: E731
            patch.setattr(CapturedStep, "_capture", watched)
            first = trained(rule, order, **settings)
        assert bool(made) is captures
        with monkeypatch.context() as patch:
            patch.setattr("tpsgd.engine.fast.wrapper.captured", lambda step, *_: step)
            return first, trained(rule, order, **settings)

    return call


@on_gpu
@pytest.mark.parametrize("norm", [False, True], ids=["", "batch norm"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RULES)
def test_captured_steps_learn_what_plain_ones_do(name, order, norm, both):
    if name == "sdfa" and order == "sequential":
        pytest.skip("it needs the error of the net's output")
    close(*both(RULES[name](), order, norm=norm), rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rule", ["readout", "l2"])
def test_and_so_they_do_with_every_setting(rule, name, order, both):
    close(*both(RULES[rule](), order, **SETTINGS[name]), rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["readout", "predsim"])
def test_and_in_blocks_of_several_layers(name, order, blocks, precision, both):
    settings = {"blocks": blocks, "precision": precision, "norm": True}
    rtol, atol = (1e-4, 1e-5) if precision is None else (1e-2, 1e-3)
    close(*both(RULES[name](), order, **settings), rtol=rtol, atol=atol)


@on_gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name",
    ["readout", "predsim", "predsim, no convolution", "auxiliary", "auxiliary, as published"],
)
def test_and_in_a_lower_precision(name, order, both):
    settings = {"precision": torch.bfloat16, "augment": chain(flip(), crop(1, reflect=True))}
    close(*both(RULES[name](), order, norm=True, **settings), rtol=1e-2, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("name", ["readout", "l2", "predsim", "auxiliary", "sdfa"])
def test_and_with_updates_on_a_second_stream(name, two_streams, both, monkeypatch):
    monkeypatch.setattr(wrapper, "suits_two_streams", lambda _, form: two_streams and on_cuda(form))
    settings = {"epochs": 20, "batch_size": 8}
    close(*both(RULES[name](), "simultaneous", **settings), rtol=1e-3, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.01, "clip": 0.5}], ids=["", "both"])
@pytest.mark.parametrize("optimizer", [None, momentum], ids=["Adam", "SGD"])
def test_and_with_an_optimizer_aside_while_the_next_block_computes(
    optimizer, settings, both, monkeypatch
):
    settings |= {"epochs": 8, "batch_size": 8, "blocks": [2, 1], "optimizer": optimizer}
    aside, _ = both(rules.auxiliary(), "simultaneous", **settings)
    monkeypatch.setattr(wrapper, "suits_optimizers_aside", lambda *_: False)
    _, plain = both(rules.auxiliary(), "simultaneous", **settings)
    close(aside, plain, rtol=1e-3, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_norms_derivative_in_place_is_torchs(layout):
    x, dz = (torch.randn(21, 6, 8, 8, device="cuda").to(memory_format=layout) for _ in range(2))
    weight, shift = torch.rand(2, 6, device="cuda").unbind()
    _, *stats = torch.native_batch_norm(x, weight, shift, None, None, True, 0.0, 1e-5)
    wanted = torch.ops.aten.native_batch_norm_backward(
        dz, x, weight, None, None, *stats, True, 1e-5, (True, True, True)
    )
    torch.testing.assert_close(through_norm.in_place(dz, x, weight, *stats), wanted)


@on_gpu
def test_augmentation_by_a_function_of_ones_own_is_not_captured(both):
    found = both(rules.readout(), "simultaneous", captures=False, augment=lambda x: x + 1)
    close(*found, rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("augment", [EVERY, chain(flip(), crop(2, reflect=True))])
def test_pictures_are_the_same_on_every_device(augment):
    x = images(20)[0]
    there, here = (
        augment(x.to(device), RandomNumbers(Key(3), augment.numbers, 20, device)(5, 0, 20))
        for device in (torch.device("cuda"), torch.device("cpu"))
    )
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("convolve", [True, False])
@pytest.mark.parametrize("features", [1, 16, 100])
def test_predsims_derivative_is_the_losss_there_too(features, convolve):
    site = Site((4, 6, 6), 3, Key(1), maps=True, device="cuda", dtype=torch.float64)
    objective = rules.predsim(features=features, convolve=convolve).objective(site)
    y = torch.randn(5, 4, 6, 6, dtype=torch.float64, device="cuda").relu()
    y[0, 1] = 0.5
    y = y.contiguous(memory_format=torch.channels_last)
    s = torch.tensor([0, 1, 2, 1, 0], device="cuda")
    found = objective(y, s)
    wanted = differentiate(objective.loss, y, s, objective.tensors, len(objective.tensors))
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.dy[1:], wanted.dy[1:], rtol=1e-7, atol=1e-9)
    assert found.dy.isfinite().all()


@on_gpu
def test_backprop_in_micro_batches_is_captured(monkeypatch):
    weights = []
    for capture in (cuda_graphs.captured, lambda step, *_: step):
        monkeypatch.setattr("tpsgd.engine.fast.wrapper.captured", capture)
        model, settings = convnet(), folded(micro_batch=3, epochs=2, batch_size=8, device="cuda")
        tpsgd.fit_backprop(model, images(75), **settings)
        weights.append(state(model))
    close(*weights, rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["readout", "l2"])
@pytest.mark.parametrize("norm", [True, False])
def test_weights_are_those_of_a_cpu(norm, name, order, two_streams, monkeypatch):
    """A convolution with its ReLU, two streams, figures: each has another path there."""
    monkeypatch.setattr(wrapper, "suits_two_streams", lambda _, form: two_streams and on_cuda(form))
    runs, models = [], []
    for device in ("cpu", "cuda"):

        def whole():
            between = [nn.BatchNorm2d(4)] if norm else []
            first = [nn.Conv2d(2, 4, 3, padding=1, bias=not norm), *between, nn.ReLU()]
            second = [nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten()]
            return nn.Sequential(*first, *second, nn.Linear(6, 3))

        model = seeded(whole)
        settings = {"epochs": 3, "batch_size": 8, "loss": tpsgd.cross_entropy, "device": device}
        settings["order"] = ORDERS[order]
        runs.append(tpsgd.fit(model, images(100), rule=RULES[name](), **settings))
        models.append(model.cpu())
    close(*map(state, models), rtol=1e-3, atol=1e-4)
    for a, b in zip(*(run.history for run in runs), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)
        assert a.accuracy == pytest.approx(b.accuracy, abs=0.03) or a.accuracy is b.accuracy
