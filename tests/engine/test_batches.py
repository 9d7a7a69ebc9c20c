"""Every form of data and labels that `fit` takes, and that they mean the same."""

import numpy as np
import pytest
import torch
from helpers import DRAWN, LOCKED, folded, images, mlp, points, same, seeded, state
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tpsgd
from tpsgd import Memory, TpsgdError, bce, cross_entropy, mse, rules
from tpsgd.engine.sources.batches import ArraySource, BatchForm
from tpsgd.engine.sources.inputs import labels
from tpsgd.targets import Target

pytestmark = pytest.mark.usefixtures("unwatched")

SETTINGS = {"epochs": 2, "batch_size": 16}


class Plain(Dataset):
    """Samples one by one, with the label as a Python number."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


class Endless(IterableDataset):
    """Samples in their own order; how many is not told."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


def trained(data, model=None, **settings):
    model = model or mlp(6, 8, 3)
    run = tpsgd.fit(model, data, **folded(**(SETTINGS | settings)))
    return state(model), run


# ---- x -------------------------------------------------------------------------------------------

X, Y = points()
SAME_AS_TENSORS = {
    "a list of two": lambda: [X, Y],
    "numpy": lambda: (X.numpy(), Y.numpy()),
    "numpy float64": lambda: (X.numpy().astype(np.float64), Y.numpy()),
    "read-only numpy": lambda: (read_only(X.numpy()), read_only(Y.numpy())),
    "negative strides": lambda: (X.numpy()[::-1].copy()[::-1], Y.numpy()[::-1].copy()[::-1]),
    "Fortran order": lambda: (np.asfortranarray(X.numpy()), Y.numpy()),
    "nested lists": lambda: (X.tolist(), Y.tolist()),
    "float64 tensor": lambda: (X.double(), Y),
    "not contiguous": lambda: (torch.cat([X, X], 1)[:, :6], torch.stack([Y, Y], 1)[:, 0]),
    "every other sample": lambda: (X.repeat_interleave(2, 0)[::2], Y.repeat_interleave(2)[::2]),
    "requires grad": lambda: (X.clone().requires_grad_(), Y),
    "int32 labels": lambda: (X, Y.int()),
    "uint8 labels": lambda: (X, Y.to(torch.uint8)),
    "uint16 labels": lambda: (X, Y.numpy().astype(np.uint16)),
    "labels in a column": lambda: (X, Y[:, None]),
    "TensorDataset": lambda: TensorDataset(X, Y),
}


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("form", SAME_AS_TENSORS)
def test_forms_of_the_same_arrays_give_the_same_weights_bit_for_bit(form):
    assert same(trained(SAME_AS_TENSORS[form]())[0], trained((X, Y))[0])


def layouts(x):
    return {
        "channels last": x.to(memory_format=torch.channels_last),
        "turned": x.transpose(2, 3).contiguous().transpose(2, 3),
        "every other image": x.repeat_interleave(2, 0)[::2],
        "some channels": torch.cat([x, x], 1)[:, :2],
        "mirrored numpy": x.flip(3).contiguous().numpy()[..., ::-1],
        "whole numbers": (x * 10).round().to(torch.int16),
    }


@pytest.mark.parametrize("form", layouts(images()[0]))
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_images_may_lie_in_memory_as_they_like(form, order):
    x, y = images()
    x = (x * 10).round()

    def cnn():
        return seeded(
            lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
        )

    given = layouts(x / 10)[form] if form == "whole numbers" else layouts(x)[form]
    found = trained((given, y), cnn(), order=order)[0]
    assert same(found, trained((x, y), cnn(), order=order)[0])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.bool])
def test_features_that_are_whole_numbers_become_the_models_numbers(dtype):
    x = (X > 0).to(dtype)
    assert same(trained((x, Y))[0], trained((x.float(), Y))[0])


