"""A new class adds a row to P and to the last layer; all that was there stays as it is."""

import numpy as np
import pytest
import torch
from helpers import with_full
from streams.nets import X, Y, cnn, learn, mlp, normed, recurrent, same, weights
from torch import nn

import tpsgd
from tpsgd import Stream, TpsgdError, rules
from tpsgd.nets.new_classes import overlay
from tpsgd_streams.labels import Classes

pytestmark = pytest.mark.usefixtures("unwatched")

WORDS = [
    "tpsgd-l2", "tpsgd-l1", "drtp", "dfa", "sdfa", "readout", "readout-learned", "predsim",
    "auxiliary", "frozen",
]  # fmt: skip


def few(classes):
    """Samples of the first classes."""
    chosen = classes > Y
    return X[chosen][:60], Y[chosen][:60]


def learners(stream):
    return [learner for net in stream._nets for learner in net.learners]


def rebuild(stream):
    """The learners of a stream after a class was added, without a step."""
    net = stream._nets[0]
    with net._training() as device:
        net._make_learners(X[:4], Y[:4], device)


@pytest.mark.parametrize("make", [mlp, cnn, recurrent])
@pytest.mark.parametrize("word", WORDS)
def test_rows_codes_and_optimizers_are_unchanged(make, word):
    if make is recurrent and word in ("predsim", "auxiliary"):
        pytest.skip("not for recurrent nets")
    stream = Stream(make(5), rule=rules.ALL[word].make())
    stream.partial_fit(*few(5))
    before = [
        (weights(stream.model), x.tensors, x.params, x.updater.optimizer) for x in learners(stream)
    ]
    stream.add_class()
    rebuild(stream)
    after = learners(stream)
    assert len(after) == len(before)
    for (model, codes, params, optimizer), learner in zip(before, after, strict=True):
        for old, new in zip(model, weights(stream.model), strict=True):
            assert torch.equal(new[: len(old)], old)
        for old, new in zip(codes, learner.tensors, strict=True):
            assert new.dim() == old.dim()
            assert torch.equal(new[tuple(map(slice, old.shape))], old)
            assert old.dim() == 0 or new.shape == old.shape or len(new) == len(old) + 1
        for name, p in params.items() if optimizer is not None else ():
            for key, old in optimizer.state[p].items():
                new = learner.updater.optimizer.state[learner.params[name]][key]
                assert torch.equal(new[tuple(map(slice, old.shape))], old)
    last = stream.model[-1]
    assert last.out_features == 6 and not last.weight[5].any() and last.bias[5] == 0


@pytest.mark.parametrize("word", ["tpsgd-l2", "readout"])
def test_codes_of_a_new_class_are_those_of_a_net_that_had_it_from_the_start(word):
    grown, whole = (Stream(mlp(n), rule=rules.ALL[word].make(), lr=0.0) for n in (5, 6))
    grown.partial_fit(*few(5))
    whole.partial_fit(*few(5))
    grown.add_class()
    rebuild(grown)
    assert torch.allclose(learners(grown)[0].tensors[0], learners(whole)[0].tensors[0])
    assert learners(grown)[0].tensors[0][5].any()


