"""Sequences of the user's: tokens and padded sequences from `.npz` files, functions and tables."""

import numpy as np
import pytest
import torch

from tpsgd import Padded, data
from tpsgd.data.dataset import BYTES

RNG = np.random.default_rng(0)
Y = np.arange(20) % 2
X = RNG.normal(size=(20, 6, 3)).astype(np.float32)
LENGTHS = RNG.integers(1, 6, 20)
TOKENS = RNG.integers(0, 9, (20, 6))
TOKENS[0, 0] = 8


# .npz


def npz(tmp_path, **arrays):
    np.savez(tmp_path / "own.npz", **arrays)
    return str(tmp_path / "own.npz")


def test_npz_of_sequences_of_one_length(tmp_path):
    loaded = data.load(npz(tmp_path, x=X, y=Y))
    assert (
        loaded.shape == (6, 3) and loaded.train[0].shape == (16, 6, 3) and loaded.vocabulary is None
    )


def test_npz_with_lengths_gives_padded_sequences(tmp_path):
    nan = X.copy()
    nan[np.arange(6) >= LENGTHS[:, None]] = np.nan  # padding may be anything
    loaded = data.load(npz(tmp_path, x=nan, y=Y, lengths=LENGTHS))
    for (x, y), n in ((loaded.train, 16), (loaded.test, 4)):
        assert isinstance(x, Padded) and len(x) == len(y) == n
        assert (
            x.data.shape[1:] == loaded.shape == (LENGTHS.max(), 3)
            and x.lengths.dtype is torch.int64
        )
        for row, length, label in zip(x.data, x.lengths, y, strict=True):
            (i,) = np.flatnonzero((X[:, 0] == row[0].numpy()).all(1))
            assert length == LENGTHS[i] and label == Y[i] and not row[length:].any()
            assert np.array_equal(row[:length], X[i, :length])
    assert loaded.note.startswith(f"{LENGTHS.min()} to {LENGTHS.max()} steps; 20 % held out")


def test_max_train_applies_to_padded_sequences(tmp_path):
    loaded = data.load(npz(tmp_path, x=X, y=Y, lengths=LENGTHS), max_train=6, seed=2)
    assert len(loaded.train[0]) == 6 and loaded.train[1].bincount().tolist() == [3, 3]
    assert loaded.train[0].shape[1:] == loaded.shape and "6 of 16 training samples" in loaded.note


def test_npz_with_lengths_and_a_test_set_of_more_steps(tmp_path):
    test = {"x_test": np.ones((2, 9, 3)), "y_test": Y[:2], "lengths_test": np.array([9, 2])}
    loaded = data.load(npz(tmp_path, x=X, y=Y, lengths=LENGTHS, **test))
    assert loaded.train[0].shape == (20, 9, 3) and loaded.test[0].lengths.tolist() == [9, 2]
    assert loaded.test[0].data.sum().item() == 11 * 3
    assert loaded.train[0].lengths.tolist() == LENGTHS.tolist()


def test_lengths_that_are_all_equal_give_a_tensor(tmp_path):
    loaded = data.load(npz(tmp_path, x=X, y=Y, lengths=np.full(20, 4)))
    assert isinstance(loaded.train[0], torch.Tensor) and loaded.shape == (4, 3)


def test_bytes_with_lengths_are_sequences(tmp_path):
    x = RNG.integers(0, 256, (20, 6, 3), dtype=np.uint8)
    assert data.load(npz(tmp_path, x=x, y=Y)).shape == (1, 6, 3)
    loaded = data.load(npz(tmp_path, x=x, y=Y, lengths=LENGTHS))
    assert loaded.shape == (LENGTHS.max(), 3) and 0.9 < loaded.train[0].data.max() <= 1
    assert "bytes divided by 255, 1 to" in loaded.note and loaded.reading == BYTES


def test_npz_of_tokens(tmp_path):
    loaded = data.load(npz(tmp_path, tokens=TOKENS.astype(np.uint16), y=Y))
    assert loaded.train[0].dtype == torch.int64 and loaded.shape == (6,) and loaded.vocabulary == 9
    table = data.load(npz(tmp_path, x=TOKENS, y=Y))
    assert table.train[0].dtype == torch.float32 and table.vocabulary is None


