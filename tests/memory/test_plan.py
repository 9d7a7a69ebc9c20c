"""A plan's bytes are those that training then holds, and it costs none itself."""

import gc
import json
from dataclasses import asdict
from functools import cache, partial

import pytest
import torch
from helpers import LOCAL, Residual, folded, images, mlp, points, same, seeded, sequences, state
from torch import nn
from torch.nn.functional import one_hot

import tpsgd
from tpsgd import Memory, Recurrent, TpsgdError, rules, simultaneous
from tpsgd.engine.device import resident
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.settings import Settings
from tpsgd.memory import rehearse
from tpsgd.memory.meter import LiveBytes, tensor_bytes

momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
N, BATCH = 160, 32


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 12, 2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def norm():
    return nn.Sequential(
        nn.Conv2d(2, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 80),
        nn.BatchNorm1d(80),
        nn.ReLU(inplace=True),
        nn.Linear(80, 3),
    )


def residual():
    return nn.Sequential(
        nn.Linear(40, 96), nn.Tanh(), Residual(96), nn.Dropout(0.5), nn.Linear(96, 3)
    )


def recurrent(*layers, units=64):
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(units, 3))


def words(n):
    return torch.arange(n * 2).view(n, 2) * 7 % 50, torch.arange(n) % 3


def signals(n):
    x, y = sequences(n, 2, 16)
    return x.float(), y


def embedded():
    return nn.Sequential(
        nn.Embedding(50, 40), nn.Flatten(), nn.Linear(80, 90), nn.Tanh(), nn.Linear(90, 3)
    )


NETS = {
    "mlp": (lambda: mlp(40, 160, 120, 3), partial(points, features=40)),
    "cnn": (cnn, images),
    "norm": (norm, images),
    "residual": (residual, partial(points, features=40)),
    "recurrent": (recurrent(lambda: Recurrent(16, 64)), signals),
    "stacked": (
        recurrent(lambda: Recurrent(16, 64, sequence=True), lambda: Recurrent(64, 64)),
        signals,
    ),
    "both ways": (recurrent(lambda: Recurrent(16, 64, bidirectional=True), units=128), signals),
    "nn.RNN": (recurrent(lambda: nn.RNN(16, 64, 2, batch_first=True)), signals),
    "tokens": (recurrent(lambda: Recurrent(50, 64)), words),
    "embedding": (embedded, words),
}


def planned(kind, n=N, **settings):
    make, data = NETS[kind]
    x = data(4)[0]
    settings = {"batch_size": BATCH, "samples": n, "others": False, "epochs": 1} | settings
    return tpsgd.plan(seeded(make), x.shape[1:], dtype=x.dtype, **folded(**settings))


def measured(kind, n=N, fit=tpsgd.fit, **settings):
    make, data = NETS[kind]
    settings = {"epochs": 1, "batch_size": BATCH} | settings
    return fit(seeded(make), data(n), **folded(**settings))


def agree(kind, n=N, slack=0, **settings):
    """Assert that a plan is what training then takes, but for a few bytes of slack."""
    (line,) = planned(kind, n, **settings).lines
    run = measured(kind, n, **settings)
    slack = max(slack, 2048 * (run.blocks[-1].learning == "solved"))
    assert abs(line.peak - run.peak_bytes) <= slack
    assert line.kept == run.kept_bytes


