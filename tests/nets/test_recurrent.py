"""`Recurrent` as a module, and torch's `nn.RNN` seen as one."""

import copy
import io
from itertools import product

import pytest
import torch
from helpers import LOCAL, Wall, close, ragged, same, seeded, sequences, state, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import tpsgd
from tpsgd import Padded, Recurrent, TpsgdError, rules, split
from tpsgd.nets import inits
from tpsgd.nets.recurrent import connect

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = sequences()


def layer(inputs=4, hidden=5, **options):
    return seeded(lambda: Recurrent(inputs, hidden, **options).double())


def by_hand(one: nn.Module, cell, sample, leak, sigma, backwards=False):
    """All states of one sample, a step at a time, in the order in which they are made."""
    h = torch.zeros(len(cell.weight_h), dtype=torch.float64)
    states = []
    for x in sample.flip(0) if backwards else sample:
        z = cell.weight_x @ x + cell.bias_x + cell.weight_h @ h + cell.bias_h
        h = (1 - leak) * h + leak * sigma(z)
        states.append(h)
    return torch.stack(states)


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(
    ("leak", "sigma"),
    [(0.3, nn.Tanh), (1.0, nn.Sigmoid), (0.7, nn.ReLU), (1.0, nn.GELU), (0.5, nn.Softplus)],
)
def test_states_are_the_cells_equation(leak, sigma, both_ways):
    options = {"leak": leak, "activation": sigma, "bidirectional": both_ways}
    whole, last = (layer(sequence=s, **options) for s in (True, False))
    for p, q in zip(whole.parameters(), last.parameters(), strict=True):
        q.data.copy_(nn.init.normal_(p.data))
    for i, sample in enumerate(X[:3]):
        ways = [
            by_hand(whole, cell, sample, leak, sigma(), bool(way))
            for way, cell in enumerate(whole.cells)
        ]
        ends = torch.cat([states[-1] for states in ways])
        torch.testing.assert_close(last(X)[i], ends)
        in_time = [states.flip(0) if way else states for way, states in enumerate(ways)]
        torch.testing.assert_close(whole(X)[i], torch.cat(in_time, -1))


def test_the_papers_cell():
    paper = Recurrent.paper(4, 6)
    assert paper.leak == 1.0 and isinstance(paper.activation, nn.Sigmoid)
    assert all(
        0 < p.abs().max() <= 0.01 for p in (paper.cells[0].weight_x, paper.cells[0].weight_h)
    )
    assert Recurrent.paper(4, 6, bidirectional=True, sequence=True)(X.float()).shape == (12, 5, 12)
    wider = Recurrent.paper(4, 6, init=inits.uniform(3.0))
    assert wider.cells[0].weight_x.abs().max() > 1


def test_the_default_cell_leaks_and_remembers():
    default = layer(hidden=60)
    assert 0 < default.leak < 1 and isinstance(default.activation, nn.Tanh)
    eigenvalues = torch.linalg.eigvals(default.cells[0].weight_h.detach())
    assert 0.5 < eigenvalues.abs().max() < 1.2
    assert not default.bidirectional and not default.sequence


@pytest.mark.parametrize("both_ways", [False, True])
def test_tokens_are_one_hot_vectors_that_are_never_built(both_ways):
    x, _ = tokens()
    one = layer(7, bidirectional=both_ways, sequence=True)
    torch.testing.assert_close(one(x), one(F.one_hot(x, 7).double()))
    for kind in (torch.int32, torch.uint8, torch.int16):
        assert torch.equal(one(x.to(kind)), one(x))


def test_one_feature_may_come_without_its_dimension():
    one = layer(1)
    assert torch.equal(one(X[..., 0]), one(X[..., :1]))
    whole = (10 * X[..., 0]).long()
    assert torch.equal(one(whole), one(whole.double()))


def test_whole_numbers_of_several_features_are_numbers():
    one = layer()
    assert torch.equal(one((10 * X).long()), one((10 * X).long().double()))


@pytest.mark.parametrize("chunks", [[5], [1, 4], [2, 2, 1], [1] * 5])
@pytest.mark.parametrize("kind", ["floats", "tokens"])
def test_a_long_sequence_in_chunks_by_hand(kind, chunks):
    x = X if kind == "floats" else tokens()[0]
    one, state = layer(x.shape[-1] if kind == "floats" else 7), None
    for part in x.split(chunks, 1):
        state = one(part, state=state)
    torch.testing.assert_close(state, one(x))


