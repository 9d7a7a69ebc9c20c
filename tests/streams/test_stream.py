"""Many calls of `partial_fit` are one training run for every net; bad calls lose nothing."""

import copy

import numpy as np
import pytest
import torch
from streams.nets import X, Y, cnn, learn, mlp, normed, recurrent, same, weights
from torch import nn

import tpsgd
from tpsgd import Padded, Recurrent, Stream, TpsgdError, adapt, rules
from tpsgd.features.last_good import tensors_in

pytestmark = pytest.mark.usefixtures("unwatched")


@pytest.mark.parametrize("make", [mlp, cnn, recurrent])
@pytest.mark.parametrize("word", ["readout", "readout-learned", "tpsgd-l2", "dfa"])
def test_calls_are_one_run_over_a_loader(make, word):
    rule, model, other = rules.ALL[word].make(), make(), make()
    learn(Stream(model, rule=rule))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:300], Y[:300]), 25)
    tpsgd.fit(other, loader, rule=rule, order=tpsgd.simultaneous, epochs=1)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_long_call_is_one_epoch_of_fit():
    model, other = mlp(), mlp()
    Stream(model).partial_fit(X, Y)
    tpsgd.fit(other, (X, Y), order=tpsgd.simultaneous, epochs=1, batch_size=32)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_random_numbers_go_on_from_call_to_call():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))
    masks = []
    model[1].register_forward_hook(lambda m, x, y: masks.append(y != 0) if m.training else None)
    stream = Stream(model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(2):
        stream.partial_fit(torch.ones(4, 1, 8, 8), Y[:4])
    assert not torch.equal(masks[-2], masks[-1])
    assert torch.equal(torch.get_rng_state(), before)


def test_single_samples_are_learned():
    stream = Stream(mlp(), lr=0.003)
    for x, y in zip(X[:400], Y[:400], strict=True):
        stream.partial_fit(x, y)
    assert stream.samples == 400
    assert stream.evaluate((X, Y)) > 0.6


def test_sums_of_rls_go_on_from_call_to_call():
    """Finding 1: 15 calls of 50 samples were 81.9 %, one stream of the same samples 94.7 %."""
    calls, whole, model = mlp(), mlp(), mlp()
    stream = Stream(calls, optimizer=tpsgd.rls())
    learn(stream, samples=750, size=50)
    tpsgd.fit(
        whole, (X[:750], Y[:750]), rule=rules.frozen(), optimizer=tpsgd.rls(), batch_size=50,
        order=tpsgd.simultaneous,
    )  # fmt: skip
    assert torch.allclose(calls[-1].weight, whole[-1].weight, atol=1e-4)
    assert tpsgd.evaluate(calls, (X, Y)) == pytest.approx(tpsgd.evaluate(whole, (X, Y)), abs=0.01)
    assert torch.equal(calls[1].weight, model[1].weight)


def test_fit_says_that_rls_forgets():
    model, settings = mlp(), {"rule": rules.frozen(), "optimizer": tpsgd.rls(), "epochs": 1}
    tpsgd.fit(model, (X, Y), **settings)
    with pytest.warns(UserWarning, match="forgets the samples of an earlier call.*tpsgd.Stream"):
        tpsgd.fit(model, (X, Y), **settings)
    tpsgd.fit(copy.deepcopy(model), (X, Y), **settings)


def test_sequences_of_different_lengths():
    torch.manual_seed(0)
    model = nn.Sequential(Recurrent(3, 16), nn.Linear(16, 2))
    stream = Stream(model, lr=0.01)
    for i in range(60):
        y = torch.arange(8) % 2
        x = [torch.randn(2 + (i + j) % 4, 3) + 2 * int(y[j]) for j in range(8)]
        stream.partial_fit(Padded.of(x), y)
    assert stream.evaluate((Padded.of(x), y)) == 1.0
    stream.partial_fit(torch.randn(3, 9, 3), [0, 1, 0])  # of one length, a longer one


def test_the_layers_of_an_adaptor_learn_and_the_backbone_does_not():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    backbone = adapt.Backbone(net, {"low": "1", "high": "3"})
    first, names = Y < 3, ["zero", "one", "two", "three"]
    adaptor = adapt.fit(
        backbone, (X[first][:20], Y[first][:20]), taps=["low", "high"], classes=names[:3],
        layers=adapt.Layers(filters=4, width=16), epochs=1,
    )  # fmt: skip
    before, stream = weights(net), Stream(adaptor, lr=0.01, batch_size=8)
    old = adaptor(X[:5])
    stream.add_class("three")
    assert torch.allclose(adaptor(X[:5])[:, :3], old, atol=1e-6) and adaptor.classes == tuple(names)
    few = Y < 4
    labels = [names[c] for c in Y[few].tolist()]
    for _ in range(4):
        stream.partial_fit(X[few], labels)
    assert same(before, weights(net))
    assert stream.evaluate((X[few], labels)) > 0.8


@pytest.mark.parametrize("make", [mlp, normed])
def test_a_stream_goes_on_in_another_process(make, tmp_path):
    whole = learn(Stream(make(), rule=rules.readout(True), rehearsal=tpsgd.Rehearsal("10KB")))
    model = make()
    first = Stream(model, rule=rules.readout(True), rehearsal=tpsgd.Rehearsal("10KB"))
    learn(first, 150)
    torch.save((model.state_dict(), first.state_dict()), tmp_path / "stream.pt")
    learn(first, 150, start=150)
    state, state_of_stream = torch.load(tmp_path / "stream.pt")
    (other := make()).load_state_dict(state)
    second = Stream(other, rule=rules.readout(True), rehearsal=tpsgd.Rehearsal("10KB"))
    second.load_state_dict(state_of_stream)
    learn(second, 150, start=150)
    with pytest.raises(TpsgdError, match="no state of a stream"):
        second.load_state_dict({"samples": 3})
    assert same(weights(whole.model), weights(first.model))
    assert same(weights(whole.model), weights(second.model))
    assert second.samples == 300


OTHER_STREAMS = {
    "rule": (mlp, {"rule": rules.dfa()}, "its rule was readout-learned, and now it is dfa"),
    "options": (
        mlp, {"rule": rules.readout(True, features=9)}, "its list of the rules' options was",
    ),
    "seed": (mlp, {"seed": 1}, "its seed was 0, and now it is 1"),
    "optimizer": (mlp, {"optimizer": tpsgd.sgd}, "its optimizer was Adam, and now it is SGD"),
    "solver": (
        mlp, {"optimizer": tpsgd.rls()}, "its rule was readout-learned, and now it is frozen",
    ),
    "width": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 10)), {},
        r"its model was 1.weight of shape \(32, 64\), and now it is 1.weight of shape \(9, 64\)",
    ),
    "depth": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), {}, "its model was"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_STREAMS)