TOGETHER = {"order": simultaneous}
SAVING = {"micro_batch": 8, "redraw": True, "slices": 4}
HEAD = [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()]
GRID = [
    ("mlp", {}),
    ("mlp", {"reuse": False, "optimizer": tpsgd.sgd}),
    ("mlp", {"epochs": 2}),
    ("mlp", {"epochs": [1, 0, 2]}),
    ("mlp", {"n": 4500, "slack": 256, **TOGETHER}),  # the order of samples comes in parts of 4096
    ("mlp", {"micro_batch": 8, "optimizer": momentum}),
    ("mlp", {"micro_batch": 5, "slack": 1024, **TOGETHER}),  # room for figures of 4 samples or 5
    ("mlp", {"optimizer": torch.optim.RMSprop}),
    ("mlp", {"optimizer": HEAD, "slack": 1024}),  # solved from all samples, not from two batches
    ("mlp", {"optimizer": HEAD, "n": 50}),
    ("mlp", {"rule": rules.frozen(), "optimizer": tpsgd.ridge(), "reuse": False, "slack": 1024}),
    ("mlp", {"rule": rules.dfa(), **TOGETHER}),
    ("mlp", {"weight_decay": 0.1, "clip": 0.5, "optimizer": tpsgd.momentum, "slices": 4}),
    ("norm", {"weight_decay": 0.1, "clip": 0.5, "slack": 8, **TOGETHER}),
    ("cnn", {}),
    ("cnn", {"rule": rules.readout(features=256), "reuse": False, **SAVING}),
    ("cnn", {"rule": rules.tpsgd_l2(), "redraw": True, "slack": 8}),
    ("norm", {}),
    ("norm", {"micro_batch": 9, "slack": 4, **TOGETHER}),
    ("cnn", {"rule": rules.auxiliary(8), "reuse": False}),
    ("norm", {"rule": rules.auxiliary(8), **TOGETHER}),
    ("norm", {"rule": rules.auxiliary(8), "precision": torch.bfloat16, "slack": 128, **TOGETHER}),
    ("recurrent", {"rule": rules.auxiliary(8)}),
    ("residual", {"rule": rules.tpsgd_l1(), **TOGETHER, **SAVING}),
    (
        "recurrent",
        {"window": 1, "rule": rules.drtp(), "optimizer": [momentum, tpsgd.ridge()], "slack": 1024},
    ),
    ("stacked", {"reuse": False, "window": 2, **TOGETHER}),
    ("both ways", {"micro_batch": 16, "reuse": False}),
    ("nn.RNN", {"optimizer": tpsgd.sgd}),
    ("tokens", {}),
    ("embedding", {"reuse": True}),
]


@pytest.mark.parametrize(("kind", "settings"), GRID, ids=lambda v: v if isinstance(v, str) else "")
def test_a_plan_is_what_training_takes(kind, settings):
    agree(kind, **settings)


@pytest.mark.parametrize("name", LOCAL)
def test_a_plan_is_what_training_takes_for_every_rule(name):
    agree("residual", rule=LOCAL[name](), redraw=True, reuse=False)


@pytest.mark.parametrize("n", [5, 33])
def test_a_plan_is_what_training_takes_for_few_samples(n):
    agree("mlp", n, epochs=2)


def test_a_plan_is_what_training_takes_for_several_labels_and_in_float64():
    x, y = points(N, 40)
    model, settings = mlp(40, 160, 120, 3).double(), {"loss": tpsgd.bce, "batch_size": BATCH}
    found = tpsgd.plan(model, (40,), dtype=torch.float64, samples=N, others=False, **settings)
    run = tpsgd.fit(model, (x.double(), one_hot(y, 3).double()), epochs=2, **settings)
    assert found.lines[0].peak == pytest.approx(run.peak_bytes, rel=0.01)
    assert found.lines[0].kept == run.kept_bytes


def test_a_plan_is_what_training_takes_if_parameters_may_not_learn():
    model = NETS["mlp"][0]()
    model[0].requires_grad_(False)
    found = tpsgd.plan(model, (40,), batch_size=BATCH, samples=N, others=False).lines[0]
    run = tpsgd.fit(model, points(N, 40), batch_size=BATCH, epochs=2)
    assert found.peak == pytest.approx(run.peak_bytes, rel=0.01) and found.kept == run.kept_bytes


BACKPROP = {
    "backprop": {},
    "backprop, micro-batch 8": {"micro_batch": 8},
}


@cache
def all_of(kind):
    """A plan with every line."""
    return planned(kind, others=True)


