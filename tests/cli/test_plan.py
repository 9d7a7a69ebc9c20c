"""`tpsgd plan`, and budgets, optimizers and data on disk on the command line."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import with_full
from rich.console import Console

import tpsgd
from tpsgd import rules
from tpsgd.cli import terminal
from tpsgd.cli.wording import in_options
from tpsgd.common.units import as_bytes, size
from tpsgd.comparison.arms import arm
from tpsgd.engine.learners import optimizers
from tpsgd.engine.settings import memory_in_words
from tpsgd.memory.plan import Plan
from tpsgd.zoo import words as models

SHAPE = ("--shape", "1x8x8", "--classes", "10", "--model", "mlp:32", "--batch-size", "16")
SMALL = ("--data", "two.npz", "--model", "mlp:64", "--epochs", "1", "--batch-size", "16")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder that holds small data sets."""
    x = np.random.default_rng(0).normal(size=(60, 40)).astype("float32")
    np.savez(tmp_path / "two.npz", x=x, y=(x[:, 0] > 0).astype(int))
    steps = np.random.default_rng(1).normal(size=(60, 4, 3)).astype("float32")
    y = (steps[:, 0, 0] > 0).astype(int)
    np.savez(tmp_path / "steps.npz", x=steps, y=y)
    np.savez(tmp_path / "padded.npz", x=steps, y=y, lengths=np.arange(60) % 4 + 1)
    tokens = np.random.default_rng(2).integers(0, 9, (60, 5))
    np.savez(tmp_path / "tokens.npz", tokens=tokens, y=(tokens[:, 0] > 4).astype(int))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def directly(word="mlp:32", shape=(1, 8, 8), classes=10, batch_size=16, **options) -> Plan:
    """What the library itself plans for a model's word."""
    model = models.factory(word, shape, classes)()
    return tpsgd.plan(model, shape, batch_size=batch_size, **options)