def test_the_state_of_another_stream_is_refused_and_changes_nothing(name):
    make, settings, message = OTHER_STREAMS[name]
    state = learn(Stream(mlp()), 50).state_dict()
    stream = learn(Stream(make(), **settings), 50)
    before = stream.state_dict()
    with pytest.raises(TpsgdError, match=f"the state is of another stream: {message}"):
        stream.load_state_dict(state)
    after = stream.state_dict()
    assert all(map(torch.equal, tensors_in(before), tensors_in(after))) and after["samples"] == 50
    stream.partial_fit(X[:5], Y[:5])


def test_a_stream_may_go_on_with_another_learning_rate_and_batch_size():
    first = learn(Stream(mlp()), 50)
    second = Stream(first.model, lr=0.1, batch_size=4)
    second.load_state_dict(first.state_dict())
    assert learn(second, 50, start=50).samples == 100


def test_words_in_place_of_rules_and_of_labels():
    assert Stream(mlp(), rule="readout")._rule == rules.readout()
    with pytest.raises(TpsgdError, match="unknown rule 'reedout': did you mean 'readout'"):
        Stream(mlp(), rule=[rules.readout(), "reedout"])
    with pytest.raises(TpsgdError, match="y must be the labels of x, got None"):
        Stream(mlp()).partial_fit(X[:2], None)


@pytest.mark.parametrize(("names", "label"), [(["zero", "one"], 1), ([10, 20], "10")])
def test_a_label_of_another_kind_than_the_names_is_no_new_class(names, label):
    stream = Stream(mlp(2), classes=names)
    with pytest.raises(TpsgdError, match=f"label {label!r} is a .*names such as {names[0]!r}"):
        stream.partial_fit(X[:2], [label, label])
    assert stream.classes == tuple(names) and stream.samples == 0