@pytest.mark.parametrize("kind", ["mlp", "norm", "recurrent"])
def test_every_line_of_a_plan_is_what_training_takes(kind):
    found = all_of(kind)
    names = [line.name for line in found.lines]
    assert names[:2] == ["sequential", "simultaneous"] and names[-1] == "last layer alone"
    segments = found[names[3]].segments
    assert bool(segments) == (kind != "recurrent") == bool(found.remarks)
    ways = BACKPROP | ({"backprop, checkpointed": {"segments": segments}} if segments else {})
    runs = {name: measured(kind, fit=tpsgd.fit_backprop, **way) for name, way in ways.items()}
    runs["sequential"] = measured(kind)
    runs["simultaneous"] = measured(kind, **TOGETHER)
    runs["sequential, micro-batch 8"] = measured(kind, micro_batch=8, reuse=False)
    runs["last layer alone"] = measured(kind, rule=rules.frozen(), reuse=False)
    assert runs.keys() == set(names)
    for name, run in runs.items():
        assert found[name].peak == pytest.approx(run.peak_bytes, rel=0.01), name
        assert found[name].kept == run.kept_bytes


def test_checkpointing_has_the_segments_that_save_most():
    make, data = partial(mlp, 6, *[16] * 8, 3), points(128, 6)
    inputs = rehearse.Inputs((6,), torch.float32, 128)
    best = rehearse.best_segments(make(), inputs, Settings(batch_size=64))
    peaks = {
        n: tpsgd.fit_backprop(make(), data, segments=n, epochs=1, batch_size=64).peak_bytes
        for n in (1, 2, 3, 4, 5, 9)
    }
    assert min(peaks.values()) == peaks[best] < min(peaks[1], peaks[9])


def test_backprop_in_the_same_micro_batches_is_next_to_the_planned_run():
    found = planned("cnn", others=True, micro_batch=4, reuse=False, rule=rules.readout())
    first, same, *others = found.lines
    assert (first.name, same.name) == ("sequential", "backprop, micro-batch 4")
    assert first.total < same.total
    assert not any("micro-batch" in line.name for line in others)
    run = measured("cnn", fit=tpsgd.fit_backprop, micro_batch=4)
    assert same.peak == pytest.approx(run.peak_bytes, rel=0.01)


def test_micro_batches_as_large_as_the_batch_have_no_line():
    names = [line.name for line in planned("mlp", others=True, batch_size=8).lines]
    assert not any("micro-batch" in name for name in names) and "backprop" in names


def test_backprop_has_the_optimizer_that_was_given():
    found = planned("mlp", others=True, optimizer=[tpsgd.ridge(), momentum, tpsgd.ridge()],
                    rule=rules.tpsgd_l2(at=tpsgd.Place.BEFORE))  # fmt: skip
    assert "simultaneous" not in [line.name for line in found.lines]  # nothing to solve there
    run = measured("mlp", fit=tpsgd.fit_backprop, optimizer=momentum)
    assert found["backprop"].peak == pytest.approx(run.peak_bytes, rel=0.01)


# ---- what a plan says ----------------------------------------------------------------------------


def test_the_first_line_is_the_way_that_was_asked_for():
    found = planned("mlp", others=True, **TOGETHER)
    assert [line.name for line in found.lines[:2]] == ["simultaneous", "backprop"]
    assert found.peak_bytes == found["simultaneous"].total
    with pytest.raises(KeyError):
        found["sequential"]


def test_a_rule_that_waits_is_planned_with_its_schedule():
    assert [line.name for line in planned("mlp", rule=rules.dfa()).lines] == ["simultaneous"]
    last = [rules.drtp(), rules.drtp(), rules.dfa()]  # which only lends its loss
    assert [line.name for line in planned("mlp", rule=last).lines] == ["sequential"]


@pytest.mark.parametrize("kind", ["mlp", "norm", "recurrent"])
def test_parts_add_up_and_are_what_they_say(kind):
    found, model = all_of(kind), NETS[kind][0]()
    for line in found.lines:
        assert line.peak == sum(line.parts.values()) and line.total == line.peak + line.kept
        assert line.parts["weights"] == tensor_bytes(model)
        assert min(line.parts.values()) >= 0 and line.parts["workspace"] == 0
        assert all(block.peak <= line.peak for block in line.blocks)
    first = found.lines[0]
    assert max(block.peak for block in first.blocks) == first.peak
    kinds = [str(block).partition(": ")[2] for block in tpsgd.split(model)]
    names = [f"{i}: {kind}" for i, kind in enumerate(kinds, 1)]
    assert [block.name for block in first.blocks] == names


