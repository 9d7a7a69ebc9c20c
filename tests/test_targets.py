"""What labels are, and nets that learn numbers, or a label for every step or pixel."""

import pytest
import torch
from helpers import close, points, same, seeded, state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import TpsgdError, bce, cross_entropy, mse, rules
from tpsgd.losses import IGNORED
from tpsgd.maths.kernels.epoch_figures import moments_of, r_squared
from tpsgd.targets import Target, grid_of, reduced

pytestmark = pytest.mark.usefixtures("unwatched")

_ = IGNORED
NUMBERS = points(40)[0]
STEPS = torch.randn(24, 3, 6, generator=torch.Generator().manual_seed(0))  # channels first
OF_STEPS = (STEPS[:, 0] > 0).long()
SOME = OF_STEPS.clone()
SOME[:, ::2] = SOME[3] = IGNORED
SETTINGS = {"epochs": 4, "batch_size": 8}
BY_POSITION = [name for name, rule in rules.ALL.items() if not rule.make().compares]


def channels_first(outputs=2):
    return seeded(lambda: nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Conv1d(8, outputs, 1)))


def channels_last(outputs=2):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs)))
    weights = channels_first(outputs).state_dict()
    model.load_state_dict({k: w.squeeze(-1) for k, w in weights.items()})
    return model


# ---- what labels are -----------------------------------------------------------------------------