BAD = [
    (lambda: (X[:3], Y[:2]), "x has 3 samples but y has 2 labels"),
    (lambda: (X[:0], Y[:0]), "no samples to learn from"),
    (lambda: (X[:2] * np.nan, Y[:2]), "NaN or infinity"),
    (lambda: (X[:2, :, :4], Y[:2]), "cannot take an input of shape"),
    (lambda: (X[:2], [3, -1]), "out of range"),
    (lambda: (X[:2], [3, 12]), "label 12 skips class 10: .* classes 0 to 9, .* from 10 without"),
    (lambda: (X[:2], ["a", "b"]), "y must be numbers"),
    (lambda: (X[:2], torch.rand(2, 3)), "rows of shape"),
    (lambda: (X[:2], torch.rand(2)), "10 outputs, and y has 1 number .* labels must be whole"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
@pytest.mark.parametrize("first", [True, False])
def test_bad_samples_are_refused_and_nothing_is_lost(bad, sentence, first):
    stream, other = Stream(mlp()), Stream(mlp())
    if not first:
        learn(stream, 100)
        learn(other, 100)
    with pytest.raises(TpsgdError, match=sentence):
        stream.partial_fit(*bad())
    assert stream.classes == tuple(range(10)) and stream.samples == other.samples
    learn(stream, 100, start=100)
    learn(other, 100, start=100)
    assert same(weights(stream.model), weights(other.model))


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (mlp, {"optimizer": tpsgd.ridge()}, "ridge.* needs all samples at once"),
        (mlp, {"optimizer": tpsgd.rls(), "rule": rules.readout()}, "rls.* cannot solve block"),
        (normed, {}, "at least 2 samples in a step"),
    ],
)
def test_what_cannot_learn_from_a_sample_is_refused(make, settings, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        Stream(make(), **settings).partial_fit(X[:1], Y[:1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"classes": ["a", "b"]}, "10 outputs, but classes has 2 names"),
        ({"classes": ["a"] * 10}, "different names"),
        ({"rehearsal": "100KB"}, "rehearsal must be"),
        ({"drift": 3}, "drift detector int failed with .*no attribute 'update'"),
        ({"on_drift": print}, "needs a detector"),
        ({"lr": -1.0}, "lr must be a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        Stream(mlp(), **settings).partial_fit(X[:2], Y[:2])


def test_a_yes_or_no_output_has_no_classes_to_add():
    stream = Stream(mlp(1), loss=tpsgd.bce)
    with pytest.raises(TpsgdError, match="single yes-or-no output"):
        stream.partial_fit(X[:4], [0, 1, 0, 1])
    assert stream.classes == (0,)


def test_rows_of_labels_are_learned_and_evaluated():
    rows = (torch.arange(3) < 2 * torch.rand(400, 1)).float()
    x = torch.cat([rows, 1 - rows], 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    stream = Stream(model, loss=tpsgd.bce, lr=0.03)
    for start in range(0, 400, 20):
        stream.partial_fit(x[start : start + 20], rows[start : start + 20])
    assert stream.evaluate((x, rows)) == tpsgd.evaluate(model, (x, rows), multi_label=True) > 0.9


def test_a_loss_that_is_not_finite_stops_the_stream_with_the_weights_of_the_last_good_step():
    stream = Stream(mlp(), rule=rules.tpsgd_l2(), optimizer=tpsgd.sgd, lr=900.0)
    sentence = (
        r"the loss of block .* became .*: lower its learning .*; the model and the stream are"
    )
    with pytest.raises(TpsgdError, match=sentence):
        learn(stream)
    assert all(torch.isfinite(p).all() for p in stream.model.parameters())
    assert np.isfinite(stream.evaluate((X, Y)))


HUGE = X[:4] * 3e38
STREAMS = {
    "Adam": (mlp, {}),
    "learned codes": (mlp, {"rule": rules.readout(True)}),
    "momentum": (mlp, {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)}),
    "batch norm": (normed, {}),
    "rls": (mlp, {"optimizer": tpsgd.rls(), "loss": tpsgd.mse}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_after_a_broken_step_a_stream_goes_on_as_if_the_step_before_had_not_been(name):
    make, settings = STREAMS[name]
    stream, other = (learn(Stream(make(), **settings), 100) for _ in range(2))
    learn(stream, 25, start=100)  # the step that is lost
    with pytest.raises(TpsgdError, match="as they were before the step before"):
        stream.partial_fit(HUGE, Y[:4])
    assert same(weights(stream.model), weights(other.model))
    other._calls = stream._calls  # of the order of samples
    for each in (stream, other):
        learn(each, 100, start=125)
    assert same(weights(stream.model), weights(other.model))
    assert same(stream.model.buffers(), other.model.buffers())


def test_a_first_step_that_breaks_leaves_the_weights_as_they_were():
    stream, other = (Stream(mlp(), rule=rules.tpsgd_l2()) for _ in range(2))
    with pytest.raises(TpsgdError, match="as they were before this step"):
        stream.partial_fit(HUGE, Y[:4])
    assert same(weights(stream.model), weights(other.model))
    assert same(weights(learn(stream, 100).model), weights(learn(other, 100).model))


def test_a_step_that_raises_is_undone(monkeypatch):
    stream, other = learn(Stream(mlp()), 50), learn(Stream(mlp()), 50)
    learner, calls = stream._nets[0].learners[-1], []
    monkeypatch.setattr(learner, "update", lambda *_, **__: calls.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learn(stream, 25, start=50)
    assert calls and same(weights(stream.model), weights(other.model))
    learn(other, 25, start=50)
    learn(stream, 25, start=50)
    assert same(weights(stream.model), weights(other.model))


def test_weights_that_are_too_large_to_be_copied_in_every_step_are_lost(monkeypatch):
    monkeypatch.setattr(tpsgd.features.last_good, "MOST", 100)
    with pytest.raises(TpsgdError, match="the weights are lost"):
        learn(Stream(mlp())).partial_fit(HUGE, Y[:4])


def test_a_long_call_shows_its_progress():
    calls = []
    stream = Stream(mlp(), batch_size=10, progress=lambda *done: calls.append(done))
    stream.partial_fit(X[:95], Y[:95])
    assert calls[0] == (10, 95) and calls[-1] == (95, 95) and len(calls) == 10
    with pytest.raises(TpsgdError, match="progress must be"):
        Stream(mlp(), progress="yes")
