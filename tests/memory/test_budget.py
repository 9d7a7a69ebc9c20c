"""A budget is held, to the byte, and changes nothing that is learned."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import close, folded, images, mlp, points, ragged, seeded, sequences, state, with_full
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Memory, Recurrent, TpsgdError, rules, simultaneous
from tpsgd.common.units import as_bytes
from tpsgd.memory import budget as budget_module
from tpsgd.memory.budget import SPARE
from tpsgd.memory.meter import LiveBytes, tensor_bytes
from tpsgd.memory.rehearse import MemoryProfile

N, BATCH = 96, 2


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 3),
    )


NETS = {
    "mlp": (lambda: mlp(400, 12, 3), lambda: points(N, 400)),
    "cnn": (cnn, lambda: images(N)),
    "recurrent": (lambda: nn.Sequential(Recurrent(8, 48), nn.Linear(48, 3)), lambda: signals()),
}


def signals():
    x, y = sequences(N, 2, 8)
    return x.float(), y


def trained(kind, **settings):
    make, data = NETS[kind]
    model = seeded(make)
    run = tpsgd.fit(model, data(), **folded(**({"epochs": 2, "batch_size": BATCH} | settings)))
    return model, run


def least(kind, **settings):
    """The smallest budget, as a refusal says it."""
    with pytest.raises(TpsgdError) as caught:
        trained(kind, budget=1000, **settings)
    (found,) = re.findall(r"\((\d+) bytes\)", str(caught.value))
    return int(found)


# ---- it is held ----------------------------------------------------------------------------------

KINDS = [("mlp", {"order": simultaneous, "rule": rules.dfa()})]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_the_smallest_budget_is_named_and_held_and_a_smaller_one_is_not(kind, settings):
    plain, free = trained(kind, **settings)
    low, high = least(kind, **settings), free.peak_bytes + free.kept_bytes
    with pytest.raises(TpsgdError, match=f"is too small.*{low} bytes.*optimizer=tpsgd.sgd"):
        trained(kind, budget=low - 1, **settings)
    for budget in (low, high + (64 << 10)):
        model, run = trained(kind, budget=budget, **settings)
        assert run.peak_bytes + run.kept_bytes <= budget
        assert run.settings["memory_budget"] == budget
        close(state(model), state(plain), rtol=1e-3, atol=1e-5)  # in float32, other sums


@pytest.mark.parametrize(
    ("kind", "budget"),
    [("mlp", 86_000), ("mlp", 100_000), ("mlp", 1 << 20), ("cnn", 48_000), ("recurrent", 90_000)],
)
def test_a_budget_is_held_from_the_first_byte_to_the_last(kind, budget):
    """All that `fit` allocates is counted here, with what it keeps, not only its first steps."""
    make, data = NETS[kind]
    x, y = data()
    settings = {"rule": rules.readout(features=256), "batch_size": BATCH, "epochs": 2}
    found = tpsgd.plan(make(), x.shape[1:], samples=N, memory=budget, others=False, **settings)
    assert found.peak_bytes <= budget
    model, live = seeded(make), LiveBytes()
    with live:
        tpsgd.fit(model, (x, y), **settings, **found.settings)
    assert live.peak + tensor_bytes(model) <= budget


def test_a_generous_budget_changes_nothing():
    run = trained("mlp", budget="1GB")[1]
    chosen = {k: run.settings[k] for k in ("micro_batch", "slices", "redraw", "reuse")}
    assert chosen == {"micro_batch": None, "slices": None, "redraw": False, "reuse": True}


def test_a_loader_and_a_dataset_are_counted():
    x, y = points(N, 400)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return x[i], y[i]

    for data in (DataLoader(TensorDataset(x, y), batch_size=48), Rows()):
        budget = 400_000
        run = tpsgd.fit(mlp(400, 12, 3), data, epochs=1, batch_size=BATCH, memory=budget)
        assert run.peak_bytes + run.kept_bytes <= budget


def edge(*widths):
    """A net for a small device, its data, and the memory it takes by default."""
    data = points(200, widths[0], widths[-1])
    run = tpsgd.fit(mlp(*widths), data, epochs=2, batch_size=16)
    return mlp(*widths), data, run.total_bytes


@pytest.mark.parametrize("widths", [(4, 16, 3), (8, 8, 10), (64, 32, 10), (13, 24, 24, 3)])
def test_what_a_small_run_takes_by_default_is_a_budget_that_is_accepted(widths):
    model, data, total = edge(*widths)
    budget = f"{-(-total // 1024)}KB"
    run = tpsgd.fit(model, data, epochs=2, batch_size=16, memory=budget)
    assert run.total_bytes <= as_bytes(budget) and run.settings["micro_batch"] is None


@pytest.mark.parametrize("widths", [(4, 16, 3), (64, 32, 10)])
def test_the_named_budget_is_the_smallest_and_the_advice_is_true(widths):
    model, data, _ = edge(*widths)
    settings = {"epochs": 2, "batch_size": 16}
    with pytest.raises(TpsgdError, match="is too small") as caught:
        tpsgd.fit(model, data, memory="1KB", **settings)
    named = int(re.findall(r"\((\d+) bytes\)", str(caught.value))[0])
    run = tpsgd.fit(model, data, memory=named, **settings)
    assert 0.9 * named < run.total_bytes <= named
    if "smaller batch_size" in str(caught.value):
        tpsgd.fit(model, data, memory=named - 1, **(settings | {"batch_size": 2}))


# ---- class codes that take more than the budget --------------------------------------------------


def wide():
    """Few weights, and class codes of 80 KB for outputs at 256 positions."""
    pool = nn.AdaptiveAvgPool2d((1, 8))
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), pool, nn.Flatten(), nn.Linear(8, 10))


WIDE = {"rule": rules.tpsgd_l2(), "batch_size": 2, "epochs": 1}


def wide_data():
    x, y = sequences(40, 256, 2, 10)
    return x.float(), y


def wide_peak(**memory):
    """What training `wide` holds with some memory settings."""
    settings = WIDE | {"samples": 40, "others": False, "memory": Memory(reuse=True, **memory)}
    return tpsgd.plan(wide(), (256, 2), **settings).peak_bytes


@pytest.mark.parametrize("micro_batch", with_full([None, 1], [None]))
def test_a_budget_redraws_class_codes_where_nothing_else_is_enough(micro_batch):
    budget = wide_peak(redraw=True, slices=16, micro_batch=micro_batch) + SPARE
    assert budget < wide_peak(slices=64, micro_batch=1)
    run = tpsgd.fit(wide(), wide_data(), memory=budget, **WIDE)
    assert run.settings["redraw"] is True and run.settings["micro_batch"] == micro_batch
    assert run.peak_bytes + run.kept_bytes <= budget


@pytest.mark.full
def test_a_budget_that_only_redrawn_class_codes_hold_is_refused_without_them(monkeypatch):
    def without_redraw(*args, cuts=budget_module.Search._cuts):
        return (settings for settings in cuts(*args) if not settings.memory.redraw)

    budget = wide_peak(redraw=True, slices=16) + SPARE
    monkeypatch.setattr(budget_module.Search, "_cuts", without_redraw)
    with pytest.raises(TpsgdError, match="is too small"):
        tpsgd.fit(wide(), wide_data(), memory=budget, **WIDE)


# ---- it is refused -------------------------------------------------------------------------------


def test_a_refusal_is_one_sentence_and_leaves_the_model_alone():
    model = mlp(400, 12, 3)
    before = state(model)
    with pytest.raises(TpsgdError, match=r"budget of 20\.0 KB .* are the model itself") as caught:
        tpsgd.fit(model, points(N, 400), batch_size=2, memory="20KB")
    assert "\n" not in str(caught.value)
    close(state(model), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "given",
    [{"micro_batch": 4}, {"slices": 2}, {"redraw": True}, {"reuse": False}, {"reuse": True}],
)
def test_a_budget_chooses_every_other_memory_setting_itself(given):
    with pytest.raises(
        TpsgdError, match=r"a memory budget chooses .*: leave them out, or the budget"
    ):
        trained("mlp", budget="1GB", **given)


def test_sequences_of_different_lengths_are_refused():
    x, y = sequences(12)
    model = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 3)).double()
    with pytest.raises(
        TpsgdError, match="lower batch_size instead of setting micro_batch or a memory budget"
    ):
        tpsgd.fit(model, (ragged(x), y), memory="1GB")


# ---- the fastest of those that fit ---------------------------------------------------------------


def deep_cnn():
    convolutions = [
        m for i in range(7) for m in (nn.Conv2d(4 if i else 2, 4, 3, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(144, 3))


def deep_total(**memory):
    """What training `deep_cnn` holds with some memory settings."""
    settings = {"samples": 640, "batch_size": 128, "others": False, "epochs": 2}
    return tpsgd.plan(deep_cnn(), (2, 6, 6), memory=Memory(**memory), **settings).peak_bytes


@pytest.mark.parametrize("share", with_full([1.1, 0.8, 0.4, 0.3], [1.1, 0.3]))
def test_a_budget_takes_the_largest_micro_batch_that_fits_in_few_rehearsals(share, monkeypatch):
    rehearsed = []

    def rehearse(*args, original=budget_module.rehearse):
        rehearsed.append(args[-1].memory)
        return original(*args)

    whole = deep_total(reuse=False)
    budget = int(share * whole)
    monkeypatch.setattr(budget_module, "rehearse", rehearse)
    settings = {"samples": 640, "batch_size": 128, "others": False, "epochs": 2}
    plan = tpsgd.plan(deep_cnn(), (2, 6, 6), memory=budget, **settings)
    chosen = plan.settings["memory"]
    assert len(rehearsed) <= 4 and plan.peak_bytes <= budget
    assert chosen.reuse is False and chosen.slices is None
    parts = -(-128 // (chosen.micro_batch or 128))
    assert (parts == 1) is (share > 1)
    if parts > 2:
        assert deep_total(reuse=False, micro_batch=-(-128 // (parts - 1))) > budget - SPARE


@pytest.mark.parametrize(
    "memory", [Memory(reuse=False), Memory(reuse=True), Memory(reuse=False, micro_batch=32)]
)
def test_equal_blocks_are_counted_once_and_to_the_byte(memory):
    settings = {"batch_size": 64, "epochs": 2, "memory": memory}
    plan = tpsgd.plan(deep_cnn(), (2, 6, 6), samples=N, others=False, **settings)
    run = tpsgd.fit(deep_cnn(), images(N), **settings)
    assert (run.peak_bytes, run.kept_bytes) == (plan.lines[0].peak, plan.lines[0].kept)


# ---- kept inputs ---------------------------------------------------------------------------------


def kept(**settings):
    """How much fits but for kept inputs, and a run with a budget so large."""
    plain = trained("mlp", reuse=True)[1]
    budget = plain.peak_bytes + plain.kept_bytes // 2
    return trained("mlp", budget=budget, **settings)


def test_inputs_that_do_not_fit_are_computed_again():
    model, run = kept()
    assert run.settings["reuse"] is False and run.kept_bytes == 0
    close(state(model), state(trained("mlp")[0]), rtol=1e-3, atol=1e-5)


def test_a_budget_counts_validation_data():
    """Its inputs are kept as well: what fits without it does not fit with it."""
    plain = trained("mlp", reuse=True)[1]
    budget = plain.peak_bytes + plain.kept_bytes + (4 << 10)
    assert trained("mlp", budget=budget)[1].settings["reuse"] is True
    held_out = points(300, 400, seed=1)
    run = trained("mlp", budget=budget, validation=held_out)[1]
    assert run.settings["reuse"] is False
    run = trained("mlp", budget=5 * budget, validation=held_out)[1]
    assert run.settings["reuse"] is True and run.kept_bytes == (N + 300) * 12 * 4


# ---- files on disk -------------------------------------------------------------------------------


@pytest.fixture
def only_files_fit(monkeypatch):
    """A net that takes less than 100 KB only if its inputs are not computed again."""

    def rehearse(model, inputs, rule, settings):
        reuse = settings.memory.reuse
        stage = SimpleNamespace(peak=(50 if reuse else 150) << 10, parts={})
        kept = (900 << 10) * (reuse is True)
        return MemoryProfile(1 << 10, [stage], kept, [], (), [])  # type: ignore[list-item]

    monkeypatch.setattr(budget_module, "rehearse", rehearse)


@pytest.mark.parametrize(
    ("budget", "free", "chosen"),
    [("1MB", 1 << 30, True), ("200KB", 1 << 30, False), ("100KB", 1 << 30, "files"),
     ("100KB", 1 << 20, None), ("40KB", 1 << 30, None)],
)  # fmt: skip
def test_files_are_the_last_resort(only_files_fit, monkeypatch, tmp_path, budget, free, chosen):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    if chosen is None:
        with pytest.raises(TpsgdError, match="is too small"):
            trained("mlp", budget=budget, reuse=tmp_path)
        return
    run = trained("mlp", budget=budget, reuse=tmp_path)[1]
    assert run.settings["reuse"] == (str(tmp_path) if chosen == "files" else chosen)
    assert not list(tmp_path.iterdir())


def test_no_file_is_written_without_a_folder(only_files_fit, tmp_path):
    with pytest.raises(TpsgdError, match=r"files on disk, in a folder that you name.*reuse=FOLDER"):
        trained("mlp", budget="100KB")
    with pytest.raises(TpsgdError, match="'none' is no folder to keep inputs in"):
        trained("mlp", budget="1MB", reuse="none")


# ---- amounts -------------------------------------------------------------------------------------

AMOUNTS = {
    "64MB": 64 << 20,
    "64 mb": 64 << 20,
    "64MiB": 64 << 20,
    "1.5 KB": 1536,
    " 2G ": 2 << 30,
    "1.25GB": 5 << 28,
    "3T": 3 << 40,
    "4096": 4096,
    "7 B": 7,
    4096: 4096,
}


@pytest.mark.parametrize("text", AMOUNTS)
def test_amounts_are_read(text):
    assert as_bytes(text) == AMOUNTS[text]


BAD = ["4 apples", 0, -1, True, False, "0MB", "nan", "inf", "", "MB", "-3MB", "1e6", 1.5, "1,5MB",
       "64 MBs", [64]]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_other_amounts_are_refused(text):
    with pytest.raises(TpsgdError, match="is no amount of memory: write 64MB") as caught:
        tpsgd.fit(mlp(6, 8, 3), points(), memory=text)
    assert repr(text) in str(caught.value)
    with pytest.raises(TpsgdError, match="no amount of memory"):
        tpsgd.plan(mlp(6, 8, 3), (6,), memory=text)


# ---- low memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", with_full(NETS, ["mlp", "recurrent"]))
def test_low_memory_keeps_no_inputs_and_learns_the_same(kind):
    plain, free = trained(kind, batch_size=64, reuse=True)
    model, run = trained(kind, batch_size=64, budget="low")
    assert run.kept_bytes == 0 and run.settings["reuse"] is False
    assert run.settings["memory_budget"] == "low" and run.total_bytes < free.total_bytes
    close(state(model), state(plain), rtol=1e-3, atol=1e-4)  # in float32, other sums


@pytest.mark.full
def test_low_memory_cuts_batches_only_where_that_saves_memory():
    plan = tpsgd.plan(cnn(), (2, 6, 6), samples=N, batch_size=64, memory="low", others=False)
    assert plan.lines[0].kept == 0 and str(plan).startswith("in low memory: micro-batches of 8")
    assert plan.settings["memory"].micro_batch == budget_module.SMALLEST
    run = trained("cnn", batch_size=64, memory=plan.settings["memory"])[1]
    assert run.peak_bytes == pytest.approx(plan.lines[0].peak, rel=0.02)
    wide = tpsgd.plan(
        mlp(400, 400, 3), (400,), samples=N, batch_size=64, memory="low", others=False
    )
    assert wide.settings["memory"].micro_batch is None  # gradients to add up would take more


def test_low_memory_does_not_cut_what_would_then_learn_otherwise():
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    run = tpsgd.fit(model, points(), memory="low", batch_size=32, augment=lambda x: x)
    assert run.settings["micro_batch"] is None and run.settings["reuse"] is False
    x, y = sequences(12)
    model = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 3)).double()
    run = tpsgd.fit(model, (ragged(x), y), memory="low")
    assert run.kept_bytes == 0 and run.settings["micro_batch"] is None