KINDS = {
    "class indices": (torch.tensor([0, 1]), None, False),
    "numbers": (torch.tensor([0.5, -3.0]), None, True),
    "numbers in rows": (torch.tensor([[0.5, 2.0], [1.0, 0.0]]), None, True),
    "probabilities": (torch.tensor([[0.5, 0.5], [1.0, 0.0]]), None, False),
    "probabilities for mse": (torch.tensor([[0.5, 0.5], [1.0, 0.0]]), mse, False),
    "yes and no": (torch.tensor([[1.0, 1.0], [1.0, 0.0]]), bce, False),
    "yes and no for mse": (torch.tensor([1.0, 0.0]), mse, True),
    "rows for cross-entropy": (torch.tensor([[2.0, 1.0]]), cross_entropy, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_numbers_or_classes(kind):
    y, loss, numbers = KINDS[kind]
    assert Target.of(y, loss).numbers is numbers


def test_only_labels_of_positions_can_be_missing():
    assert Target.of(SOME, None).ignores and not Target.of(OF_STEPS, None).ignores
    assert Target.of(OF_STEPS, None, all_of_them=False).ignores  # a later batch may lack some
    assert not Target.of(torch.tensor([0, 1]), None, all_of_them=False).ignores


OUTPUTS = {
    "one label a sample": ((), (2,), False, ()),
    "steps, channels last": ((6,), (6, 2), False, (6,)),
    "steps, channels first": ((6,), (2, 6), True, (6,)),
    "steps, channels first, as many outputs": ((6,), (6, 6), True, (6,)),
    "pixels": ((4, 5), (2, 4, 5), True, (4, 5)),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_the_output_tells_the_positions(case):
    shape, output, maps, positions = OUTPUTS[case]
    target = Target(shape=shape).at(output, maps)
    assert target.positions == positions
    assert target.channels_first is (maps and bool(positions))


def test_an_output_of_other_positions_is_refused():
    with pytest.raises(TpsgdError, match=r"y has shape \(samples, 7\).*shape \(samples, 6\)"):
        tpsgd.fit(channels_first(), (STEPS, torch.zeros(24, 7).long()), **SETTINGS)


def test_a_number_for_each_position_needs_one_output():
    with pytest.raises(TpsgdError, match=r"y has a number for each position.*have 1 output"):
        tpsgd.fit(channels_first(), (STEPS, STEPS[:, 0] + 3), **SETTINGS)


@pytest.mark.parametrize("first", [False, True])
def test_numbers_of_a_position_come_last(first):
    target = Target(True, (2, 6) if first else (6, 2), True, (6,), first)
    y = torch.randn(4, *target.shape)
    assert torch.equal(target.canonical(y), y.mT if first else y)
    assert target.canonical(torch.randn(4, 6)).shape == (4, 6, 1)


# ---- labels of a block with other positions ------------------------------------------------------


def test_classes_are_reduced_by_majority():
    y = torch.tensor([[0, 2, 2, 1, 1, 0], [_, 1, _, _, 2, _], [2, 1, 2, 0, _, 1]])
    target = Target(positions=(6,))
    assert reduced(y, (2,), target, 3).tolist() == [[2, 1], [1, 2], [2, 0]]
    assert reduced(y, (3,), target, 3).tolist() == [[0, 1, 0], [1, _, 2], [1, 0, 1]]
    assert reduced(y, (), target, 3).tolist() == [0, 1, 1]  # of equal counts the lower class


def test_classes_of_pixels_are_reduced_by_majority():
    y = torch.tensor([[[0, 0, 1, 1], [0, 2, 1, 2], [2, 2, _, _], [2, 2, _, _]]])
    assert reduced(y, (2, 2), Target(positions=(4, 4)), 3).tolist() == [[[0, 1], [2, _]]]


def test_a_block_with_more_positions_has_the_nearest_labels():
    y = torch.tensor([[0, 1, _]])
    assert reduced(y, (6,), Target(positions=(3,)), 2).tolist() == [[0, 0, 1, 1, _, _]]


def test_numbers_are_reduced_by_their_mean():
    y = torch.arange(6.0).view(1, 6, 1)
    target = Target(True, positions=(6,))
    assert reduced(y, (2,), target, 1).flatten().tolist() == [1.0, 4.0]
    assert reduced(y, (), target, 1).flatten().tolist() == [2.5]


TOKENS = {(4, 4): (2, 2), (8, 4): (4, 2), (6, 6): (3, 3)}  # labels of pixels, and a token's grid


@pytest.mark.parametrize("pixels", TOKENS)
def test_tokens_of_a_picture_lie_row_by_row(pixels):
    grid = TOKENS[pixels]
    assert grid_of((grid[0] * grid[1], 5), False, Target(positions=pixels), "block 1") == grid


def test_tokens_that_are_no_picture_are_refused():
    with pytest.raises(TpsgdError, match=r"block 1 gives 7 positions, and .* for 4 x 4"):
        grid_of((7, 5), False, Target(positions=(4, 4)), "block 1")


def test_a_block_without_positions_has_one_label():
    assert grid_of((5,), False, Target(positions=(6,)), "block 1") == ()


# ---- nets that learn them ------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["classes", "some classes", "numbers"])
@pytest.mark.parametrize("name", BY_POSITION)
def test_every_rule_learns_the_same_from_channels_first_and_last(name, labels):
    y = {"classes": OF_STEPS, "some classes": SOME, "numbers": 5 * STEPS[:, :2] + 3}[labels]
    settings = SETTINGS | {"rule": rules.ALL[name].make()}
    first, last = channels_first(), channels_last()
    one = tpsgd.fit(first, (STEPS, y), **settings)
    other = tpsgd.fit(last, (STEPS.mT, y.mT if labels == "numbers" else y), **settings)
    squeezed = {k: w.squeeze(-1) for k, w in state(first).items()}
    close(squeezed, state(last), rtol=1e-3, atol=1e-4)
    assert [e.loss for e in one.history] == pytest.approx([e.loss for e in other.history], rel=1e-3)


@pytest.mark.parametrize("name", BY_POSITION)
def test_every_position_is_a_sample_to_a_net_that_looks_at_one(name):
    settings = {"rule": rules.ALL[name].make(), "epochs": 3, "optimizer": torch.optim.SGD}
    by_step, by_sample = channels_last(), channels_last()
    tpsgd.fit(by_step, (STEPS.mT, OF_STEPS), batch_size=24, lr=0.1, **settings)
    rows = STEPS.mT.reshape(-1, 3), OF_STEPS.flatten()
    tpsgd.fit(by_sample, rows, batch_size=144, lr=0.1, **settings)
    close(state(by_step), state(by_sample), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BY_POSITION)
def test_inputs_of_steps_without_a_label_are_not_learned_from(name):
    settings = SETTINGS | {"rule": rules.ALL[name].make()}
    if name.startswith("readout"):  # a calibration would look at all outputs
        settings["rule"] = rules.readout(name == "readout-learned", scale=4.0)
    other = torch.where((SOME == IGNORED)[:, None], 9.0, STEPS)
    model, changed = channels_first(), channels_first()
    tpsgd.fit(model, (STEPS, SOME), **settings)
    tpsgd.fit(changed, (other, SOME), **settings)
    close(state(model), state(changed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("y", [OF_STEPS, SOME], ids=["all steps", "some steps"])
@pytest.mark.parametrize("name", BY_POSITION)
def test_a_quick_step_learns_the_same(name, y, monkeypatch):
    settings = {"rule": rules.ALL[name].make(), "epochs": 12, "batch_size": 8}
    quick, plain = channels_first(), channels_first()
    tpsgd.fit(quick, (STEPS, y), **settings)
    monkeypatch.setenv("TPSGD_FAST", "0")
    tpsgd.fit(plain, (STEPS, y), **settings)
    assert same(state(quick), state(plain))


@pytest.mark.parametrize("y", [OF_STEPS, SOME, STEPS[:, 1:] - 2], ids=["all", "some", "numbers"])
def test_stacked_restarts_learn_the_same_as_one(y):
    settings = SETTINGS | {"rule": rules.readout(), "stacked": True}
    data = STEPS.mT, y.mT if y.dim() == 3 else y
    several = tpsgd.fit_many(channels_last, data, restarts=2, **settings)
    alone = tpsgd.fit(channels_last(), data, rule=rules.readout(), **SETTINGS)
    first = several.runs[0]
    close(state(first.model), state(alone.model), rtol=1e-3, atol=1e-4)
    assert [e.loss for e in first.history] == pytest.approx([e.loss for e in alone.history], 1e-3)


def test_a_loader_and_arrays_learn_the_same():
    settings = {"epochs": 2, "batch_size": 24, "optimizer": torch.optim.SGD}
    arrays, loader = channels_first(), channels_first()
    tpsgd.fit(arrays, (STEPS, SOME), **settings)
    tpsgd.fit(loader, DataLoader(TensorDataset(STEPS, SOME), 24), **settings)
    close(state(arrays), state(loader), rtol=1e-4, atol=1e-6)


def test_the_record_counts_labelled_positions():
    model = channels_first()
    run = tpsgd.fit(model, (STEPS, SOME), lr=1e-9, validation=(STEPS, SOME), **SETTINGS)
    last = run.history[-1]
    assert last.accuracy == last.val_accuracy == tpsgd.evaluate(model, (STEPS, SOME))
    expected = float(nn.functional.cross_entropy(model(STEPS), SOME).detach())
    assert last.loss == pytest.approx(expected, rel=1e-4)
    assert last.val_loss == pytest.approx(expected, rel=1e-4)


def test_labels_that_are_all_missing_are_refused():
    with pytest.raises(TpsgdError, match="no position has a label"):
        tpsgd.fit(channels_first(), (STEPS, torch.full_like(SOME, IGNORED)), **SETTINGS)


def test_batches_may_have_no_label():
    """Those of a loader, and those that `evaluate` makes."""
    labels = SOME.clone()
    labels[8:16] = IGNORED
    model, data = channels_first(), DataLoader(TensorDataset(STEPS, labels), 8)
    run = tpsgd.fit(model, data, epochs=2)
    assert 0 < run.loss < 5
    scores = {tpsgd.evaluate(model, (STEPS, labels), batch_size=n) for n in (4, 24)}
    assert scores == {tpsgd.evaluate(model, data)}
    losses = [tpsgd.evaluate(model, (STEPS, labels), batch_size=n, loss="mse") for n in (4, 24)]
    assert losses[0] == pytest.approx(losses[1])
    with pytest.raises(TpsgdError, match="no position has a label"):
        tpsgd.evaluate(model, (STEPS, torch.full_like(labels, IGNORED)))


def test_numbers_of_pixels_lie_as_the_model_gives_them():
    model = nn.Sequential(nn.Conv2d(3, 2, 1))
    x, y = torch.randn(4, 3, 5, 6), torch.randn(4, 5, 6, 2)
    with pytest.raises(TpsgdError, match=r"label for each position, shape \(samples, 2, 5, 6\)"):
        tpsgd.fit(model, (x, y), epochs=1)
    tpsgd.fit(model, (x, y.movedim(-1, 1)), epochs=1)


def test_the_rule_that_compares_refuses_labels_of_steps():
    with pytest.raises(TpsgdError, match=r"predsim compares samples of a class.*every position"):
        tpsgd.fit(channels_first(), (STEPS, OF_STEPS), rule=rules.predsim(), **SETTINGS)


@pytest.mark.parametrize("form", ["arrays", "a loader"])
@pytest.mark.parametrize("rule", ["readout", "tpsgd-l2", "dfa", "frozen"])
def test_micro_batches_count_by_their_labels(rule, form):
    """Positions without a label lie unevenly, down to a micro-batch without any label."""
    labels = SOME.clone()
    labels[8:10] = IGNORED
    data = STEPS.double(), labels
    data = DataLoader(TensorDataset(*data), batch_size=8) if form == "a loader" else data
    trained = []
    for memory in (None, tpsgd.Memory(micro_batch=2)):
        model = channels_first().double()
        settings = {"rule": rule, "optimizer": tpsgd.sgd, "lr": 0.1, "memory": memory}
        tpsgd.fit(model, data, **(SETTINGS | settings))
        trained.append(state(model))
    close(*trained, rtol=1e-9, atol=1e-11)


class Squeezed(nn.Module):
    """A number for each step, without a dimension of 1."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.gru(x)[0]).squeeze(-1)


def test_numbers_of_steps_are_standardised_in_a_squeezed_output():
    x = torch.randn(64, 6, 4)
    y = 100 + x.sum(-1)
    model = seeded(Squeezed)
    run = tpsgd.fit(model, (x, y), lr=0.01, epochs=20)
    assert run.settings["targets"] == "standardised" and tpsgd.evaluate(model, (x, y)) > 0.8


def test_a_squeezed_picture_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 1))

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net(x).squeeze(1)

    with pytest.raises(TpsgdError, match="end the model without a squeeze"):
        tpsgd.fit(Flat(), (torch.randn(8, 1, 6, 6), torch.rand(8, 6, 6) * 5), epochs=1)


class Turned(nn.Module):
    """As many classes as steps, with the classes first."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self, x):
        return self.head(self.gru(x)[0]).mT


@pytest.mark.filterwarnings("default")
def test_a_square_output_is_said_to_be_ambiguous():
    data = torch.randn(16, 6, 4), torch.arange(96).view(16, 6) % 6
    with pytest.warns(UserWarning, match=r"\(batch, 6, 6\) are taken as \(steps, classes\)"):
        tpsgd.fit(Turned(), data, epochs=1)


@pytest.mark.filterwarnings("default")
def test_one_block_is_said_to_be_backprop():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layer = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.layer(self.words(x).relu()).relu()
            return nn.functional.linear(x, self.words.weight)

    data = torch.randn(16, 4), torch.arange(16) % 8
    with pytest.warns(UserWarning, match="Tied is one block, so that it learns by backprop"):
        tpsgd.fit(Tied(), data, epochs=1)


@pytest.mark.filterwarnings("default")
def test_numbers_far_from_zero_that_hardly_differ_are_warned_of():
    x = torch.randn(32, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="which float32 can hardly show"):
        tpsgd.fit(nn.Sequential(nn.Linear(4, 1)), (x.float(), 1e9 + x[:, 0]), epochs=1)


def test_a_column_of_shares_is_numbers():
    x = torch.rand(32, 4)
    run = tpsgd.fit(nn.Sequential(nn.Linear(4, 1)), (x, x[:, :1] * 0.9), epochs=1)
    assert run.settings["loss"] == "mse" and run.history[-1].r2 is not None


def test_numbers_of_0_and_1_have_an_r2():
    x = torch.rand(64, 4)
    y, model = (x[:, 0] > 0.5).float(), nn.Sequential(nn.Linear(4, 1))
    run = tpsgd.fit(model, (x, y), loss="mse", epochs=40, lr=0.02)
    assert tpsgd.evaluate(model, (x, y), loss="r2") == pytest.approx(run.history[-1].r2, abs=0.05)


def test_what_a_picture_has_where_no_class_is():
    y = torch.full((8, 6, 6), 255)
    with pytest.raises(TpsgdError, match="have -100 in place of 255"):
        tpsgd.fit(nn.Sequential(nn.Conv2d(1, 2, 1)), (torch.randn(8, 1, 6, 6), y), epochs=1)


# ---- figures -------------------------------------------------------------------------------------


def test_r_squared_by_hand():
    y = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [6.0, 5.0]])
    outputs = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [4.0, 5.0]])
    assert float(r_squared(moments_of(outputs, y))) == pytest.approx((1 - 4 / 14 + 1) / 2)


@pytest.mark.parametrize("batch_size", [1, 3, 1024])
@pytest.mark.parametrize("form", ["arrays", "a loader"])
def test_evaluate_gives_r_squared_whatever_the_batch(form, batch_size):
    """A batch whose numbers are all 0 or 1 is no sign of classes."""
    y = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 4.0, 1.0])
    x = y[:, None] + torch.tensor([[1.0, -1.0, 0.0, 2.0, 0.0, -1.0, 0.0]]).T
    data = (x, y) if form == "arrays" else DataLoader(TensorDataset(x, y), batch_size)
    expected = 1 - 7 / float((y - y.mean()).square().sum())
    r2 = tpsgd.evaluate(nn.Identity(), data, batch_size=batch_size)
    assert r2 == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_evaluate_gives_the_loss_that_is_asked_for(loss):
    x, y = torch.tensor([[0.5], [2.0], [1.0], [1.5]]), torch.tensor([0.0, 4.0, 1.0, 3.0])
    squares, sizes = (x[:, 0] - y).square(), (x[:, 0] - y).abs()
    by_hand = {
        "mse": squares.mean() / 2,
        "l1": sizes.mean(),
        "huber": torch.where(sizes < 1, squares / 2, sizes - 0.5).mean(),
    }[loss]
    assert tpsgd.evaluate(nn.Identity(), (x, y), loss=loss) == pytest.approx(float(by_hand))