def same(record: dict, plan: Plan) -> bool:
    """Whether a JSON record holds this plan."""
    plain = json.loads(json.dumps(plan.as_dict()))
    return {key: record[key] for key in plain} == plain


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shape 8 --classes 2 --memory 4_apples", "'4 apples' is no amount of memory"),
        ("--shape 8 --classes 2 --memory 0", "'0' is no amount of memory"),
        ("--shape 8 --classes 2 --memory -5MB", "'-5MB' is no amount of memory"),
        ("--shape nonsense --classes 2", "'nonsense' is no shape of a sample: write 1x28x28"),
        ("--shape 8x --classes 2", "'8x' is no shape"),
        ("--shape 0x8 --classes 2", "'0x8' is no shape"),
        ("--shape -8 --classes 2", "'-8' is no shape"),
        (f"--shape 1{400 * '0'} --classes 2", "GB, and"),
        ("--shape 8", "it goes with --classes"),
        ("--shape 8 --classes 0", "--classes"),
        ("--shape 8 --classes 2 --samples 0", "--samples"),
        ("--shape 8 --classes 2 --data two.npz", "it goes with --classes without --data"),
        ("--shape 8 --classes 2 --on-disk kept", "without --on-disk"),
        ("--classes 2", "--classes and --samples go with --shape"),
        ("--data two.npz --samples 9", "--classes and --samples go with --shape"),
        ("--data diggits", "did you mean 'digits'?"),
        ("--shape 8 --classes 2 --rule backprop", "every plan includes backprop"),
        ("--shape 8 --classes 2 --rule zorb", "zorb cannot be planned"),
        ("--shape 8 --classes 2 --rule dladmm", "dladmm cannot be planned"),
        ("--shape 8 --classes 2 --rule redout", "did you mean 'readout'?"),
        ("--shape 8 --classes 2 --rule elm --optimizer sgd", "elm takes no --optimizer"),
        ("--shape 8 --classes 2 --rule dfa --order sequential", "dfa cannot learn block by"),
        ("--shape 8 --classes 2 --optimizer sdg", "'sdg' is not one of 'adam', 'sgd'"),
        ("--shape 8 --classes 2 --head rigde", "'rigde' is not one of 'adam', 'ridge'"),
        ("--shape 8 --classes 2 --device gpu", "unknown device 'gpu'"),
        ("--shape 8 --classes 2 --device meta", "device meta holds no numbers"),
        ("--shape 8 --classes 2 --window 3", "window is for models with recurrent layers"),
        ("--shape 8 --classes 2 --model cnn:4x3", "needs images"),
        ("--shape 8 --classes 2 --plot plan.txt", "FILE.png or FILE.svg, not plan.txt"),
        ("--shape 8 --classes 2 --plot no/plan.png", "there is no folder no"),
        ("--data padded.npz --model rnn:4 --memory 1GB", "sequences of different lengths"),
    ],
)
def test_a_mistake_is_one_sentence(says, words, said):
    code, out, err = says("plan", *(word.replace("_", " ") for word in words.split()))
    assert (code, out) == (2, "")
    assert err.startswith("tpsgd: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "4 apples"), "'4 apples' is no amount of memory"),
        (("--memory", "0"), "'0' is no amount of memory"),
        (("--memory", "-1"), "'-1' is no amount of memory"),
        (("--optimizer", "adm"), "'adm' is not one of"),
        (("--on-disk", "two.npz"), "two.npz"),
    ],
)
def test_a_mistake_in_train_or_compare_is_one_sentence(says, command, words, said):
    code, out, err = says(command, *SMALL, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize("rule", ["backprop", "zorb"])
def test_what_fit_does_not_train_has_no_budget(says, rule):
    code, _, err = says("train", *SMALL, "--rule", rule, "--memory", "9MB")
    assert code == 2 and f"{rule} takes no --memory" in err


@pytest.mark.full
def test_a_budget_that_cannot_be_held_gives_the_librarys_sentence(says):
    words = ("--order", "simultaneous", "--memory", "2KB")
    code, out, err = says("plan", *SHAPE, *words)
    with pytest.raises(tpsgd.TpsgdError) as caught:
        directly(order=tpsgd.simultaneous, memory="2KB")
    assert (code, out, err) == (2, "", f"tpsgd: {in_options(str(caught.value))}\n")
    assert "smaller --batch-size" not in err  # micro-batches of one sample are as small


def test_the_record_is_the_librarys_plan(says):
    code, out, err = says("plan", *SHAPE, "--samples", "500", "--json")
    record = json.loads(out)
    assert (code, err) == (0, "") and same(record, directly(samples=500))
    assert not same(record, directly(samples=500, optimizer=tpsgd.sgd))
    assert record["shape"] == [1, 8, 8] and record["samples"] == 500
    assert record["command"].startswith("tpsgd plan --shape 1x8x8")


def test_every_option_reaches_the_plan(says):
    words = ("--optimizer", "sgd", "--order", "simultaneous", "--rule", "tpsgd-l2")
    record = json.loads(says("plan", *SHAPE, *words, "--json")[1])
    wanted = {"rule": rules.tpsgd_l2(), "order": tpsgd.simultaneous, "optimizer": tpsgd.sgd}
    assert same(record, directly(**wanted))


def test_blocks_of_several_layers_reach_the_plan(says):
    record = json.loads(says("plan", *SHAPE, "--blocks", "1", "--json")[1])
    assert same(record, directly(blocks=1))
    assert "a layer per block" in [line["name"] for line in record["lines"]]


@pytest.mark.full
def test_ranks_reach_the_plan(says):
    words = (*SHAPE, "--samples", "500", "--ranks", "2")
    record = json.loads(says("plan", *words, "--json")[1])
    assert same(record, directly(samples=500, ranks=2))
    assert [rank["blocks"] for rank in record["pipeline"]["ranks"]] == [1, 1]
    _, out, _ = says("plan", *words)
    busy = f"{record['pipeline']['utilisation']:.0%}"
    assert "pipeline: rank" in out and f" {busy}\n" in out
    assert out.endswith("tpsgd.pipeline(stages=[1, 1])\n")
    code, _, err = says("plan", *SHAPE, "--ranks", "3")
    assert code == 2 and "needs a block for each of them" in err and err.count("\n") == 1


def test_a_solved_head_is_planned_block_by_block(says):
    record = json.loads(says("plan", *SHAPE, "--head", "ridge", "--json")[1])
    wanted = [optimizers.adam, tpsgd.ridge()]
    assert same(record, directly(optimizer=wanted, order=tpsgd.sequential))
    assert record["lines"][0]["name"] == "sequential" and record["lines"][1]["name"] == "backprop"


def test_data_bring_shape_classes_and_samples(says):
    words = ("--data", "two.npz", "--model", "mlp:64", "--batch-size", "16")
    record = json.loads(says("plan", *words, "--json")[1])
    samples = len(tpsgd.data.load("two.npz").train[1])
    assert same(record, directly("mlp:64", (40,), 2, samples=samples))
    fewer = json.loads(says("plan", *words, "--max-train", "20", "--on-disk", "kept", "--json")[1])
    assert fewer["samples"] == 20 and list(Path("kept").iterdir())


@pytest.mark.parametrize(
    "data", with_full(["steps.npz", "tokens.npz", "padded.npz"], ["steps.npz", "tokens.npz"])
)
def test_recurrent_nets(says, data):
    words = ("--data", data, "--model", "rnn:4", "--batch-size", "8")
    code, out, err = says("plan", *words)
    assert (code, err) == (0, "") and out.splitlines()[1].startswith("sequential")
    said = "all are planned as 4 steps long" in " ".join(out.split())
    assert said is (data == "padded.npz")


def test_the_tables_are_the_librarys_and_narrow(says):
    code, out, err = says("plan", *SHAPE, "--samples", "500")
    assert (code, err, out) == (0, "", f"{directly(samples=500)}\n")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((None, None, False, True), "whole batches, inputs reused from memory"),
        ((None, 16, False, None), "whole batches, gradients in 16 slices"),
        (
            (8, 16, False, False),
            "micro-batches of 8, gradients in 16 slices, inputs recomputed",
        ),
        ((None, None, True, None), "whole batches, codes redrawn"),
        ((4, None, False, "/var/tmp"), "micro-batches of 4, inputs reused from a file in /var/tmp"),
    ],
)
def test_choices_in_words(settings, said):
    names = ("micro_batch", "slices", "redraw", "reuse")
    assert memory_in_words(dict(zip(names, settings, strict=True))) == said