@pytest.mark.parametrize("outputs", [1, 3, 7, 10])
@pytest.mark.parametrize("make", [mlp, cnn, recurrent])
def test_old_outputs_are_unchanged(make, outputs):
    stream = Stream(make(outputs))
    stream.partial_fit(*few(outputs))
    before = stream.outputs(X[:50])
    stream.add_class()
    after = stream.outputs(X[:50])
    assert after.shape == (50, outputs + 1) and not after[:, outputs].any()
    assert torch.allclose(after[:, :outputs], before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outputs", [1, 2, 3, 7, 10, 15])
def test_old_outputs_are_the_same_bits_where_sums_are_exact(outputs):
    """With whole numbers, no sum is rounded: the order in which BLAS adds does not matter."""
    model = mlp(outputs)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((100 * p).round())
    x = (16 * X).round()
    stream = Stream(model)
    before = stream.outputs(x)
    stream.add_class()
    assert torch.equal(stream.outputs(x)[:, :outputs], before)


def test_rls_on_old_classes_is_unchanged_and_a_new_class_is_learned():
    stream = Stream(mlp(5), optimizer=tpsgd.rls())
    x, y = X[Y < 5], Y[Y < 5]
    stream.partial_fit(x, y)
    before = weights(stream.model[-1])
    stream.add_class()
    for old, new in zip(before, weights(stream.model[-1]), strict=True):
        assert torch.equal(new[:5], old)
    stream.partial_fit(X[Y == 5], Y[Y == 5])
    whole = Stream(mlp(6), optimizer=tpsgd.rls()).partial_fit(x, y)
    whole.partial_fit(X[Y == 5], Y[Y == 5])
    for ours, theirs in zip(weights(stream.model), weights(whole.model), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert stream.evaluate((X[Y == 5], Y[Y == 5])) > 0.5


def test_rls_with_yes_or_no_labels_gets_a_new_class():
    rows = nn.functional.one_hot(Y[:300], 10).float()
    grown = Stream(mlp(4), optimizer=tpsgd.rls(), loss=tpsgd.bce)
    whole = Stream(mlp(5), optimizer=tpsgd.rls(), loss=tpsgd.bce)
    grown.partial_fit(X[:150], rows[:150, :4])
    whole.partial_fit(X[:150], torch.cat([rows[:150, :4], torch.zeros(150, 1)], 1))
    grown.add_class()
    for stream in (grown, whole):
        stream.partial_fit(X[150:300], rows[150:, :5])
    assert torch.allclose(grown.model[-1].weight, whole.model[-1].weight, atol=1e-5)
    assert torch.allclose(grown.model[-1].bias, whole.model[-1].bias, atol=1e-5)


@pytest.mark.parametrize("make", with_full([mlp, cnn, recurrent, normed], [cnn, recurrent]))
def test_labels_that_are_new_become_classes_by_themselves(make):
    buffer = tpsgd.Rehearsal("40KB", replayed=4)
    stream = Stream(make(1), lr=0.01, rehearsal=buffer, batch_size=8)
    for digit in range(4):
        for _ in range(5):
            stream.partial_fit(X[digit == Y], Y[digit == Y])
    assert stream.classes == (0, 1, 2, 3)
    assert stream.evaluate((X[Y < 4], Y[Y < 4])) > 0.7


def test_classes_with_names():
    stream = Stream(mlp(2), classes=["zero", "one"], lr=0.01)
    words = ["zero", "one", "two", "three"]
    x, labels = X[Y < 4], [words[c] for c in Y[Y < 4].tolist()]
    for _ in range(6):
        stream.partial_fit(x, labels)
    assert set(stream.classes) == set(words) and stream.classes[:2] == ("zero", "one")
    assert set(stream.predict(x)) == set(words)
    assert stream.evaluate((x, labels)) > 0.8
    stream.partial_fit(x[0], "four")
    assert stream.classes[-1] == "four"
    for name, sentence in (("one", "already"), (None, "needs a name")):
        with pytest.raises(TpsgdError, match=sentence):
            stream.add_class(name)


def test_labels_are_indices_of_names_in_the_order_in_which_they_come():
    classes = Classes(["cat", "dog"], 2)
    assert classes.new(["dog", "cow", "cow"]) == ["cow"]
    classes.add("cow")
    assert classes.indices(["dog", "cow", "cow"]).tolist() == [1, 2, 2]


def refused(stream, sentence, *call):
    """A call that is refused changes neither the classes, nor the weights, nor what comes later."""
    before, classes = weights(stream.model), stream.classes
    with pytest.raises(TpsgdError, match=sentence):
        (stream.partial_fit if len(call) > 1 else stream.add_class)(*call)
    assert stream.classes == classes and same(weights(stream.model), before)
    assert stream.model[-1].out_features == len(classes)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (["f", None], "a new one needs a name, too: got None"),
        (["f", float("nan")], "a label is the name of a class, got nan"),
        ([np.float64("nan"), "f"], "a label is the name of a class, got"),
        (["f", ["g"]], "a label is the name of a class"),
    ],
)
def test_no_class_is_added_if_one_of_the_new_labels_is_refused(labels, sentence):
    stream = Stream(mlp(2), classes=["zero", "one"])
    refused(stream, sentence, X[:2], labels)
    stream.partial_fit(X[:2], ["zero", "one"])
    refused(stream, sentence, X[:2], labels)
    refused(stream, "got nan", float("nan"))
    refused(stream, "got .'a'", ["a"])
    stream.partial_fit(X[:2], ["one", "f"])
    assert stream.classes == ("zero", "one", "f")