def test_npz_of_tokens_with_lengths(tmp_path):
    tokens = np.where(np.arange(6) < LENGTHS[:, None], TOKENS, 99)  # 99 is padding: not counted
    part = {"tokens_test": tokens, "y_test": Y, "lengths_test": LENGTHS}
    loaded = data.load(npz(tmp_path, tokens=tokens, y=Y, lengths=LENGTHS, **part))
    x = loaded.train[0]
    assert isinstance(x, Padded) and x.dtype == torch.int64 and loaded.vocabulary == 9
    assert x.data.max() < 9 and torch.equal(x.data, loaded.test[0].data)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "tokens": TOKENS}, "tokens in place of x"),
        ({"x": X, "lengths_test": LENGTHS}, "lengths for sequences, tokens_test and lengths_test"),
        (
            {"x": X, "lengths": LENGTHS, "x_test": X, "y_test": Y},
            "lengths for sequences, tokens_test and lengths_test",
        ),
        ({"tokens": TOKENS, "x_test": X, "y_test": Y}, "expected x and y"),
        ({"x": X, "lengths": LENGTHS[:-1]}, "lengths must be 20 whole numbers from 1 to 6"),
        ({"x": X, "lengths": LENGTHS + 0.5}, "lengths must be 20 whole numbers from 1 to 6"),
        ({"x": X, "lengths": LENGTHS * 0}, "lengths must be 20 whole numbers from 1 to 6"),
        ({"x": X, "lengths": LENGTHS * 0 + 7}, "lengths must be 20 whole numbers from 1 to 6"),
        ({"x": X[:, :, 0], "lengths": LENGTHS}, r"expected numbers \(samples, steps, features\)"),
        ({"x": X * np.inf, "lengths": LENGTHS}, r"x\[0, 0, 0\] is .*inf; replace it"),
        ({"x": X[:0], "lengths": LENGTHS[:0]}, "one label for each of the 0 samples"),
        ({"tokens": X}, r"expected whole numbers \(samples, steps\)"),
        ({"tokens": X[:, 0]}, "tokens is float32"),
        ({"tokens": -TOKENS}, "token -8 is negative"),
        (
            {"tokens": TOKENS, "tokens_test": TOKENS + 3, "y_test": Y},
            "tokens_test has the token 11",
        ),
        (
            {"tokens": TOKENS, "tokens_test": TOKENS[:, :3], "y_test": Y},
            "they must match .give lengths and lengths_test",
        ),
        (
            {
                **{"x": X, "lengths": LENGTHS, "x_test": X[:, :, :2]},
                **{"y_test": Y, "lengths_test": LENGTHS},
            },
            "they must match",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_npz_sequences_that_are_wrong_are_refused(refused, tmp_path, arrays, message):
    refused(npz(tmp_path, y=Y, **arrays), message)


# a function


@pytest.mark.parametrize(
    ("values", "dtype", "vocabulary"),
    [("torch.ones(n, 2)", torch.float32, None), ("torch.arange(n)", torch.int64, 5)],
)
def test_function_that_returns_padded(tmp_path, values, dtype, vocabulary):
    (tmp_path / "make.py").write_text(
        "import torch\nfrom tpsgd.nets.padded import Padded\ndef make():\n"
        f"    return Padded.of([{values} for n in [5, 2] * 5]), [0, 1] * 5\n"
    )
    loaded = data.load(f"{tmp_path / 'make.py'}:make")
    assert loaded.train[0].dtype == dtype and loaded.vocabulary == vocabulary
    assert loaded.train[0].lengths.tolist() == [5 - 3 * y for y in loaded.train[1].tolist()]


def test_function_that_pads_only_one_part_is_refused(refused, tmp_path):
    (tmp_path / "make.py").write_text(
        "import torch\nfrom tpsgd.nets.padded import Padded\ndef make():\n"
        "    x = Padded.of([torch.ones(n, 2) for n in (3, 2)])\n"
        "    return (x, [0, 1]), (x.data, [0, 1])\n"
    )
    refused(f"{tmp_path / 'make.py'}:make", "they must match .*Padded")


def test_a_function_may_return_a_list_of_different_lengths(tmp_path):
    file = tmp_path / "make.py"
    file.write_text(
        "import numpy as np\n"
        "def make(): return [np.ones((n, 2)) for n in (3, 5) * 10], [0, 1] * 10\n"
    )
    x, y = data.load(f"{file}:make").train
    assert isinstance(x, Padded) and set(x.lengths.tolist()) == {3, 5} and len(y) == 16


# a table of time steps


def csv(tmp_path, text):
    (tmp_path / "own.csv").write_text(text)
    return str(tmp_path / "own.csv")


def steps(lengths, line="s{i},{t},{a},{b},{y}"):
    """A line a step; a tells the sequence, b the time."""
    return [
        line.format(i=i, t=t, a=i, b=10 * t, y="cat" if i % 2 else "dog")
        for i, n in enumerate(lengths)
        for t in range(n)
    ]


def test_csv_with_a_sequence_column_has_a_step_a_row(tmp_path):
    lines = steps([4] * 10)
    RNG.shuffle(lines)  # the column step puts them in order
    file = csv(tmp_path, "\n".join(["sequence,step,a,b,label", *lines]))
    loaded = data.load(file, scale="none")
    x, y = loaded.train
    assert x.shape == (8, 4, 2) and loaded.shape == (4, 2) and loaded.classes == ("cat", "dog")
    assert (x[:, :, 1] == torch.tensor([0.0, 10, 20, 30])).all()
    assert (x[:, :, 0] == x[:, :1, 0]).all() and (y == 1 - x[:, 0, 0].long() % 2).all()
    assert "label column 'label', 4 steps; 20 % held out" in loaded.note


def test_csv_of_steps_of_different_lengths(tmp_path):
    lengths = [3, 1, 5, 2, 4, 3, 2, 5, 1, 4]
    lines = steps(lengths, "{y};{b};{a};s{i}")
    file = csv(tmp_path, "\n".join(["y;b;a;Sequence_ID", *lines]))
    loaded = data.load(file, max_train=5, scale="none")
    x, y = loaded.train
    assert isinstance(x, Padded) and x.data.shape == (5, 5, 2) and "1 to 5 steps" in loaded.note
    for row, length, label in zip(x.data, x.lengths, y, strict=True):
        i = int(row[0, 1])
        assert length == lengths[i] and label == 1 - i % 2 and not row[length:].any()
        assert row[:length, 0].tolist() == [10 * t for t in range(length)]


def test_csv_of_times_that_float32_cannot_tell_apart(tmp_path):
    lines = [f"s{i},{1_700_000_000 + 9 - t},{9 - t},{i % 2}" for i in range(10) for t in range(10)]
    file = csv(tmp_path, "\n".join(["sequence,time,a,y", *lines]))
    x = data.load(file, scale="none").train[0]
    assert (x[:, :, 0] == torch.arange(10)).all()


def test_time_is_a_feature_where_there_are_no_sequences(tmp_path):
    lines = [f"{i},1,{i % 2}" for i in range(10)]
    assert data.load(csv(tmp_path, "\n".join(["time,a,y", *lines]))).shape == (2,)


GOOD = "s0,0,1,cat\ns0,1,2,cat\ns1,0,3,dog\ns1,1,4,dog\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence,step,a,b\n" + GOOD, "sequences but no column label, y, class or target"),
        ("sequence,step,y\ns0,0,1\n", "has no column of features besides the label"),
        ("sequence,step,a,y\n", "has a header but no rows"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,5,cat\n", "the sequence 's1' has two labels"),
        ("sequence,step,a,y\n" + GOOD + "s1,1,5,dog\n", "sequence 's1' goes from 1 to 1; a column"),
        (
            "sequence,step,a,y\n" + GOOD + "s1,3,5,dog\n",
            "'s1' goes from 1 to 3; a column time",
        ),
        ("sequence,step,a,y\n" + GOOD + "s1,2,,dog\n", "line 6, column 'a': '' is blank"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,nan,dog\n", "line 6, column 'a': 'nan'"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,1e300,dog\n", "line 6, column 'a': '1e300'"),
        ("sequence,step,a,y\n" + GOOD + "s1,,5,dog\n", "line 6, column 'step': ''"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,5,\n", "line 6 has no text in the column 'y'"),
        (
            "sequence,step,a,y\n" + GOOD + ",2,5,dog\n",
            "line 6 has no text in the column 'sequence'",
        ),
        ("sequence,step,a,y\n" + GOOD + "s1,2,dog\n", "line 6 has 3 cells, the header has 4"),
        ("sequence,step,a,y\n" + GOOD, "2 samples are too few to hold out 1"),
    ],
)
def test_csv_steps_that_are_wrong_are_refused(refused, tmp_path, text, message):
    refused(csv(tmp_path, text), message)