def test_a_long_sequence_is_planned_from_two_shorter_ones(monkeypatch):
    monkeypatch.setattr(rehearse, "LONG", 9)
    model, inputs = recurrent(lambda: Recurrent(3, 64))(), rehearse.Inputs((12, 3), samples=64)
    settings = Settings(batch_size=8)
    planned = rehearse.rehearse(model, inputs, Backprop(), settings)
    whole = rehearse._rehearse(model, inputs, Backprop(), settings)
    assert planned.peak == pytest.approx(whole.peak, rel=0.01)


def test_the_parts_of_a_step_are_those_counted_by_hand():
    """Of a batch of one: at the end of backprop all gradients and all of the state are there."""
    model = mlp(40, 160, 120, 3)
    learned = tensor_bytes(model)
    found = tpsgd.plan(model, (40,), batch_size=1, optimizer=momentum, samples=9)
    parts = found["backprop"].parts
    assert parts["gradients"] == parts["optimizer"] == learned
    assert parts["projections"] == 0 < found["simultaneous"].parts["projections"]
    first = found["sequential"].blocks[0].parts
    assert first["gradients"] == first["optimizer"] == 4 * (40 * 160 + 160 + 3 * 160)  # and codes
    assert found["sequential"].total <= found.backprop == found["backprop"].total
    fast = tpsgd.plan(model, (40,), batch_size=1, optimizer=momentum, samples=9, memory="fast")
    assert fast["sequential"].kept == 9 * (160 + 120) * 4


@pytest.mark.parametrize("kind", ["mlp", "norm", "recurrent"])
def test_a_plan_fits_the_screen(kind):
    found = all_of(kind)
    assert max(map(len, str(found).splitlines())) <= 80, str(found)
    assert all(line.name in str(found) for line in found.lines)


@pytest.mark.parametrize("settings", [{"reuse": "."}, {"budget": "1MB"}])
def test_a_plan_is_ready_for_json(settings):
    found = planned("mlp", **settings)
    data = json.loads(json.dumps(found.as_dict()))
    assert [line["name"] for line in data["lines"]] == [line.name for line in found.lines]
    assert data["lines"][0]["total"] == found.peak_bytes
    assert data["lines"][0]["blocks"][0]["peak"] == found.lines[0].blocks[0].peak
    assert data["memory"].keys() == asdict(found.settings["memory"]).keys()


@pytest.mark.parametrize("settings", [{"micro_batch": 16, "redraw": True}, {"reuse": False}])
def test_a_plans_settings_can_be_given_to_fit(settings):
    found = planned("mlp", **settings)
    assert found.settings == {"memory": Memory(**settings)}
    run = measured("mlp", **found.settings)
    assert found.lines[0].peak == pytest.approx(run.peak_bytes, rel=0.01)


def test_without_samples_kept_inputs_are_not_counted():
    found = planned("mlp", samples=0)
    assert found.lines[0].kept == 0 and any("samples= is not" in r for r in found.remarks)
    assert not planned("mlp", samples=0, reuse=False).remarks


def test_what_pieces_change_is_said():
    assert any("normal" in r for r in planned("norm", micro_batch=16).remarks)
    assert any("dropout" in r for r in planned("residual", micro_batch=4).remarks)


def test_a_file_takes_no_memory(tmp_path):
    found, run = planned("mlp", reuse=tmp_path), measured("mlp", reuse=tmp_path)
    assert found.lines[0].kept == run.kept_bytes == 0
    assert found.lines[0].peak == pytest.approx(run.peak_bytes, rel=0.01)
    assert any(str(tmp_path) in r for r in found.remarks)


# ---- what a plan leaves alone --------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "training"), [("norm", False)])
def test_a_plan_does_not_touch_the_model(kind, training):
    model = seeded(NETS[kind][0]).train(training)
    next(model.parameters()).requires_grad_(False)
    head = model[-1].train(not training)
    head.weight.grad = torch.ones_like(head.weight)
    before, generator = state(model), torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    text, x = str(model), NETS[kind][1](4)[0]
    tpsgd.plan(model, x.shape[1:], batch_size=BATCH, samples=N, epochs=1)
    assert same(state(model), before) and str(model) == text
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(head.weight.grad, torch.ones_like(head.weight))
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(torch.get_rng_state(), generator)
    held = (*model.parameters(), *model.buffers())
    assert {type(t) for t in held} <= {torch.Tensor, nn.Parameter}
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_plan_that_fails_leaves_the_modes_alone():
    model = mlp(40, 8, 3).train()
    for shape in ((39,), (4, 40)):
        with pytest.raises(TpsgdError):
            tpsgd.plan(model, shape)
    assert all(m.training for m in model.modules())