def test_no_class_is_added_if_a_label_is_out_of_range_or_the_stream_cannot_learn():
    refused(Stream(mlp(3)), "out of range", X[:2], [3, -1])
    refused(Stream(mlp(3), optimizer=tpsgd.ridge()), "needs all samples at once", X[:2], [0, 3])
    settings = {"optimizer": tpsgd.rls(), "rule": rules.readout()}
    refused(Stream(mlp(3), **settings), "cannot solve block", X[:2], [0, 3])


def test_sums_without_a_bias_get_no_class_of_yes_or_no_labels_and_the_stream_goes_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False))
    stream = Stream(model, optimizer=tpsgd.rls(), loss=tpsgd.bce)
    rows = nn.functional.one_hot(Y[:50] % 3, 3).float()
    stream.partial_fit(X[:50], rows)
    refused(stream, "needs a bias in the last layer", None)
    refused(stream, "needs a bias in the last layer", X[:2], torch.tensor([0, 3]))
    stream.partial_fit(X[:50], rows)


def test_a_class_without_a_name_is_the_next_number():
    stream = Stream(mlp(3))
    stream.add_class(3)
    stream.add_class()
    with pytest.raises(TpsgdError, match="the next one is 5"):
        stream.add_class("cat")
    assert stream.classes == (0, 1, 2, 3, 4)


def test_a_state_with_new_classes_is_loaded_into_a_model_that_has_them():
    first = learn(Stream(mlp(9)), 100)
    assert len(first.classes) == 10
    second = Stream(mlp(10))
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for stream in (first, second):
        learn(stream, 100, start=100)
    assert same(weights(first.model), weights(second.model))
    with pytest.raises(TpsgdError, match="the state is of classes 10, the stream has 9"):
        Stream(mlp(9)).load_state_dict(first.state_dict())


def test_a_last_block_that_cannot_grow_is_refused_and_goes_on():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))
    stream = Stream(model)
    stream.partial_fit(*few(3))
    with pytest.raises(TpsgdError, match="BatchNorm1d after its layer has a number for each"):
        stream.partial_fit(X[:10], Y[:10] % 4)
    assert stream.classes == (0, 1, 2)
    stream.partial_fit(*few(3))


def test_a_convolution_may_be_the_last_layer():
    model = nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    stream = Stream(model, lr=0.01)
    for _ in range(5):
        stream.partial_fit(X[Y < 4], Y[Y < 4])
    assert model[0].out_channels == 4 and stream.evaluate((X[Y < 4], Y[Y < 4])) > 0.8


def test_codes_of_another_form_are_drawn_anew():
    new, old = torch.ones(4, 6), torch.zeros(3, 2, 3)
    assert torch.equal(overlay(new, old), torch.ones(4, 6))
    assert overlay(torch.zeros(3, 1), torch.ones(2, 1)).flatten().tolist() == [1, 1, 0]
    filters = 26  # 26 x 6 x 6 x classes crosses the limit of `objectives.PIXEL_CODES` at 17 -> 18
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, filters, 3), nn.ReLU(), nn.Flatten(), nn.Linear(936, 17))
    stream = Stream(model, rule=rules.readout())
    stream.partial_fit(X[:10], Y[:10])
    before = learners(stream)[0].tensors[0].shape
    stream.add_class()
    stream.partial_fit(X[:10], Y[:10])
    assert learners(stream)[0].tensors[0].dim() != len(before)