BYTES = (X * 40 + 100).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("kind", ["tensor", "numpy", "data set", "loader", "chunks of a batch"])
def test_bytes_are_pixels_divided_by_255(kind):
    forms = {
        "tensor": lambda x: (x, Y),
        "numpy": lambda x: (x.numpy(), Y.numpy()),
        "data set": lambda x: Plain(x, Y),
        "loader": lambda x: DataLoader(Plain(x, Y), batch_size=8),
        "chunks of a batch": lambda x: (x, Y),
    }
    more = {"memory": tpsgd.Memory(micro_batch=3)} if kind == "chunks of a batch" else {}
    of_bytes, of_numbers = forms[kind](BYTES), forms[kind](BYTES.float() / 255)
    model, other = trained(of_bytes, **more)[0], trained(of_numbers, **more)[0]
    assert same(model, other)


def test_bytes_are_evaluated_as_they_are_learned():
    model = nn.Sequential(nn.Linear(6, 3))
    data, numbers = (BYTES, Y), (BYTES.float() / 255, Y)
    tpsgd.fit(model, data, epochs=20, lr=0.1, batch_size=16)
    assert tpsgd.evaluate(model, data) == tpsgd.evaluate(model, numbers)
    run = tpsgd.fit(nn.Sequential(nn.Linear(6, 3)), data, epochs=1, validation=data)
    again = tpsgd.Trained(model, run)
    assert torch.equal(again.outputs(BYTES), again.outputs(BYTES.float() / 255))


def test_large_batches_of_bytes_in_another_memory_format_are_divided_once():
    x = torch.randint(0, 256, (130, 3, 64, 64), dtype=torch.uint8)
    form = BatchForm(torch.device("cpu"), torch.float32, 130, (0,), channels_last=True)
    batch, _ = ArraySource(x, torch.zeros(130, dtype=torch.long), form).take(torch.arange(130))
    assert torch.equal(batch, x.float() / 255)


def test_bytes_of_yes_and_no_give_a_warning():
    x = (X > 0).to(torch.uint8)
    with pytest.warns(UserWarning, match="taken as pixels and divided by 255, but has none above"):
        trained((x, Y))


def test_the_data_is_not_written_to():
    x, y = X.clone(), Y.clone()
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )
    trained((x, y), model)
    tpsgd.evaluate(model, (x, y))
    assert torch.equal(x, X) and torch.equal(y, Y)


# ---- datasets and loaders ------------------------------------------------------------------------


def test_a_dataset_is_shuffled_by_the_seed():
    first, again = (trained(Plain(X, Y), seed=1)[0] for _ in range(2))
    assert same(first, again)
    assert not same(first, trained(Plain(X, Y), seed=2)[0])


def test_a_datasets_run_is_recorded_like_an_arrays():
    (_, plain), (_, arrays) = trained(Plain(X, Y)), trained((X, Y))
    assert plain.sample_passes == arrays.sample_passes
    assert plain.forward_passes == arrays.forward_passes
    assert plain.kept_bytes == arrays.kept_bytes


STREAMS = {
    "Dataset": lambda: Plain(X, Y),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), 16),
    "shuffling DataLoader": lambda: DataLoader(TensorDataset(X, Y), 16, shuffle=True),
    "DataLoader with workers": lambda: DataLoader(TensorDataset(X, Y), 16, num_workers=1),
    "DataLoader that drops the rest": lambda: DataLoader(TensorDataset(X, Y), 20, drop_last=True),
    "DataLoader with a batch sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=BatchSampler(SequentialSampler(X), 16, False)
    ),
    "DataLoader that draws more": lambda: DataLoader(
        TensorDataset(X, Y), 16, sampler=WeightedRandomSampler(torch.ones(48), 80)
    ),
    "IterableDataset": lambda: Endless(X, Y),
    "DataLoader of a stream": lambda: DataLoader(Endless(X, Y), 16),
}
PER_EPOCH = {"DataLoader that drops the rest": 40, "DataLoader that draws more": 80}


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("order", "reuse"),
    [(tpsgd.sequential, True), (tpsgd.sequential, False), (tpsgd.simultaneous, None)],
)
@pytest.mark.parametrize("stream", [s for s in STREAMS if "workers" not in s])
def test_streams(stream, order, reuse):
    model = mlp(6, 8, 3)
    run = tpsgd.fit(
        model,
        STREAMS[stream](),
        order=order,
        memory=Memory(reuse=reuse),
        epochs=6,
        batch_size=16,
        lr=0.05,
    )
    assert run.sample_passes == PER_EPOCH.get(stream, 48) * 6 * 2
    assert tpsgd.evaluate(model, (X, Y)) > 0.8
    assert len(run.history) == 12


