"""Sequences of different lengths: padding never matters, and every way to give them is the same."""

import copy

import numpy as np
import pytest
import torch
from helpers import LOCAL, close, ragged, same, seeded, sequences, state, tokens
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

import tpsgd
from tpsgd import Padded, Recurrent, TpsgdError, rules
from tpsgd.nets.recurrent import connect

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = sequences()
RAGGED = ragged(X)
LENGTHS = RAGGED.lengths.tolist()
SEQUENCES = [x[:n] for x, n in zip(X, LENGTHS, strict=True)]
STEP = {"optimizer": torch.optim.SGD, "lr": 0.5, "epochs": 1, "batch_size": 1000}

NETS = {
    "one layer": lambda: [Recurrent(4, 5)],
    "both ways": lambda: [Recurrent(4, 5, bidirectional=True), nn.Linear(10, 5), nn.Tanh()],
    "two layers": lambda: [Recurrent(4, 6, sequence=True), Recurrent(6, 5)],
    "two layers both ways": lambda: [
        Recurrent(4, 3, sequence=True, bidirectional=True),
        Recurrent(6, 5, bidirectional=True),
        nn.Linear(10, 5),
        nn.Tanh(),
    ],
    "nn.RNN": lambda: [nn.RNN(4, 5, 2, batch_first=True)],
}


def net(kind="one layer"):
    return seeded(lambda: nn.Sequential(*NETS[kind](), nn.Linear(5, 3)).double())


def filled(x: Padded, value: float) -> Padded:
    """The same sequences with something else after their ends."""
    data = x.data.clone()
    data[torch.arange(data.shape[1]) >= x.lengths[:, None]] = value
    return Padded(data, x.lengths)


def fitted(model, data, fit=tpsgd.fit, **settings):
    model = copy.deepcopy(model)
    fit(model, data, **(STEP | settings))
    return state(model)


# ---- padding never matters -----------------------------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("kind", NETS)
def test_what_lies_in_the_padding_never_matters(kind, order):
    for name in ("drtp", "tpsgd", "readout_learned") if kind == "one layer" else ("tpsgd_l1",):
        settings = {"rule": LOCAL[name](), "order": order, "epochs": 2, "batch_size": 7}
        settings["validation"] = (filled(RAGGED, -1e9), Y)
        wanted = fitted(net(kind), (filled(RAGGED, 0.0), Y), **settings)
        assert same(fitted(net(kind), (filled(RAGGED, 1e9), Y), **settings), wanted)
        assert not same(fitted(net(kind), (X, Y), **settings), wanted)


@pytest.mark.parametrize("kind", NETS)
def test_nor_for_backprop_and_evaluation(kind):
    model = net(kind)
    found = [fitted(model, (filled(RAGGED, v), Y), tpsgd.fit_backprop) for v in (0.0, 1e9)]
    close(*found)
    assert len({tpsgd.evaluate(model, (filled(RAGGED, v), Y)) for v in (0.0, 1e9)}) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_need_not_be_numbers(value):
    for fit in (tpsgd.fit, tpsgd.fit_backprop):
        wanted = fitted(net(), (filled(RAGGED, 0.0), Y), fit)
        assert same(fitted(net(), (filled(RAGGED, value), Y), fit), wanted)
    assert tpsgd.evaluate(net(), (filled(RAGGED, value), Y)) >= 0
    inside = filled(RAGGED, value)
    inside.data[3, 0] = value
    with pytest.raises(TpsgdError, match=r"NaN or infinity \(first in sample 3\)"):
        tpsgd.fit(net(), (inside, Y))


def test_nor_for_tokens():
    x, y = tokens()
    model = seeded(lambda: nn.Sequential(Recurrent(7, 5), nn.Linear(5, 3)).double())
    found = [fitted(model, (filled(ragged(x), v), y), rule=rules.drtp()) for v in (0, 6)]
    assert same(*found)


@pytest.mark.parametrize("kind", NETS)
def test_padding_beyond_the_longest_sequence(kind):
    longer = Padded(torch.cat([RAGGED.data, torch.full((12, 3, 4), 1e9)], 1), RAGGED.lengths)
    for order in (tpsgd.sequential, tpsgd.simultaneous):
        found = [fitted(net(kind), (x, Y), order=order) for x in (RAGGED, longer)]
        close(*found)


