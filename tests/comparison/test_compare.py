"""`compare`: words, rules and arms; the controls, the record, failures and interrupts."""

import functools
import json
import time
from dataclasses import replace

import pytest
import torch

import tpsgd
from tpsgd import Padded, rules
from tpsgd.comparison import provenance, session
from tpsgd.comparison.arms import arm, reservoir, suited, with_controls
from tpsgd.comparison.compare import compare
from tpsgd.comparison.report import table
from tpsgd.data import Data
from tpsgd.engine import arm as arm_module
from tpsgd.engine.arm import Arm
from tpsgd.engine.settings import Settings
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


@pytest.mark.parametrize(
    "extra",
    [
        Arm("wide", None, factory=models.factory("mlp:50", (6,), 2)),
        Arm("fast", None, lr=0.1),
        Arm("random, wide", rules.frozen(), factory=models.factory("mlp:50", (6,), 2)),
        Arm("random, solved", rules.frozen(), optimizer=tpsgd.ridge()),
    ],
    ids=lambda a: a.name,
)
def test_an_arm_of_another_model_or_rate_replaces_neither_reference(extra):
    arms = with_controls([extra, arm(rules.drtp())])
    assert {"backprop", extra.name, "drtp", "frozen"} == {a.name for a in arms}
    assert arms[0] == Arm("backprop", None) and [a.reference for a in arms] == [True, *[False] * 3]
    assert arms[2 + (not extra.control)] == arm(rules.frozen())


def test_backprop_on_another_model_is_no_reference():
    other = Arm("backprop", None, factory=models.factory("mlp:50", (6,), 2))
    assert not other.reference
    with pytest.raises(tpsgd.TpsgdError, match="two arms are called 'backprop'"):
        with_controls([other])


def test_ratios_are_over_backprop_on_the_shared_model(data, factory):
    wide = Arm("wide", None, factory=models.factory("mlp:50", (6,), 2))
    record = compare(data, factory, [wide], epochs=1, restarts=1)
    assert record.reference is record.results[0]
    assert [r.arm.name for r in record.ranked] == ["backprop", "wide", "frozen"]
    sizes = [sum(b.parameters for b in r.runs[0].blocks) for r in record.ranked]
    assert sizes[1] > sizes[0] == sizes[2]
    assert "×1.00" in str(record).splitlines()[1]


FORMS = ["backprop-micro", "backprop-checkpointed"]


def test_forms_of_backprop_are_peers_that_learn_the_same_in_less_memory(data):
    net = models.factory("mlp:16,16,16,16,16,16,16", (6,), 2)
    settings = {"restarts": 1, "epochs": 2, "batch_size": 40}
    record = compare(data, net, ["readout", *FORMS], **settings)
    plain, *forms, readout, frozen = record.ranked
    assert record.reference is plain and {r.arm.name for r in forms} == set(FORMS)
    assert (readout.arm.name, frozen.arm.name) == ("readout", "frozen")
    losses = [[e.loss for e in r.runs[0].history] for r in (plain, *forms)]
    assert losses[1] == pytest.approx(losses[0]) and losses[2] == pytest.approx(losses[0])
    assert all(r.largest.total_bytes < plain.largest.total_bytes for r in forms)
    assert [r.arm.name for r in record.exemplars] == ["backprop", "readout", "frozen"]
    micro, checkpointed = (arm(word) for word in FORMS)
    assert micro.train(net, data.train).runs[0].settings["micro_batch"] == 8
    given = micro.train(net, data.train, memory=tpsgd.Memory(micro_batch=5))
    assert given.runs[0].settings["micro_batch"] == 5
    peaks = {
        n: tpsgd.fit_backprop(net(), data.train, segments=n, epochs=2, batch_size=40).peak_bytes
        for n in (2, 4, 8)
    }
    best = record.results[3]
    assert best.arm == replace(checkpointed, checkpointed=min(peaks, key=peaks.get))
    assert best.largest.peak_bytes == peaks[4] < peaks[8]


def test_an_arm_of_a_rule_may_have_its_micro_batch(data, factory):
    small = Arm("small", rules.readout(), micro_batch=4)
    assert small.train(factory, data.train, epochs=1).runs[0].settings["micro_batch"] == 4
    with pytest.raises(tpsgd.TpsgdError, match="a memory budget chooses micro_batch"):
        small.train(factory, data.train, memory="1MB")