def test_several_inputs_of_a_data_set():
    """torch's collate makes a list of them."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x, z):
            return self.last(torch.relu(self.first(x + z)))

    x, y = torch.randn(20, 4), torch.arange(20) % 3
    samples = [((x[i], 2 * x[i]), y[i]) for i in range(20)]
    model, arrays = seeded(Sum), seeded(Sum)
    tpsgd.fit(arrays, ((x, 2 * x), y), epochs=1, batch_size=20)
    loader = DataLoader(samples, batch_size=20)  # type: ignore[arg-type]
    tpsgd.fit(model, loader, epochs=1)
    assert tpsgd.evaluate(model, loader) == tpsgd.evaluate(model, ((x, 2 * x), y))
    for key, expected in state(arrays).items():
        torch.testing.assert_close(state(model)[key], expected, rtol=1e-4, atol=1e-6)


def test_a_loader_with_workers():
    assert trained(STREAMS["DataLoader with workers"](), epochs=1)[1].sample_passes == 96


@pytest.mark.parametrize("stream", STREAMS)
def test_backprop_takes_streams(stream):
    run = tpsgd.fit_backprop(mlp(6, 8, 3), STREAMS[stream](), epochs=1)
    assert run.sample_passes == PER_EPOCH.get(stream, 48) * 2


def test_a_loader_brings_its_own_batches_to_every_block():
    loader = DataLoader(TensorDataset(X, Y), batch_size=16)
    whole = trained(loader, batch_size=5)[0]
    assert same(whole, trained(loader, batch_size=48)[0])


def test_a_loader_in_order_equals_arrays_when_there_is_one_batch():
    loader = DataLoader(TensorDataset(X, Y), batch_size=48)
    (a, _), (b, _) = trained(loader), trained((X, Y), batch_size=48)
    for name in a:  # only the order of sums within the batch differs
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_the_callers_generator_follows_its_own_seed():
    """Training asks it for numbers, and does not seed it anew."""

    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=generator)
        return trained(loader)[0]

    assert same(order(1), order(1))
    assert not same(order(1), order(2))


def test_a_length_that_is_not_true_is_an_error_of_one_sentence():
    class Liar(Endless):
        def __len__(self):
            return 5

    with pytest.raises(TpsgdError, match="more samples than the 5 it says"):
        trained(DataLoader(Liar(X, Y), batch_size=1), reuse=True)


def test_the_order_of_an_epoch_depends_on_seed_block_and_epoch_alone():
    form = BatchForm(torch.device("cpu"), torch.float32, 16, (3,))
    orders = {
        tuple(torch.cat(list(ArraySource(X, Y, form).indices(block, epoch))).tolist())
        for block, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))
    }
    assert len(orders) == 3


def test_every_block_has_an_order_of_its_own_in_every_epoch(monkeypatch):
    orders, batches = [], ArraySource.batches

    def noted(self, block=0, epoch=None):
        orders.append((block, epoch))
        return batches(self, block, epoch)

    monkeypatch.setattr(ArraySource, "batches", noted)
    tpsgd.fit(mlp(6, 5, 5, 3), (X, Y), rule=rules.tpsgd_l2(), epochs=2)
    shuffled = [order for order in orders if order[1] is not None]
    assert shuffled == [(block, epoch) for block in range(3) for epoch in range(2)]


# ---- labels --------------------------------------------------------------------------------------

HOT = F.one_hot(Y, 3).float()
SOFT = 0.8 * HOT + 0.2 / 3
SEVERAL = (X[:, :3] > 0).float()
RULES = [(name, tpsgd.sequential) for name in DRAWN if name not in LOCKED] + [
    (name, tpsgd.simultaneous) for name in LOCKED
]


@pytest.mark.cover(2)
@pytest.mark.parametrize("loss", [mse, cross_entropy, bce], ids=lambda x: x.name)
@pytest.mark.parametrize(("name", "order"), RULES)
def test_one_hot_floats_mean_the_same_as_indices(name, order, loss):
    settings = {"rule": DRAWN[name](), "order": order, "loss": loss}
    by_index, first = trained((X.double(), Y), mlp(6, 8, 3).double(), **settings)
    by_row, second = trained((X.double(), HOT), mlp(6, 8, 3).double(), **settings)
    for key in by_index:
        torch.testing.assert_close(by_index[key], by_row[key], rtol=1e-7, atol=1e-9)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "order"), RULES)
def test_soft_labels(name, order, dtype):
    model = mlp(6, 16, 3).to(dtype)
    settings = {"rule": DRAWN[name](), "order": order, "loss": cross_entropy}
    _, run = trained((X, SOFT), model, epochs=8, lr=0.03, **settings)
    assert tpsgd.evaluate(model, (X, SOFT)) > 0.9
    assert tpsgd.evaluate(model, (X, SOFT)) == tpsgd.evaluate(model, (X, Y))
    assert run.history[-1].accuracy > 0.8


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "order"), RULES)
def test_several_classes_at_once(name, order, dtype):
    model = mlp(6, 32, 3).to(dtype)
    settings = {"rule": DRAWN[name](), "order": order, "loss": bce}
    _, run = trained((X, SEVERAL), model, epochs=15, lr=0.03, batch_size=8, **settings)
    subset = ((model(X.to(dtype)) > 0) == (SEVERAL > 0.5)).all(1).double().mean().item()
    assert tpsgd.evaluate(model, (X, SEVERAL)) == pytest.approx(subset)
    assert subset > 0.7 and run.history[-1].accuracy > 0.5


@pytest.mark.parametrize(
    "y", [Y % 2, (Y % 2)[:, None], (Y % 2).float(), (Y % 2).float()[:, None], (Y % 2).bool()]
)
@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_one_yes_or_no_output(fit, y):
    x = X + 3 * (Y % 2)[:, None]
    model = mlp(6, 8, 1)
    run = fit(model, (x, y), loss=bce, epochs=8, lr=0.05, batch_size=8)
    assert tpsgd.evaluate(model, (x, y)) > 0.9
    assert run.history[-1].accuracy > 0.9


def test_every_class_without_samples_is_named_once():
    with pytest.warns(UserWarning, match="2 of 5 classes have no samples: 3, 4") as caught:
        trained((X, Y), mlp(6, 8, 5))
    assert len(caught) == 1


@given(
    st.integers(1, 6).flatmap(
        lambda classes: st.tuples(
            st.just(classes), st.lists(st.integers(-2, 8), min_size=1, max_size=9)
        )
    )
)
@pytest.mark.filterwarnings("ignore:.*classes have no samples")
def test_indices_are_taken_if_and_only_if_they_are_in_range(case):
    classes, values = case
    y = torch.tensor(values)
    if min(values) >= 0 and max(values) < classes:
        assert labels(y, cross_entropy, classes).tolist() == values
    else:
        with pytest.raises(TpsgdError, match="out of range"):
            labels(y, cross_entropy, classes)


@given(st.integers(1, 5), st.integers(2, 5), st.integers(0, 2**31))
def test_any_soft_rows_are_taken(n, classes, seed):
    rows = torch.rand(n, classes, generator=torch.Generator().manual_seed(seed))
    soft = rows / rows.sum(1, keepdim=True)
    assert torch.equal(labels(soft, cross_entropy, classes), soft)
    assert torch.equal(labels(rows, bce, classes), rows)
    numbers = Target(numbers=True, shape=(classes,), rows=True)
    assert torch.equal(labels(rows * 9 - 4, mse, classes, True, numbers), rows * 9 - 4)
    with pytest.raises(TpsgdError, match="sum to 1"):
        labels(soft * 0.5, cross_entropy, classes)


def test_rows_for_the_squared_error_may_be_any_numbers():
    targets = torch.cat([X[:, :1] * 2, X[:, 1:2] - X[:, 2:3]], 1)
    _, run = trained((X, targets), mlp(6, 2), loss=mse, epochs=60, lr=0.05)
    assert run.history[-1].loss < 0.05 * run.history[0].loss


NUMBERS = X[:, :2] * 3
ROWS = {"arrays": lambda data: data, "a loader": lambda data: DataLoader(TensorDataset(*data), 16)}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("name", rules.ALL)
def test_targets_that_are_numbers_have_no_accuracy_and_rules_that_compare_refuse_them(name, form):
    settings = {"rule": rules.ALL[name].make(), "order": tpsgd.simultaneous, "loss": mse}
    data = ROWS[form]((X, NUMBERS))
    if name == "predsim":
        with pytest.raises(TpsgdError, match=r"predsim compares samples of a class.*numbers"):
            tpsgd.fit(mlp(6, 8, 2), data, **settings)
        return
    after, run = trained(data, mlp(6, 8, 2), validation=(X, NUMBERS), **settings)
    assert all(torch.isfinite(t).all() for t in after.values())
    assert all(e.accuracy is None and e.val_accuracy is None for e in run.history)
    assert "%" not in str(run)


def test_targets_that_are_numbers_have_no_accuracy_under_backprop_in_restarts_and_streams():
    settings = {"loss": mse, "epochs": 1, "validation": (X, NUMBERS)}
    run = tpsgd.fit_backprop(mlp(6, 8, 2), (X, NUMBERS), **settings)
    several = tpsgd.fit_many(
        lambda: mlp(6, 8, 2), (X, NUMBERS), rule=rules.tpsgd_l2(), restarts=2, **settings
    )
    for history in (run.history, *(r.history for r in several.runs)):
        assert history and all(e.accuracy is None and e.val_accuracy is None for e in history)
    model = mlp(6, 8, 2)
    before = state(model)
    tpsgd.Stream(model, loss=mse).partial_fit(X, NUMBERS)
    assert not same(before, state(model))
    with pytest.raises(TpsgdError, match="these labels are numbers, and those to learn from are"):
        tpsgd.fit(mlp(6, 8, 2), (X, Y % 2), loss=mse, validation=(X, NUMBERS))


@pytest.mark.parametrize("name", ["readout", "readout-learned", "auxiliary"])
def test_with_another_loss_of_numbers_nothing_is_classified(name):
    squared = tpsgd.losses.Loss("squared", mse.link, mse.value)
    settings = {"rule": rules.ALL[name].make(), "epochs": 1, "loss": squared}
    run = tpsgd.fit(mlp(6, 8, 2), (X, NUMBERS), **settings)
    assert all(e.loss > 0 and e.accuracy is None for e in run.history)


@pytest.mark.parametrize("outputs", [1, 2])
def test_numbers_have_no_confusion(outputs):
    with pytest.raises(TpsgdError, match=r"y has numbers, not classes: tpsgd\.evaluate gives R"):
        tpsgd.confusion(mlp(6, 8, outputs), (X, NUMBERS[:, :outputs]))


def test_the_rules_that_need_the_error_take_its_derivative():
    """One DFA step at rate 1 by hand: dL/dy of the network's output, through P, for soft labels."""
    model, before = mlp(6, 8, 3).double(), mlp(6, 8, 3).double()
    x, s = X.double(), SOFT.double()
    tpsgd.fit(
        model,
        (x, s),
        rule=rules.dfa(),
        order=tpsgd.simultaneous,
        optimizer=torch.optim.SGD,
        lr=1.0,
        epochs=1,
        batch_size=48,
        seed=4,
    )
    with torch.no_grad():
        P = tpsgd.projections.normal()((8,), 3, tpsgd.maths.random.Key(4, 0)).double()
        h = torch.tanh(before[0](x))
        e = torch.softmax(before[2](h), 1) - s
        dz = (e @ P) * (1 - h**2) / len(x)
        torch.testing.assert_close(before[0].weight - model[0].weight, dz.T @ x)
        torch.testing.assert_close(before[2].weight - model[2].weight, e.T @ h / len(x))