def test_a_plan_leaves_no_tensors():
    def alive():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    model = seeded(cnn)
    tpsgd.plan(model, (2, 6, 6), batch_size=BATCH, samples=N, others=False)
    before, live = alive(), LiveBytes()
    with live:
        found = tpsgd.plan(model, (2, 6, 6), batch_size=BATCH, samples=N, others=False)
    assert found and alive() == before and live.live == 0


def test_a_model_that_is_too_large_for_this_machine_can_be_planned():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32_768, 32_768), nn.ReLU(), nn.Linear(32_768, 10))
    assert tensor_bytes(model) > 4 << 30
    tpsgd.plan(mlp(6, 8, 3), (6,), others=False)  # what is loaded once
    before = resident()[0]
    found = tpsgd.plan(model, (32_768,), batch_size=256, samples=10**6, device="cpu")
    assert resident()[0] - before < 200 << 20
    assert max(map(len, str(found).splitlines())) <= 80, str(found)
    assert found["backprop"].parts["weights"] == tensor_bytes(model)
    assert found["backprop"].peak > 4 * tensor_bytes(model)
    assert found["sequential"].kept == 0 and found["sequential"].total < found.backprop


# ---- mistakes ------------------------------------------------------------------------------------

WRONG = {
    "order": ({"order": "sequential"}, "order must be tpsgd.sequential"),
    "rule": ({"rule": rules.readout}, r"write tpsgd.rules.readout\(\)"),
    "no rule's word": ({"rule": "redout"}, "unknown rule 'redout': did you mean 'readout'"),
    "rules": ({"rule": [rules.readout()] * 2}, "list of 3, one per block, got 2"),
    "optimizers": ({"optimizer": [tpsgd.sgd]}, "optimizer has 1 entries"),
    "optimizer": ({"optimizer": "adam"}, "optimizer must be a factory"),
    "batch size": ({"batch_size": 0}, "batch_size must be 1 or more"),
    "pieces": ({"micro_batch": 0}, "micro_batch must be a whole number"),
    "a setting that does not exist": (
        {"bach_size": 4},
        "plan has no argument 'bach_size'.*batch_size",
    ),
    "waiting": (
        {"rule": rules.dfa(), "order": tpsgd.sequential},
        "use order=tpsgd.simultaneous",
    ),
    "loss": ({"loss": "msee"}, "loss must be"),
    "budget": ({"budget": "4 apples"}, "no amount of memory"),
    "epochs": ({"epochs": -1}, "epochs must be a whole number"),
    "solver": ({"optimizer": tpsgd.ridge()}, "ridge.* cannot solve block 1"),
    "window": ({"window": 2}, "window is for models with recurrent layers"),
    "device": ({"device": "tpu"}, "unknown device"),
    "samples": ({"samples": -1}, "samples"),
    "part of a sample": ({"samples": 2.5}, "samples"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_sentence(what):
    settings, words = WRONG[what]
    with pytest.raises(TpsgdError, match=words) as caught:
        planned("mlp", **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(19,), (3, 7), ()])
def test_a_shape_that_does_not_fit_names_the_block(shape):
    with pytest.raises(TpsgdError, match=r"block 1 \(0: Linear \+ Tanh\) cannot take") as caught:
        tpsgd.plan(mlp(40, 8, 3), shape, batch_size=BATCH)
    assert "\n" not in str(caught.value)


def test_a_shape_that_does_not_fit_a_later_block_names_that_block():
    with pytest.raises(TpsgdError, match=r"block 3 \(7: Linear\) cannot take an input of shape"):
        tpsgd.plan(cnn(), (2, 10, 10), batch_size=BATCH)


@pytest.mark.parametrize("shape", [(1.5,), ("20",), (-1,), 20])
def test_a_shape_that_is_none(shape):
    with pytest.raises(TpsgdError) as caught:
        tpsgd.plan(mlp(40, 8, 3), shape, batch_size=BATCH)
    assert "\n" not in str(caught.value)


def test_a_model_without_parameters():
    with pytest.raises(TpsgdError):
        tpsgd.plan(nn.Sequential(nn.ReLU()), (20,))


# ---- blocks of several layers --------------------------------------------------------------------


def stages():
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 80), nn.ReLU(inplace=True), nn.Linear(80, 3),
    )  # fmt: skip