# ---- the whole is its sequences ------------------------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["one layer", "both ways"])
@pytest.mark.parametrize("name", LOCAL)
def test_a_step_is_the_mean_over_all_steps_of_all_sequences(name, kind):
    """Trained on each sequence alone, weighted by its length; rules whose loss is such a mean."""
    model, rule = net(kind), LOCAL[name]()
    before, total = state(model), {}
    for x, n, y in zip(SEQUENCES, LENGTHS, Y, strict=True):
        with pytest.warns(UserWarning, match="classes have no samples"):
            one = fitted(model, (x[None], y[None]), rule=rule)
        for k in before:
            total[k] = total.get(k, 0.0) + (one[k] - before[k]) * n / sum(LENGTHS)
    whole = fitted(model, (RAGGED, Y), rule=rule)
    cells = [k for k in before if "cells" in k]
    close({k: whole[k] for k in cells}, {k: before[k] + total[k] for k in cells})


@pytest.mark.parametrize("kind", NETS)
def test_equal_lengths_are_a_plain_tensor(kind):
    full = Padded(X, torch.full((12,), 5))
    for order in (tpsgd.sequential, tpsgd.simultaneous):
        settings = {"order": order, "epochs": 2, "batch_size": 5}
        close(fitted(net(kind), (full, Y), **settings), fitted(net(kind), (X, Y), **settings))


@pytest.mark.parametrize("kind", NETS)
def test_outputs_are_those_of_each_sequence_alone(kind):
    model = net(kind)
    joined = connect(model)
    alone = torch.cat([joined(x[None]) for x in SEQUENCES])
    torch.testing.assert_close(joined(RAGGED), alone)
    right = float((alone.argmax(1) == Y).double().mean())
    assert tpsgd.evaluate(model, (RAGGED, Y), batch_size=5) == pytest.approx(right)


@pytest.mark.parametrize("kind", NETS)
def test_kept_or_made_again_the_second_layer_learns_the_same(kind):
    kept, again = (
        fitted(net(kind), (RAGGED, Y), epochs=3, memory=tpsgd.Memory(reuse=r))
        for r in (True, False)
    )
    close(kept, again)


# ---- ways to give them ---------------------------------------------------------------------------