def test_chunks_by_hand_with_all_states():
    one = layer(sequence=True)
    first = one(X[:, :2])
    rest = one(X[:, 2:], state=first[:, -1])
    torch.testing.assert_close(torch.cat([first, rest], 1), one(X))


def test_going_on_from_a_state_is_not_for_both_ways():
    with pytest.raises(TpsgdError, match="both ends"):
        layer(bidirectional=True)(X, state=torch.zeros(12, 5))


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_through_time_are_autograds(sequence):
    one = layer(sequence=sequence, bidirectional=True)

    def output(x):
        return one(x)

    assert torch.autograd.gradcheck(output, (X[:2, :3].requires_grad_(),))
    one(X).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in one.parameters())


# ---- an ordinary module --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "sequence": True}])
def test_state_dict_copy_save_and_number_formats(options):
    one = layer(**options)
    wanted = one(X)
    other = Recurrent(4, 5, **options).double()
    assert not torch.equal(other(X), wanted)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(X), wanted)
    assert torch.equal(copy.deepcopy(one)(X), wanted)
    buffer = io.BytesIO()
    torch.save(one, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(X), wanted)
    assert copy.deepcopy(one).float()(X.float()).dtype is torch.float32
    names = [f"cells.{w}.{k}" for w in range(1 + one.bidirectional) for k in NAMES]
    assert sorted(one.state_dict()) == sorted(names)


NAMES = ("weight_x", "weight_h", "bias_x", "bias_h")


def test_repr():
    assert "Recurrent(\n  4, 5, leak=0.5\n" in repr(layer(leak=0.5))
    shown = repr(layer(leak=1, bidirectional=True, sequence=True, activation=nn.GELU))
    assert "4, 5, leak=1, bidirectional, sequence=True" in shown and "GELU" in shown


def test_sizes():
    one = layer(3, 8, bidirectional=True)
    assert (one.inputs, one.hidden, one.bidirectional) == (3, 8, True)
    assert sum(p.numel() for p in one.parameters()) == 2 * (8 * 3 + 8 * 8 + 8 + 8)


@pytest.mark.parametrize("leak", [0.0, -0.1, 1.01, float("nan")])
def test_a_leak_out_of_range(leak):
    with pytest.raises(TpsgdError, match=r"leak must be over 0 and at most 1, got"):
        Recurrent(2, 3, leak=leak)


@pytest.mark.parametrize("sigma", [nn.PReLU, nn.Softmax, nn.Tanh(), torch.tanh, "tanh", int])
def test_an_activation_that_is_not_known(sigma):
    with pytest.raises(TpsgdError, match=r"^activation must be a module class.* nn\.Tanh, .*got "):
        Recurrent(2, 3, activation=sigma)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 2)])
def test_no_inputs_or_no_units(sizes):
    with pytest.raises(TpsgdError, match="needs inputs and units"):
        Recurrent(*sizes)


@pytest.mark.parametrize(
    "x",
    [X[..., :3], X[0], X[None], X[:, :0], tokens()[0][:, :0], X[:, 0], torch.ones(3)],
    ids=lambda x: str(tuple(x.shape)),
)
def test_inputs_that_do_not_fit(x):
    with pytest.raises(
        TpsgdError, match=r"^Recurrent\(4, 5\) takes \(batch, steps, 4\) or whole"
    ) as e:
        layer()(x)
    assert str(tuple(x.shape)) in str(e.value)


# ---- torch's nn.RNN ------------------------------------------------------------------------------

RNNS = {
    f"{kind} {layers} {'both' if both else 'one'} {'bias' if bias else 'plain'}": {
        "nonlinearity": kind, "num_layers": layers, "bidirectional": bool(both), "bias": bool(bias),
    }
    for kind, layers, both, bias in product(("tanh", "relu"), (1, 2, 3), (0, 1), (1, 0))
}  # fmt: skip


def torchs(inputs=4, **options):
    return seeded(lambda: nn.RNN(inputs, 5, batch_first=True, **options).double())


def with_head(rnn):
    units = 5 * (1 + rnn.bidirectional)
    return seeded(lambda: nn.Sequential(rnn, nn.Linear(units, 3)).double(), 1)


