"""`compare`: words, rules and arms; the controls, the record, failures and interrupts."""

import functools
import json

import pytest
import torch

import tpsgd
from tpsgd import Padded, rules
from tpsgd.comparison import compare as comparing
from tpsgd.comparison import provenance
from tpsgd.comparison.arms import arm, reservoir, with_controls
from tpsgd.comparison.compare import compare
from tpsgd.data import Data
from tpsgd.training import arm as arm_module
from tpsgd.training.arm import Arm
from tpsgd.zoo import words as models


@pytest.fixture
def data() -> Data:
    """Two classes, told apart by the first of six numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    return Data("two", (x[:40], y[:40]), (x[40:], y[40:]), ("0", "1"), (6,), "made here")


@pytest.fixture
def factory() -> models.Factory:
    return models.factory("mlp:5,4", (6,), 2)


BROKEN = rules.tpsgd(lambda y, target: (y * float("nan")).sum())


def test_every_comparison_holds_backprop_and_the_control():
    assert [a.name for a in with_controls([arm(rules.drtp())])] == ["backprop", "drtp", "frozen"]
    given = [arm(rules.frozen()), arm(rules.readout()), arm("backprop")]
    assert [a.name for a in with_controls(given)] == ["backprop", "readout", "frozen"]


def test_two_arms_of_one_name_are_refused_rather_than_one_dropped():
    with pytest.raises(tpsgd.TpsgdError, match="two arms are called 'readout'"):
        with_controls([arm(rules.readout()), arm(rules.readout(features=16))])


def test_arms_are_words_rules_or_arms(data, factory, tmp_path):
    arms = ["tpsgd-l2", rules.readout(), tpsgd.peers.zorb()]
    record = tpsgd.compare(data, factory, arms, restarts=1, epochs=1, schedule=tpsgd.simultaneous)
    assert [r.arm.name for r in record.results] == [
        "backprop", "tpsgd-l2", "readout", "zorb", "frozen",
    ]  # fmt: skip
    assert record.results[1].arm.schedule is tpsgd.simultaneous
    table = str(record).splitlines()
    assert [line.split()[0] for line in table] == ["rule", *(r.arm.name for r in record.ranked)]
    assert all(r.counts for r in record.results)
    assert record.write(tmp_path / "report").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arms", "settings", "message"),
    [
        (["redout"], {}, "unknown rule 'redout': did you mean 'readout'?"),
        ([rules.readout], {}, "an arm is a word, a rule or an Arm, not a function"),
        ("readout", {}, r"arms must be a list such as \['readout'\]"),
        ([], {"epoch": 3}, "compare has no argument 'epoch': did you mean 'epochs'?"),
        ([], {"batch_size": 0}, "batch_size must be 1 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(data, factory, arms, settings, message):
    with pytest.raises(tpsgd.TpsgdError, match=message.replace("?", r"\?")):
        compare(data, factory, arms, **settings)


def test_settings_of_fit_reach_every_rule_and_the_record(data, factory):
    memory = tpsgd.Memory(reuse=False, micro_batch=8)
    seen = []
    record = compare(
        data, factory, ["readout"], restarts=1, epochs=1, memory=memory, precision=torch.bfloat16,
        callbacks=[seen.append],
    )  # fmt: skip
    named = {"reuse": False, "micro_batch": 8, "precision": "bfloat16"}
    assert named.items() <= record.settings.items()
    for result in record.results:
        settings = result.runs[0].settings
        assert (settings["micro_batch"], settings["precision"]) == (8, "bfloat16")
        assert result.arm.backprop or settings["reuse"] is False
    assert len(seen) == sum(len(r.runs[0].history) for r in record.results)  # none while warming up


def test_schedules_of_the_arms():
    chosen = tpsgd.simultaneous
    assert arm(rules.readout()).schedule is None  # `fit` chooses
    assert arm(rules.readout(), chosen).schedule is chosen
    assert arm(rules.dfa(), tpsgd.sequential).schedule is chosen
    assert with_controls([arm(rules.readout(), chosen)])[-1].schedule is chosen
    assert with_controls([arm(rules.dfa())])[-1].schedule is None


def test_the_record(data, factory):
    arms = [arm(rules.readout()), arm(rules.sdfa())]
    record = compare(data, factory, arms, epochs=2, restarts=2, seed=3, batch_size=16)
    plain = json.loads(json.dumps(record.as_dict()))
    assert (plain["asked"], plain["finished"], plain["interrupted"]) == (8, 8, False)
    assert plain["data"]["name"] == "two" and plain["data"]["note"] == "made here"
    assert plain["machine"]["cpu"] and plain["machine"]["threads"] == torch.get_num_threads()
    assert set(plain["versions"]) == {"python", "torch", "tpsgd"}
    passes = {}
    for row in plain["arms"]:
        assert [r["seed"] for r in row["restarts"]] == [3, 4]
        for restart in row["restarts"]:
            assert 0 <= restart["accuracy"] <= 1
            assert restart["seconds"] > 0 and restart["peak_bytes"] > 0
            assert restart["history"] and len(restart["blocks"]) == 3
            passes[row["name"]] = restart["sample_passes"]
    equal = 2 * 40 * 3
    assert passes == {"backprop": equal, "readout": equal, "sdfa": equal, "frozen": equal // 3}


def test_a_restart_equals_one_of_fit_many(data, factory):
    record = compare(data, factory, [arm(rules.tpsgd_l2())], epochs=2, restarts=3, batch_size=8)
    for result in record.results:
        many = tpsgd.fit_many(
            factory, data.train, restarts=3, epochs=2, batch_size=8,
            rule=result.arm.rule, backprop=result.arm.backprop,
        )  # fmt: skip
        assert result.accuracies == many.evaluate(data.test)


def test_a_rule_that_fails_does_not_stop_the_others(data, factory):
    record = compare(data, factory, [arm(BROKEN), arm(rules.drtp())], epochs=1, restarts=2)
    broken = next(r for r in record.results if r.arm.rule is BROKEN)
    assert "became nan" in (broken.error or "") and not broken.runs
    assert all(len(r.runs) == 2 for r in record.results if r is not broken)
    assert (record.finished, record.asked) == (6, 8)
    assert [r.arm.name for r in record.ranked][-2:] == [broken.arm.name, "frozen"]
    assert record.as_dict()["arms"][1]["summary"] is None


def test_an_arm_that_failed_late_shows_no_figures(data, factory, monkeypatch):
    confusion = comparing.confusion
    calls = iter(range(99))

    def failing(*args):  # two arms warm up, then take turns: call 4 is backprop's second restart
        if next(calls) == 4:
            raise tpsgd.TpsgdError("no more")
        return confusion(*args)

    monkeypatch.setattr(comparing, "confusion", failing)
    record = compare(data, factory, [], epochs=1, restarts=3)
    backprop = record.as_dict()["arms"][0]
    assert backprop["error"] == "no more" and len(backprop["restarts"]) == 1
    assert backprop["summary"] is None and record.reference is None and record.finished == 4


def test_when_nothing_can_be_trained_the_reason_is_raised(data):
    with pytest.raises(tpsgd.TpsgdError, match="input"):
        compare(data, models.factory("mlp:4", (9,), 2), [], epochs=1, restarts=1)
    with pytest.raises(tpsgd.TpsgdError, match="restarts must be 1 or more"):
        compare(data, models.factory("mlp:4", (6,), 2), [], restarts=0)


def test_an_interrupt_keeps_what_is_finished(data, factory, monkeypatch):
    saved = []
    fit_many = arm_module.fit_many

    def interrupted(*args, **options):
        if options["seed"] == 1:
            raise KeyboardInterrupt
        return fit_many(*args, **options)

    monkeypatch.setattr(arm_module, "fit_many", lambda *a, **o: interrupted(*a, **{"seed": 0, **o}))
    record = compare(
        data, factory, [], epochs=1, restarts=3, each=lambda r: saved.append(r.finished)
    )
    assert record.interrupted and (record.finished, record.asked) == (2, 6)
    assert saved == [1, 2]


def test_progress_grows_from_nothing_to_all(data, factory):
    seen = []
    compare(
        data, factory, [], epochs=2, restarts=2, batch_size=4,
        progress=lambda record, arm, share: seen.append((arm.name, share)),
    )  # fmt: skip
    shares = [share for _, share in seen]
    assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] <= 1
    assert {name for name, _ in seen} == {"backprop", "frozen"}


def test_time_is_the_median_and_accuracy_the_mean():
    def run(seconds):
        return tpsgd.Run("x", 0, {}, seconds=seconds, peak_bytes=int(seconds))

    result = comparing.Result(Arm("x", None), [0.5, 0.7, 0.6], [run(1.0), run(99.0), run(2.0)])
    assert result.seconds == 2.0 and result.largest.total_bytes == 99
    assert result.accuracy == pytest.approx((0.6, 0.1))


@pytest.fixture(params=["floats", "tokens", "padded"])
def sequences(request) -> Data:
    """Two classes of sequences of six steps, told apart by the first number or token."""
    generator = torch.Generator().manual_seed(0)
    tokens = request.param == "tokens"
    if tokens:
        x = torch.randint(8, (60, 6), generator=generator)
        y = (x[:, 0] > 3).long()
    else:
        x = torch.randn(60, 6, 3, generator=generator)
        y = (x[:, 0, 0] > 0).long()
    if request.param == "padded":
        x = Padded(x, torch.randint(1, 7, (60,), generator=generator))
    shape, vocabulary = tuple(x.shape[1:]), 8 if tokens else None
    parts = (x[:40], y[:40]), (x[40:], y[40:])
    return Data("steps", *parts, ("0", "1"), shape, "made here", vocabulary)


def fresh(data: Data, word: str) -> models.Factory:
    return models.factory(word, data.shape, 2, tokens=data.vocabulary)


@pytest.mark.parametrize("word", ["rnn:5,4+3", "paper-birnn:5", "torch-rnn:5"])
def test_recurrent_nets(sequences, word):
    make = fresh(sequences, word)
    arms = [arm(rules.readout()), arm(rules.untrained()), reservoir(make)]
    record = compare(sequences, make, arms, epochs=2, restarts=2, batch_size=16, lr=0.01, window=3)
    assert [r.arm.name for r in record.results] == [
        "backprop", "readout", "frozen", "random", "reservoir",
    ]  # fmt: skip
    backprop, readout, _, random, solved = record.results
    assert all(r.counts and len(r.runs) == 2 for r in record.results), [
        r.error for r in record.results
    ]
    assert "backprop through time" in backprop.arm.about
    solved_once = 40  # the last layer reads each sample once instead of twice
    assert readout.runs[0].sample_passes + solved_once == backprop.runs[0].sample_passes
    assert [run.sample_passes for run in random.runs] == [0, 0]
    assert not random.runs[0].history and not random.runs[0].kept_bytes
    assert all(b.learning == "frozen" for b in solved.runs[0].blocks[:-1])
    assert solved.runs[0].blocks[0].rule == "reservoir"
    assert record.settings["window"] == 3
    json.dumps(record.as_dict())


def test_the_random_net_is_the_one_that_training_begins_with(sequences):
    make = fresh(sequences, "rnn:5")
    record = compare(sequences, make, [arm(rules.untrained())], epochs=1, restarts=3, seed=4)
    random = next(r for r in record.results if r.arm.name == "random")
    many = tpsgd.fit_many(make, sequences.train, restarts=3, epochs=0, seed=4, backprop=True)
    assert random.accuracies == many.evaluate(sequences.test)


def test_the_record_says_what_sequences_are(sequences):
    said = provenance.describe(sequences)
    assert said.get("vocabulary") == sequences.vocabulary
    assert ("lengths" in said) == isinstance(sequences.train[0], Padded)


def test_backprop_is_through_time_on_recurrent_nets_alone(data, factory):
    record = compare(data, factory, [], epochs=1, restarts=1)
    assert "time" not in record.results[0].arm.about


def test_controls_do_not_replace_the_frozen_one():
    given = [arm(rules.untrained()), arm(rules.readout(), tpsgd.simultaneous)]
    arms = with_controls(given)
    assert [a.name for a in arms] == ["backprop", "readout", "frozen", "random"]
    assert arms[2].schedule is tpsgd.simultaneous
    net = models.factory("rnn:4", (5, 3), 2)
    assert [a.name for a in with_controls([reservoir(net)])] == [
        "backprop", "frozen", "reservoir",
    ]  # fmt: skip


def test_an_arms_optimizer_replaces_the_shared_one(data, factory, monkeypatch):
    seen = []
    fit_many = arm_module.fit_many

    def noted(*args, **options):
        seen.append((options["rule"] and options["rule"].name, options))
        return fit_many(*args, **options)

    monkeypatch.setattr(arm_module, "fit_many", noted)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    arms = [Arm("sgd", rules.readout(), optimizer=sgd)]
    compare(data, factory, arms, epochs=1, restarts=1, lr=0.01)
    for name, options in seen:
        if name == "readout":
            assert options["optimizer"] is sgd and options["lr"] is None
        else:
            assert "optimizer" not in options and options["lr"] == 0.01
        assert "window" not in options


def test_arrays_are_no_data_set():
    with pytest.raises(tpsgd.TpsgdError, match="data must be a data set as from"):
        compare((torch.zeros(4, 2), torch.zeros(4)), lambda: torch.nn.Linear(2, 2), ["readout"])


def test_every_arm_has_a_confusion_matrix_that_agrees_with_its_accuracy(data, factory):
    record = compare(data, factory, ["readout"], restarts=2, epochs=1)
    for result in record.results:
        assert [c.accuracy for c in result.confusions] == result.accuracies
        assert result.confusion.samples == 2 * 20 and result.confusion.classes == ("0", "1")


def test_several_labels_per_sample_have_no_matrix(factory):
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, :2] > 0).float()
    data = Data("labels", (x, y), (x, y), ("0", "1"), (6,), "")
    record = compare(data, factory, ["drtp"], restarts=1, epochs=1, loss=tpsgd.bce)
    assert all(r.counts and r.confusion is None for r in record.results)