@pytest.mark.full
def test_a_budget_says_first_what_it_chose(says):
    tight = str(int(0.9 * directly("mlp:1000", samples=500, others=False).lines[0].peak))
    words = ("--model", "mlp:1000", "--samples", "500", "--memory", tight)
    code, out, _ = says("plan", *SHAPE, *words)
    plan = directly("mlp:1000", samples=500, memory=tight)
    memory = plan.settings["memory"]
    assert memory.slices or memory.micro_batch
    said = " ".join(out.split())
    chosen = memory_in_words(vars(memory))
    assert code == 0 and said.startswith("within ") and f": {chosen} way to train" in said
    assert same(json.loads(says("plan", *SHAPE, *words, "--json")[1]), plan)


@pytest.mark.parametrize("name", with_full(["plan.png", "plan.svg"], ["plan.png"]))
def test_a_figure(says, name):
    code, out, err = says("plan", *SHAPE, "--plot", name)
    assert (code, err) == (0, "") and out.splitlines()[-1] == f"figure: {name}"
    assert Path(name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_terminal_gets_a_bar(says, monkeypatch):
    screen = io.StringIO()

    def console(stderr=False, **options):
        return Console(file=screen, force_terminal=True, width=80) if stderr else Console(**options)

    monkeypatch.setattr(terminal, "Console", console)
    code, out, _ = says("plan", *SHAPE, "--json")
    assert code == 0 and json.loads(out) and "rehearsing" in screen.getvalue()


def test_training_within_a_budget(says):
    words = (*SMALL, "--model", "mlp:2000")
    whole = json.loads(says("train", *words, "--json")[1])
    budget = str(int(0.9 * whole["peak_bytes"]))
    record = json.loads(says("train", *words, "--memory", budget, "--json")[1])
    settings = record["settings"]
    assert settings["memory_budget"] == budget
    assert (settings["slices"] or settings["micro_batch"]) and {"redraw", "reuse"} <= set(settings)
    assert record["peak_bytes"] + record["kept_bytes"] <= as_bytes(budget)
    assert record["accuracy"] == whole["accuracy"]
    code, out, err = says("train", *words, "--memory", budget)
    assert (code, err) == (0, "")
    assert f"\nwithin {size(int(budget))}: " in out


@pytest.mark.full
def test_a_budget_out_of_reach_ends_training(says):
    words = (*SMALL, "--order", "simultaneous", "--memory", "2KB")
    code, out, err = says("train", *words)
    assert (code, out) == (2, "") and "a memory budget of 2.0 KB" in err


@pytest.mark.parametrize(("more", "rate"), [((), 0.1), (("--lr", "0.5"), 0.5)])
@pytest.mark.parametrize("head", ["adam", "ridge"])
def test_plain_sgd(says, monkeypatch, more, rate, head):
    made = []
    for kind in (optimizers.SGD, optimizers.torch.optim.SGD):

        def watched(self, *args, step=kind.step, **options):
            made.append(self.param_groups[0]["lr"])
            return step(self, *args, **options)

        monkeypatch.setattr(kind, "step", watched)
    words = (*SMALL, "--optimizer", "sgd", "--head", head, *more, "--json")
    record = json.loads(says("train", *words)[1])
    assert set(made) == {rate} and "sgd" in record["settings"]["optimizer"].lower()


def test_data_on_disk(says):
    plain = json.loads(says("train", *SMALL, "--json")[1])
    kept = json.loads(says("train", *SMALL, "--on-disk", "kept", "--json")[1])
    assert list(Path("kept").iterdir()) and "read from disk" in kept["data"]["note"]
    assert kept["accuracy"] == plain["accuracy"]
    words = ("--rules", "drtp", "--restarts", "1", "--on-disk", "kept", "--json")
    record = json.loads(says("compare", *SMALL, *words)[1])
    assert "read from disk" in record["data"]["note"]


@pytest.mark.full
def test_comparing_within_a_budget(says):
    words = (*SMALL, "--rules", "readout,zorb", "--restarts", "1", "--optimizer", "sgd")
    code, out, err = says("compare", *words, "--memory", "1MB")
    said = " ".join(out.split())
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert "each training run within 1.0 MB, except for backprop, zorb" in said
    record = json.loads(Path("tpsgd-report/results.json").read_text())
    held = {a["name"]: a["restarts"][0]["settings"].get("memory_budget") for a in record["arms"]}
    assert held == {"backprop": None, "readout": "1MB", "zorb": None, "frozen": "1MB"}
    assert (record["settings"]["memory_budget"], record["settings"]["optimizer"]) == ("1MB", "sgd")
    of_backprop = record["arms"][0]["restarts"][0]["settings"]
    assert of_backprop["optimizer"] == "sgd"


@pytest.mark.full
def test_an_arm_that_cannot_hold_its_budget_fails_alone(says):
    words = (*SMALL, "--rules", "frozen", "--restarts", "1", "--memory", "2KB", "--json")
    code, out, _ = says("compare", *words)
    errors = {arm["name"]: arm["error"] for arm in json.loads(out)["arms"]}
    assert code == 1 and errors["backprop"] is None and set(errors) == {"backprop", "frozen"}
    assert "a memory budget of 2.0 KB" in errors["frozen"]


def test_without_a_budget_nothing_is_said_of_one(says):
    code, out, _ = says("compare", *SMALL, "--rules", "drtp", "--restarts", "1")
    assert code == 0 and "budget" not in out
    assert not arm("backprop").budgeted and arm("frozen").budgeted


@pytest.mark.full
def test_low_memory_in_one_word(says):
    words = ("--data", "digits", "--model", "cnn:8x3", "--epochs", "1", "--max-train", "200")
    code, out, err = says("train", *words, "--memory", "low")
    assert (code, err) == (0, "") and "\nin low memory: " in out and "inputs recomputed" in out
    assert "kept inputs" not in out
    code, out, _ = says("plan", *words, "--memory", "low")
    assert code == 0 and out.startswith("in low memory: micro-batches of 8")
    words = (*SMALL, "--rules", "readout", "--restarts", "1", "--memory", "low")
    code, out, _ = says("compare", *words)
    assert code == 0 and "each training run in low memory, except for backprop" in out