@pytest.mark.parametrize("case", RNNS)
def test_nn_rnn_inside_a_model_is_the_same_net(case):
    """connect() = torch's own output = our views of its layers = the learners' forward."""
    model = with_head(torchs(**RNNS[case]))
    rnn, head = model
    last = rnn(X)[1][-1 - rnn.bidirectional :]
    wanted = head(torch.cat(tuple(last), -1))
    torch.testing.assert_close(connect(model)(X), wanted)
    out = X
    for block in split(model):
        out = block(out)
    torch.testing.assert_close(out, wanted)
    kept = []
    tpsgd.fit(model, (X, Y), order=kept.append, batch_size=100)
    out = next(kept[0].source.batches()).load()[0]
    with torch.no_grad():
        for learner in kept[0].learners:
            out = learner.output(learner.forward(out))
    torch.testing.assert_close(out, wanted.detach())


@pytest.mark.cover(1)
@pytest.mark.parametrize("case", [k for k in RNNS if k.startswith("tanh")])
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_training_changes_torchs_own_parameters(case, order):
    model = with_head(torchs(**RNNS[case]))
    rnn, before, names = model[0], state(model), list(model.state_dict())
    held = {name: p for name, p in model.named_parameters()}
    run = tpsgd.fit(model, (X, Y), order=order, epochs=1)
    assert model[0] is rnn and list(model.state_dict()) == names
    assert all(p is held[name] for name, p in model.named_parameters())
    assert all(not torch.equal(before[k], v) for k, v in state(model).items())
    assert len(run.blocks) == rnn.num_layers + 1
    assert 0 <= tpsgd.evaluate(model, (X, Y)) <= 1