class Whole(torch.nn.Module):
    """A net that is no nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Whole, "pass nn.Sequential"),
        (models.factory("rnn:4", (5, 3), 2), "without recurrent layers"),
    ],
    ids=["not a Sequential", "recurrent"],
)
def test_what_cannot_be_checkpointed_is_left_out_with_a_remark(data, make, reason):
    arms = [arm(word) for word in ("backprop", *FORMS)]
    allowed, (remark,) = suited(arms, make, data, Settings())
    assert allowed == arms[:2] and reason in remark
    assert remark.startswith("backprop-checkpointed is left out: ")
    x = Padded(torch.zeros(2, 5, 3), torch.tensor([5, 2]))
    allowed, remarks = suited(arms, make, replace(data, train=(x, data.train[1][:2])), Settings())
    assert allowed == arms[:1] and "different lengths" in remarks[0] and len(remarks) == 2


def test_two_arms_of_one_name_are_refused_rather_than_one_dropped():
    with pytest.raises(tpsgd.TpsgdError, match="two arms are called 'readout'"):
        with_controls([arm(rules.readout()), arm(rules.readout(features=16))])
    for name in ("backprop", "frozen"):
        with pytest.raises(tpsgd.TpsgdError, match=f"two arms are called '{name}'"):
            with_controls([Arm(name, rules.readout())])


def by_hand(model, data, epochs, batch_size=1, seed=9):
    """A method that says nothing about its time."""
    by_hand.settings = {"epochs": epochs, "batch_size": batch_size, "seed": seed}
    time.sleep(0.01)
    return tpsgd.Run("by hand", seed, {})


def without_record(model, data, **settings):
    by_hand(model, data, settings["epochs"], settings["batch_size"], settings["seed"])


@pytest.mark.parametrize("method", [by_hand, without_record])
def test_a_method_gets_the_settings_and_is_timed_from_outside(data, factory, method, tmp_path):
    mine = Arm("mine", None, method=method)
    record = compare(data, factory, [mine], restarts=1, epochs=3, batch_size=16, seed=4)
    assert by_hand.settings == {"epochs": 3, "batch_size": 16, "seed": 4}
    result = record.results[1]
    assert result.error is None and 0.01 <= result.seconds < 10 and result.runs[0].seed == 4
    row = next(line for line in str(record).splitlines() if line.startswith("mine"))
    assert "0.00" not in row and record.write(tmp_path).exists()


def test_what_a_method_takes(data, factory):
    mine = Arm("mine", None, method=functools.partial(by_hand, batch_size=7))
    mine.train(factory, data.train, epochs=5, batch_size=16, loss=tpsgd.mse, memory="1MB")
    assert by_hand.settings == {"epochs": 5, "batch_size": 7, "seed": 0}  # what was fixed stays
    same = Arm("same", None, method=tpsgd.fit_backprop)
    settings = {"epochs": 2, "batch_size": 8, "lr": 0.01, "loss": tpsgd.mse}
    runs = [a.train(factory, data.train, **settings).runs[0] for a in (same, arm("backprop"))]
    assert [e.loss for e in runs[0].history] == [e.loss for e in runs[1].history]
    with pytest.raises(tpsgd.TpsgdError, match=r"must return a tpsgd\.Run or None, got a float"):
        Arm("mine", None, method=lambda model, data: 0.9).train(factory, data.train)


def test_a_rule_of_an_arm_is_a_value():
    with pytest.raises(tpsgd.TpsgdError, match=r"write tpsgd\.rules\.drtp\(\)"):
        Arm("mine", rules.drtp)


def test_a_method_that_fails_is_a_failed_arm_and_the_others_go_on(data, factory):
    def careless(model, data, lr):
        pass

    record = compare(data, factory, [Arm("mine", None, method=careless)], restarts=1, epochs=1)
    assert "missing 1 required positional argument: 'lr'" in str(record.results[1].error)
    assert record.results[0].counts and "mine failed: TypeError" in str(record)


def test_arms_are_words_rules_or_arms(data, factory, tmp_path):
    arms = ["tpsgd-l2", rules.readout(), tpsgd.peers.zorb()]
    record = tpsgd.compare(data, factory, arms, restarts=1, epochs=1, order=tpsgd.simultaneous)
    assert [r.arm.name for r in record.results] == [
        "backprop", "tpsgd-l2", "readout", "zorb", "frozen",
    ]  # fmt: skip
    assert record.results[1].arm.order is tpsgd.simultaneous
    table = str(record).splitlines()
    assert [line.split()[0] for line in table] == ["rule", *(r.arm.name for r in record.ranked)]
    assert all(r.counts for r in record.results)
    assert record.write(tmp_path / "report").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arms", "settings", "message"),
    [
        (["redout"], {}, "unknown rule 'redout': did you mean 'readout'?"),
        ([rules.readout], {}, r"write tpsgd\.rules\.readout\(\), not the function itself"),
        ([3], {}, "an arm is a word, a rule or an Arm, not int"),
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
    assert arm(rules.readout()).order is None  # `fit` chooses
    assert arm(rules.readout(), chosen).order is chosen
    assert arm(rules.dfa(), tpsgd.sequential).order is chosen
    assert with_controls([arm(rules.readout(), chosen)])[-1].order is chosen
    assert with_controls([arm(rules.dfa())])[-1].order is None


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
    assert str(record).splitlines()[-1] == f"{broken.arm.name} failed: {broken.error}"
    assert all(len(r.runs) == 2 for r in record.results if r is not broken)
    assert (record.finished, record.asked) == (6, 8)
    assert [r.arm.name for r in record.ranked][-2:] == [broken.arm.name, "frozen"]
    assert record.as_dict()["arms"][1]["summary"] is None


def wrong_objective(site):
    return {}[site.key.block]


def wrong_loss(site):
    def loss(y, s, *tensors):
        raise ValueError("of no shape")

    return replace(rules.readout().objective(site), loss=loss, closed_form=None)


def no_objective(site):
    return 3.0


def wrong_predictor(model):
    class Predictor(torch.nn.Module):
        def forward(self, x):
            raise KeyError("no such class")

    return Predictor()


BAD_RULES = {
    "objective": (replace(rules.readout(), objective=wrong_objective), "KeyError: 0", 1),
    "loss": (replace(rules.readout(), objective=wrong_loss), "ValueError: of no shape", 2),
    "value": (replace(rules.readout(), objective=no_objective), "TypeError: replace() sho", 0),
    "predictor": (replace(rules.readout(), predictor=wrong_predictor), "Predictor cannot take", 3),
    "no module": (
        replace(rules.readout(), predictor=lambda model: model.forward),
        "the predictor of readout must return an nn.Module, got a method",
        None,
    ),
}


@pytest.mark.parametrize("lr", [None, "search"])
@pytest.mark.parametrize("word", BAD_RULES)
def test_an_error_of_a_users_rule_is_a_sentence_with_its_line(data, factory, word, lr):
    rule, text, after = BAD_RULES[word]
    settings = {"restarts": 1, "epochs": 1, "batch_size": 16, "lr": lr}
    record = compare(data, factory, [replace(rule, name="own")], **settings)
    backprop, own, frozen = record.results
    assert backprop.runs and frozen.runs and not own.runs
    assert (
        str(own.error)
        .removeprefix("own failed with every setting: ")
        .startswith(text.replace("readout", "own"))
    )
    if after is not None:  # lines after the first of a function
        function = rule.predictor or rule.objective
        line = function.__code__.co_firstlineno + after
        assert str(own.error).endswith(f"{__file__}, line {line})")
    assert f"own failed: {own.error}" in str(record)


def test_a_mistake_of_the_library_has_its_traceback(data, factory, monkeypatch):
    monkeypatch.setattr("tpsgd.comparison.session.score", None)
    monkeypatch.setattr("tpsgd.comparison.session.confusion", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        compare(data, factory, ["drtp"], restarts=1, epochs=1)


def test_an_arm_that_failed_late_shows_no_figures(data, factory, monkeypatch):
    confusion = session.confusion
    calls = iter(range(99))

    def failing(*args):  # the arms take turns: call 2 is backprop's second restart
        if next(calls) == 2:
            raise tpsgd.TpsgdError("no more")
        return confusion(*args)

    monkeypatch.setattr(session, "confusion", failing)
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

    result = session.Result(Arm("x", None), [0.5, 0.7, 0.6], [run(1.0), run(99.0), run(2.0)])
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


@pytest.mark.cover(1)
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


def test_a_form_of_backprop_that_is_left_out_is_in_the_remarks(sequences):
    record = compare(
        sequences, fresh(sequences, "rnn:4"), ["backprop-checkpointed"], restarts=1, epochs=1
    )
    said = "backprop-checkpointed is left out: segments are for models without recurrent layers"
    assert [r.arm.name for r in record.results] == ["backprop", "frozen"]
    assert said in str(record) and said in table.remarks(record)


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
    assert arms[2].order is tpsgd.simultaneous
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
