"""`evaluate`: the share of samples that a model gets right."""

import pytest
import torch
from helpers import mlp, points, same, state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import TpsgdError

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 5.0], [0.0, 1.0, 0.5]])


class Echo(nn.Module):
    """Its output is its input."""

    def forward(self, x):
        return x


def test_accuracy_by_hand():
    assert tpsgd.evaluate(Echo(), (LOGITS, torch.tensor([0, 1, 2, 0]))) == 0.75
    assert tpsgd.evaluate(Echo(), (LOGITS, torch.tensor([1, 2, 0, 0]))) == 0.0


def test_an_accuracy_is_a_python_float():
    assert type(tpsgd.evaluate(Echo(), (LOGITS, torch.tensor([0, 1, 2, 1])))) is float


def test_soft_labels_count_by_their_largest_entry():
    soft = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2], [0.3, 0.4, 0.3]])
    assert tpsgd.evaluate(Echo(), (LOGITS, soft)) == 0.75


def test_several_labels_must_all_be_right():
    rows = torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 1, 1], [0, 1, 1]])
    assert tpsgd.evaluate(Echo(), (LOGITS - 0.25, rows)) == 0.75


@pytest.mark.parametrize("batch_size", [1, 2, 3, 1024])
def test_rows_are_read_the_same_way_whatever_the_batch(batch_size):
    """A batch whose every row has one label is no sign of soft labels if other rows have two."""
    rows = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]])
    found = tpsgd.evaluate(Echo(), (LOGITS - 0.25, rows), batch_size=batch_size)
    assert found == 0.25  # only the last row is right in every entry


@pytest.mark.parametrize(
    "y", [torch.tensor([1, 0, 1, 1]), torch.tensor([[1.0], [0.0], [1.0], [1.0]])]
)
def test_one_output_is_cut_at_zero(y):
    out = torch.tensor([[0.3], [-2.0], [-0.1], [4.0]])
    assert tpsgd.evaluate(Echo(), (out, y)) == 0.75


@pytest.mark.parametrize("y", [torch.tensor([1, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, 1.0])])
def test_one_output_after_a_sigmoid_is_cut_at_a_half(y):
    out = torch.tensor([[0.3], [-2.0], [-0.1], [4.0]])
    for model in (
        nn.Sequential(Echo(), nn.Sigmoid()),
        nn.Sequential(Echo(), nn.Sequential(Echo(), nn.Sigmoid())),
    ):
        assert tpsgd.evaluate(model, (out, y)) == 0.75


def test_a_sigmoid_that_also_stands_elsewhere_is_still_the_last():
    act = nn.Sigmoid()
    model = nn.Sequential(act, nn.Linear(1, 1), act)
    nn.init.constant_(model[1].weight, 8.0)
    nn.init.constant_(model[1].bias, -4.0)
    x = torch.tensor([[3.0], [-3.0], [-1.0]])
    assert tpsgd.evaluate(model, (x, torch.tensor([1, 0, 0]))) == 1.0


def test_several_labels_after_a_sigmoid():
    rows = torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 1, 1], [0, 1, 1]])
    model = nn.Sequential(Echo(), nn.Sigmoid())
    assert tpsgd.evaluate(model, (LOGITS - 0.25, rows)) == 0.75


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
def test_every_form_of_data_gives_the_same(batch_size):
    x, y = points()
    model = mlp(6, 8, 3)
    wanted = (model(x).argmax(1) == y).double().mean().item()
    dataset = TensorDataset(x, y)
    for data in (
        (x, y),
        (x.numpy(), y.numpy()),
        (x.double(), y[:, None]),
        dataset,
        DataLoader(dataset, 5, shuffle=True),
        DataLoader(dataset, 5, drop_last=False),
    ):
        assert tpsgd.evaluate(model, data, batch_size=batch_size) == pytest.approx(wanted)


def test_evaluate_works_in_evaluation_mode_and_leaves_the_model_as_it_was():
    x, y = points()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 3))
    model[2].eval()
    before, rng = state(model), torch.get_rng_state()
    first = tpsgd.evaluate(model, (x, y))
    assert first == tpsgd.evaluate(model, (x, y), batch_size=1)
    assert same(state(model), before) and torch.equal(torch.get_rng_state(), rng)
    assert [m.training for m in model] == [True, True, False, True] and model.training


def test_evaluate_builds_no_graph():
    probes = []

    class Look(nn.Module):
        def forward(self, x):
            probes.append(x.requires_grad)
            return x

    tpsgd.evaluate(nn.Sequential(nn.Linear(6, 3), Look()), points())
    assert probes == [False]


def test_models_in_other_number_formats():
    x, y = points()
    for dtype in (torch.float64, torch.bfloat16):
        assert 0 <= tpsgd.evaluate(mlp(6, 8, 3).to(dtype), (x, y)) <= 1


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_of_nothing(batch_size):
    with pytest.raises(TpsgdError, match="batch_size must be 1 or more"):
        tpsgd.evaluate(mlp(6, 3), points(), batch_size=batch_size)


def test_an_output_with_space():
    with pytest.raises(TpsgdError, match=r"one number per class.*gives \(batch, 2, 3\)"):
        tpsgd.evaluate(nn.Unflatten(1, (2, 3)), points())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    model = mlp(6, 5, 3)
    model[2].weight.data[1, 1] = value
    model[2].weight.data[0, 1] = -value  # inf - inf
    with pytest.raises(TpsgdError, match=r"output is NaN, because 2\.weight has.*train it again"):
        tpsgd.evaluate(nn.Sequential(*model, nn.Softmax(1)), points())
    assert all(m.training for m in model.modules())


def test_an_output_of_nan_in_one_batch_is_enough():
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()

    x = torch.cat([torch.ones(4, 3), -torch.ones(1, 3), torch.ones(4, 3)])
    with pytest.raises(TpsgdError, match="output is NaN, though its weights are finite"):
        tpsgd.evaluate(Root(), (x, torch.zeros(9, dtype=torch.long)), batch_size=2)


def test_whole_numbers_of_one_output_are_yes_and_no():
    model, x = nn.Linear(2, 1), torch.randn(9, 2)
    with pytest.raises(TpsgdError, match=r"between 0 and 1, and go from 3 to 11: .*y\.float\(\)"):
        tpsgd.evaluate(model, (x, torch.arange(9) + 3))


@pytest.mark.parametrize("shape", [(9,), (9, 4)], ids=["samples", "steps"])
def test_whole_numbers_may_be_numbers_to_predict(shape):
    model, x = nn.Linear(2, 1), torch.randn(*shape, 2)
    y = torch.arange(x[..., 0].numel()).view(shape) + 3
    expected = (model(x)[..., 0] - y).square().mean().item() / 2
    assert tpsgd.evaluate(model, (x, y), loss="mse") == pytest.approx(expected, rel=1e-5)