@pytest.mark.parametrize("name", LOCAL)
def test_nn_rnn_learns_as_recurrent_does(name):
    rnn = torchs(num_layers=2)
    ours = nn.Sequential(layer(leak=1.0, sequence=True), layer(5, leak=1.0), nn.Linear(5, 3))
    theirs = with_head(rnn)
    for i in range(2):
        for kind, own in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), NAMES, strict=True):
            getattr(ours[i].cells[0], own).data.copy_(getattr(rnn, f"{kind}_l{i}"))
    ours[2].load_state_dict(theirs[1].state_dict())
    for model in (ours.double(), theirs):
        tpsgd.fit(model, (X, Y), rule=LOCAL[name](), epochs=2, batch_size=5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_dropout_between_torchs_layers_works_while_they_learn_only():
    model = with_head(torchs(num_layers=3, dropout=0.5))
    blocks = split(model)
    assert [[type(m) for m in b.prologue] for b in blocks] == [[], [nn.Dropout], [nn.Dropout], []]
    wanted = torchs(num_layers=3)(X)[1][-1]
    out = X
    for block in blocks[:-1]:
        block.train(False)
        out = block(out)
    torch.testing.assert_close(out, wanted)
    plain = with_head(torchs(num_layers=3))
    for m in (model, plain):
        tpsgd.fit(m, (X, Y), epochs=1)
    first = [f"0.{k}_l0" for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    assert all(torch.equal(state(model)[k], state(plain)[k]) for k in first)
    assert not torch.equal(state(model)["0.weight_ih_l1"], state(plain)["0.weight_ih_l1"])
    assert model[0].dropout == 0.5 and model.training


def test_layers_in_a_row_hand_on_sequences():
    model = nn.Sequential(torchs(), nn.Sequential(nn.Identity(), torchs(5)), layer(5)).double()
    wanted = model[2](model[1][1](model[0](X)[0])[0])
    torch.testing.assert_close(connect(model)(X), wanted)


def test_a_layer_norm_between_two_of_them_works_on_every_step():
    norm = nn.LayerNorm(5).double()
    model = nn.Sequential(torchs(), norm, torchs(5), nn.Linear(5, 3)).double()
    wanted = model[3](model[2](norm(model[0](X)[0]))[1][-1])
    torch.testing.assert_close(connect(model)(X), wanted)
    tpsgd.fit(model, (X, Y), epochs=1)


def test_connect_shares_parameters_and_leaves_other_models_alone():
    model = with_head(torchs())
    joined = connect(model)
    assert {id(p) for p in joined.parameters()} == {id(p) for p in model.parameters()}
    assert not connect(model.eval()).training
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    assert connect(plain) is plain
    assert connect(model[0]) is model[0]


def test_tokens_and_ragged_sequences_into_torchs_rnn():
    x = ragged(tokens()[0])
    model = with_head(torchs(7, bidirectional=True))
    rnn, head = model
    hot = pack_padded_sequence(
        F.one_hot(x.data, 7).double(), x.lengths, batch_first=True, enforce_sorted=False
    )
    wanted = head(torch.cat(tuple(rnn(hot)[1]), -1))
    torch.testing.assert_close(connect(model)(x), wanted)
    before = state(model)
    tpsgd.fit(model, (x, Y), epochs=1)
    assert not same(state(model), before)


def test_ragged_sequences_through_two_of_torchs_rnns():
    x = ragged(X)
    model = nn.Sequential(torchs(), torchs(5), nn.Linear(5, 3)).double()
    wanted = [connect(model)(X[i : i + 1, :n])[0] for i, n in enumerate(x.lengths)]
    torch.testing.assert_close(connect(model)(x), torch.stack(wanted))


@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_samples_must_come_first(fit):
    model = nn.Sequential(nn.RNN(4, 5), nn.Linear(5, 3)).double()
    before = state(model)
    with pytest.raises(TpsgdError, match=r"samples come first.*batch_first=True\)") as caught:
        fit(model, (X, Y))
    assert "\n" not in str(caught.value) and same(state(model), before)


# ---- backprop through time -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "torch's", "ragged", "tokens"])
def test_backprop_through_time_is_autograds_step(kind):
    x, inputs = (tokens()[0], 7) if kind == "tokens" else (X, 4)
    model = nn.Sequential(
        torchs() if kind == "torch's" else layer(inputs), nn.Linear(5, 3)
    ).double()
    data, twin = ragged(x) if kind == "ragged" else x, copy.deepcopy(model)
    run = tpsgd.fit_backprop(
        model, (data, Y), optimizer=torch.optim.SGD, lr=0.5, epochs=1, batch_size=100
    )
    F.cross_entropy(connect(twin)(data), Y).backward()
    close(state(model), {k: (p - 0.5 * p.grad).detach() for k, p in twin.named_parameters()})
    assert run.sample_passes == 2 * len(Y)


def test_backprop_crosses_layers_and_time():
    model = nn.Sequential(layer(sequence=True), Wall(), layer(5), nn.Linear(5, 3)).double()
    with pytest.raises(AssertionError, match="crossed"):
        tpsgd.fit_backprop(model, (X, Y), epochs=1)
    tpsgd.fit(model, (X, Y), epochs=1)


def test_a_recurrent_layer_after_and_before_other_layers():
    """A linear layer on every step below; all states, flattened, above."""
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), layer(6, sequence=True), nn.Flatten(), nn.Linear(25, 8),
        nn.ReLU(), nn.Linear(8, 3),
    ).double()  # fmt: skip
    before = state(model)
    for order in (tpsgd.sequential, tpsgd.simultaneous):
        run = tpsgd.fit(model, (X, Y), order=order, epochs=1)
        last = "solved" if order is tpsgd.sequential else "closed form"
        assert [b.learning for b in run.blocks] == [*["closed form"] * 3, last]
    assert all(not torch.equal(before[k], v) for k, v in state(model).items())


def test_an_embedding_below():
    model = nn.Sequential(nn.Embedding(7, 4), layer(), nn.Linear(5, 3)).double()
    before = state(model)
    tpsgd.fit(model, tokens(), rule=rules.readout(), epochs=1)
    assert all(not torch.equal(before[k], v) for k, v in state(model).items())


def test_padded_states_keep_their_lengths():
    x = ragged(X)
    states = layer(sequence=True)(x)
    assert isinstance(states, Padded) and torch.equal(states.lengths, x.lengths)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_are_read_by_torchs_gated_layers(kind):
    model = nn.Sequential(kind(3, 5, batch_first=True), nn.Linear(5, 2))
    sequences = [torch.randn(n, 3) for n in (4, 2, 3)]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    alone = torch.cat([connect(model)(s.unsqueeze(0)) for s in sequences])
    torch.testing.assert_close(connect(model)(packed), alone)