NETS["stages"] = stages, images
BLOCKS_OF_LAYERS = [1, 2, 3, [2, 2], [3, 1]]


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", [tpsgd.sequential, simultaneous], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", [rules.readout, partial(rules.readout, True), rules.predsim])
@pytest.mark.parametrize("blocks", BLOCKS_OF_LAYERS, ids=str)
def test_blocks_of_several_layers(blocks, rule, order):
    agree("stages", blocks=blocks, rule=rule(), order=order)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 8},
        {"reuse": False},
        {"precision": torch.bfloat16, "slack": 64},
        {"optimizer": momentum},
        {"rule": rules.dfa(), "order": simultaneous},
    ],
    ids=" and ".join,
)
def test_blocks_of_several_layers_in_other_ways(settings):
    agree("stages", **({"blocks": 2, "order": tpsgd.sequential} | settings))


@pytest.mark.full
def test_a_plan_of_blocks_also_has_a_layer_per_block():
    plan = tpsgd.plan(stages(), (2, 6, 6), blocks=2, batch_size=BATCH, order=simultaneous)
    names = [line.name for line in plan.lines]
    assert names[:2] == ["simultaneous", "a layer per block"] and "backprop" in names
    alone = tpsgd.plan(stages(), (2, 6, 6), batch_size=BATCH, order=simultaneous)
    assert plan["a layer per block"].peak == alone["simultaneous"].peak
    per_block = tpsgd.plan(stages(), (2, 6, 6), blocks=2, epochs=[1, 2], others=True)
    assert "a layer per block" not in [line.name for line in per_block.lines]


@pytest.mark.full
def test_a_budget_holds_with_blocks_of_several_layers():
    settings = {"blocks": 2, "epochs": 1, "batch_size": BATCH}
    free = tpsgd.fit(seeded(stages), images(N), **settings)
    with pytest.warns(UserWarning, match="micro-batches"):
        budget = int(0.8 * (free.peak_bytes + free.kept_bytes))
        run = tpsgd.fit(seeded(stages), images(N), memory=budget, **settings)
    assert run.peak_bytes + run.kept_bytes <= budget


def test_memory_that_is_fast_is_planned():
    settings = {"samples": 400, "batch_size": 32, "memory": "fast"}
    plan = tpsgd.plan(mlp(6, 50, 3), (6,), **settings)
    assert plan.lines[0].kept == 400 * 50 * 4 and plan["sequential, micro-batch 8"].kept == 0


def test_a_plan_within_a_budget_prints_its_settings_in_words():
    plan = tpsgd.plan(mlp(6, 50, 3), (6,), samples=40, memory="4MB")
    assert str(plan).startswith("within 4.0 MB: whole batches, inputs reused from memory\n")


# ---- models of several inputs --------------------------------------------------------------------


def test_several_inputs_are_planned_from_their_shapes_or_from_samples():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.other, self.last = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, z):
            return self.last(torch.relu(self.first(x) + self.other(z)))

    x, z = torch.randn(5, 6), torch.randn(5, 4)
    forms = [((6,), (4,)), (x, z), {"x": (6,), "z": (4,)}, {"x": x.numpy(), "z": z}]
    plans = [str(tpsgd.plan(seeded(Sum), form, samples=N)) for form in forms]
    assert plans == plans[:1] * 4 and "Linear" in plans[0]
    with pytest.raises(TpsgdError, match="must have a row for each sample, got x: 5, z: 2"):
        tpsgd.plan(seeded(Sum), {"x": x, "z": (4,)}, samples=N)