MASK = torch.arange(5) < RAGGED.lengths[:, None]
WAYS = {
    "packed": lambda: pack_sequence(SEQUENCES, enforce_sorted=False),
    "tensors": lambda: SEQUENCES,
    "arrays": lambda: [s.numpy() for s in SEQUENCES],
    "Padded.of": lambda: Padded.of(SEQUENCES),
    "Padded.of packed": lambda: Padded.of(pack_sequence(SEQUENCES, enforce_sorted=False)),
    "a mask": lambda: Padded.masked(X, MASK),
    "a mask of numbers": lambda: Padded.masked(X.numpy(), MASK.int().numpy()),
    "lengths in a list": lambda: Padded(X, LENGTHS),
    "lengths in an array": lambda: Padded(X, np.array(LENGTHS, dtype=np.int32)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_give_them_is_the_same(way):
    wanted = fitted(net(), (RAGGED, Y), batch_size=5, validation=(RAGGED, Y))
    assert same(fitted(net(), (WAYS[way](), Y), batch_size=5, validation=(WAYS[way](), Y)), wanted)
    assert tpsgd.evaluate(net(), (WAYS[way](), Y)) == tpsgd.evaluate(net(), (RAGGED, Y))


def test_packed_sequences_into_the_layer():
    one = net()[0]
    assert torch.equal(one(WAYS["packed"]()), one(RAGGED))


class Pairs(Dataset):
    """Sequences and labels, in order."""

    def __len__(self):
        return len(SEQUENCES)

    def __getitem__(self, i):
        return SEQUENCES[i], Y[i]


def packed(batch):
    xs, ys = zip(*batch, strict=True)
    return pack_sequence(xs, enforce_sorted=False), torch.stack(ys)


def loader(**options):
    return DataLoader(Pairs(), collate_fn=packed, **options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
@pytest.mark.parametrize("kind", NETS)
def test_a_loader_of_packed_sequences(kind, fit):
    settings = {} if fit is tpsgd.fit_backprop else {"order": tpsgd.simultaneous}
    found = fitted(net(kind), loader(batch_size=12), fit, **settings)
    close(found, fitted(net(kind), (RAGGED, Y), fit, **settings))
    assert tpsgd.evaluate(net(kind), loader(batch_size=5)) == tpsgd.evaluate(net(kind), (RAGGED, Y))


@pytest.mark.parametrize(
    ("kind", "reuse"),
    [
        ("one layer", None),
        ("one layer", False),
        ("two layers", None),
        ("two layers", False),
        ("two layers both ways", None),
        ("nn.RNN", False),
    ],
)
def test_a_loader_whose_batches_differ_in_length(kind, reuse):
    """Block by block: a batch of one sequence has as many steps as that."""
    before = state(net(kind))
    after = fitted(net(kind), loader(batch_size=1), memory=tpsgd.Memory(reuse=reuse))
    assert all(not torch.equal(before[k], after[k]) for k in before)


# ---- the class itself ----------------------------------------------------------------------------


def test_its_face():
    x = RAGGED[torch.tensor([3, 1])]
    assert len(x) == 2 and x.shape == (2, 5, 4) and x.dim() == 3 and x.dtype is torch.float64
    assert x.lengths.tolist() == [LENGTHS[3], LENGTHS[1]] and x.device.type == "cpu"
    assert x.is_floating_point() and x.nbytes == x.data.nbytes + 16
    assert repr(x) == "Padded((2, 5, 4), torch.float64)"
    assert x.to("cpu", torch.float32).dtype is torch.float32
    order = RAGGED.longest_first()
    assert RAGGED[order].lengths.tolist() == sorted(LENGTHS, reverse=True)
    graph = Padded(X.clone().requires_grad_(), LENGTHS)
    assert not graph.detach().data.requires_grad


WRONG = {
    "no steps": (lambda: Padded(X[:, 0, 0], LENGTHS), r"shapes \(12,\) and \(12,\)"),
    "fewer lengths": (lambda: Padded(X, LENGTHS[:-1]), r"\(12, 5, 4\) and \(11,\)"),
    "rows of lengths": (lambda: Padded(X, [LENGTHS]), r"and \(1, 12\)"),
    "half a step": (lambda: Padded(X, torch.ones(12) * 1.5), "whole numbers, got torch.float32"),
    "a mask for lengths": (lambda: Padded(X, torch.ones(12).bool()), "whole numbers, got torch.bo"),
    "another mask": (lambda: Padded.masked(X, MASK[:, :-1]), r"must be \(12, 5\), got \(12, 4\)"),
    "a mask with holes": (lambda: Padded.masked(X, MASK.flip(1)), "true up to a sequence's end"),
    "a mask of nothing": (lambda: Padded.masked(X, MASK & False), "from 1 to 5, got 0"),
    "no sequences": (lambda: Padded.of([]), "sequences must be arrays"),
    "numbers": (lambda: Padded.of([1.0, 2.0]), "sequences must be arrays"),
    "other features": (lambda: Padded.of([X[0], X[1, :, :3]]), "same features"),
    "a sequence of nothing": (lambda: Padded.of([X[0], X[1, :0]]), "from 1 to 5, got 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    make, match = WRONG[case]
    with pytest.raises(TpsgdError, match=match) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, -1, 6])
@pytest.mark.parametrize("use", ["fit", "fit_backprop", "evaluate"])
def test_a_length_out_of_range_is_refused_where_it_is_used(use, length):
    model, bad = net(), Padded(X, [*LENGTHS[:-1], length])
    before = state(model)
    with pytest.raises(TpsgdError, match=f"length must be from 1 to 5, got {length}"):
        getattr(tpsgd, use)(model, (bad, Y))
    assert same(state(model), before)


def test_no_sequences_at_all():
    with pytest.raises(TpsgdError, match="data is empty"):
        tpsgd.fit(net(), (RAGGED[:0], Y[:0]))
    with pytest.raises(TpsgdError, match="12 samples but y has 11"):
        tpsgd.fit(net(), (RAGGED, Y[:-1]))


def test_stacked_restarts_say_why_not():
    with pytest.raises(TpsgdError, match="cannot be stacked: sequences of different lengths"):
        tpsgd.fit_many(net, (RAGGED, Y), restarts=2, stacked=True)
    assert not tpsgd.fit_many(net, (RAGGED, Y), restarts=2, epochs=1).stacked


@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_dropout_between_layers(fit):
    for model in (
        nn.Sequential(nn.RNN(4, 5, 2, dropout=0.2, batch_first=True), nn.Linear(5, 3)),
        nn.Sequential(
            tpsgd.Recurrent(4, 5, sequence=True),
            nn.Dropout(0.2),
            tpsgd.Recurrent(5, 5),
            nn.Linear(5, 3),
        ),
    ):
        fit(model.double(), (RAGGED, Y), epochs=1)
        assert 0 <= tpsgd.evaluate(model, (RAGGED, Y)) <= 1


def test_a_layer_before_the_first_recurrent_one_must_be_frozen():
    model = nn.Sequential(nn.Linear(4, 6), tpsgd.Recurrent(6, 5), nn.Linear(5, 3)).double()
    with pytest.raises(TpsgdError, match=r"block 1 .*freeze it with requires_grad_"):
        tpsgd.fit(model, (RAGGED, Y), epochs=1)
    model[0].requires_grad_(False)
    tpsgd.fit(model, (RAGGED, Y), epochs=1)
    tpsgd.evaluate(model, (RAGGED, Y))


def test_held_out_sequences_may_be_longer_or_shorter():
    for held_out in (RAGGED[:5], X[:5, :2], sequences(steps=9)[0][:5]):
        for kind in ("one layer", "two layers"):
            run = tpsgd.fit(net(kind), (RAGGED, Y), validation=(held_out, Y[:5]), epochs=1)
            assert all(e.val_loss is not None for e in run.history)


class Ragged(torch.utils.data.Dataset):
    """A plain data set of sequences as they are."""

    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return RAGGED.data[i, : RAGGED.lengths[i]], Y[i]


@pytest.mark.parametrize("kind", ["one layer", "two layers"])
@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_a_data_set_of_different_lengths(kind, fit):
    model = net(kind)
    before = state(model)
    fit(model, Ragged(), epochs=1, batch_size=5)
    assert all(not torch.equal(before[k], v) for k, v in state(model).items())
    assert tpsgd.evaluate(model, Ragged()) == tpsgd.evaluate(model, (RAGGED, Y))


def test_a_model_can_be_called_with_a_list_or_an_array():
    model = net("one layer")
    parts = [RAGGED.data[i, :n] for i, n in enumerate(RAGGED.lengths)]
    with torch.no_grad():
        close({"": model(parts)}, {"": model(RAGGED)})
        close({"": model(X.numpy())}, {"": model(X)})


def test_readout_says_how_often_the_last_states_are_right():
    run = tpsgd.fit(net("one layer"), (RAGGED, Y), epochs=1)
    assert run.history[0].accuracy is not None and 0 <= run.history[0].accuracy <= 1


def test_the_last_recurrent_layer_must_give_its_last_state():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    model = nn.Sequential(tpsgd.Recurrent(4, 5, sequence=True), Mean(), nn.Linear(5, 3)).double()
    with pytest.raises(TpsgdError, match=r"let the last recurrent layer give its last state"):
        tpsgd.fit(model, (RAGGED, Y), epochs=1)
    tpsgd.fit(model, (X, Y), epochs=1)


def test_a_frozen_embedding_before_the_recurrent_layer():
    words = tpsgd.Padded(torch.arange(len(Y) * 6).reshape(-1, 6) % 9, torch.arange(len(Y)) % 6 + 1)
    embedding = nn.Embedding(9, 4).requires_grad_(False)
    model = nn.Sequential(embedding, tpsgd.Recurrent(4, 5), nn.Linear(5, 3)).double()
    tpsgd.fit(model, (words, Y), epochs=1)
    tpsgd.evaluate(model, (words, Y))