def test_evaluate_leaves_steps_without_a_label_out():
    logits = torch.tensor([[[2.0, 0.0, 2.0], [0.0, 2.0, 0.0]]])  # classes 0, 1, 0
    model = nn.Conv1d(2, 2, 1, bias=False)
    model.weight.data = torch.eye(2)[..., None]
    assert tpsgd.evaluate(model, (logits, torch.tensor([[0, 0, _]]))) == 0.5
    assert tpsgd.evaluate(model, (logits, torch.tensor([[0, 1, _]]))) == 1.0


def test_a_run_on_numbers_prints_r_squared_and_no_accuracy():
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    run = tpsgd.fit(model, (NUMBERS, 3 * NUMBERS[:, 0]), epochs=30)
    table = str(run)
    assert "R²" in table and "accuracy" not in table and "%" not in table
    assert all(e.accuracy is None and e.val_accuracy is None for e in run.history)
    assert run.history[-1].r2 == pytest.approx(
        tpsgd.evaluate(model, (NUMBERS, 3 * NUMBERS[:, 0])), abs=0.05
    )


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_every_loss_of_numbers_learns_them(loss):
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    data = NUMBERS, 50 * NUMBERS[:, 0] + 7
    tpsgd.fit(model, data, loss=loss, epochs=60, batch_size=8, lr=0.01)
    assert tpsgd.evaluate(model, data) > 0.9


def test_a_stream_learns_numbers_whatever_a_batch_looks_like():
    stream = tpsgd.Stream(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), loss="mse")
    for label in (2.5, 1.0, 0.0, -3.0):
        stream.partial_fit(NUMBERS[:1], torch.tensor([label]))
    assert stream.samples == 4
