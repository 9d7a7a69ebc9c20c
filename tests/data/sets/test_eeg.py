"""EEG: seizures against one other kind of brain wave, split by recording or by row."""

import numpy as np
import pytest
import torch

from tpsgd import data
from tpsgd.data.sets import eeg


def eeg_table(root, recordings=8, rows=eeg.ROWS, change=None):
    """`recordings` of each of the five kinds; a sample tells its recording and its place."""
    lines = [["", *eeg.COLUMNS]]
    for kind in range(1, 6):
        for i in range(recordings):
            number = (kind - 1) * recordings + i
            suffix = f".{number}" if number else ""  # as published: the first has no number
            for chunk in range(1, rows + 1):
                signal = [number * 10 + j % 4 for j in range(eeg.SAMPLES)]
                lines.append([f"X{chunk}.V1{suffix}", *map(str, signal), str(kind)])
    if change is not None:
        change(lines)
    (root / "eeg").mkdir(exist_ok=True)
    (root / "eeg" / "data.csv").write_text("\n".join(map(",".join, lines)) + "\n")


def shown(part):
    """The recordings in a part, out of what `eeg_table` wrote into the samples."""
    return {round(v) for v in (part[0][:, 0, 0] * eeg.SCALE / 10).tolist()}


@pytest.mark.parametrize(
    ("name", "other", "kinds"),
    [("eeg", "healthy", range(32, 40)), ("eeg-tumour", "tumour", range(8, 16))],
)
def test_eeg_holds_out_whole_recordings(root, name, other, kinds):
    eeg_table(root)
    loaded = data.load(name, seed=5)
    assert loaded.classes == (other, "seizure") and loaded.shape == (45, 1)
    assert loaded.train[1].bincount().tolist() == [6 * 23] * 2
    assert loaded.test[1].bincount().tolist() == [2 * 23] * 2
    train, test = shown(loaded.train), shown(loaded.test)
    assert not train & test and train | test == {*range(8), *kinds}
    assert (loaded.train[0][:, :, 0] * eeg.SCALE % 10).round().unique().tolist() == [0]
    assert "of the recordings held out, the same for every seed" in loaded.note
    assert torch.equal(data.load(name, seed=6).test[0], loaded.test[0])
    seizures = loaded.test[0][loaded.test[1] == 1]
    assert shown((seizures,)) <= set(range(8))


def test_eeg_split_by_rows_leaks_recordings(root):
    eeg_table(root)
    loaded = data.load("eeg-rows")
    assert loaded.test[1].bincount().tolist() == [46, 46] and "of the rows held out" in loaded.note
    assert shown(loaded.train) & shown(loaded.test)


def rename(lines):
    lines[1][0] = "X1.V1.7"


def relabel(lines):
    lines[1][-1] = "5"


@pytest.mark.parametrize("change", [rename, relabel])
def test_eeg_needs_row_names_that_tell_recordings_apart(refused, root, change):
    eeg_table(root, change=change)
    refused("eeg", "do not tell recordings apart; use the split by rows")
    assert len(data.load("eeg-rows").train[1]) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[0].pop(), "as UCI's table .its columns are not the row's name"),
        (
            lambda lines: lines[3].__setitem__(9, "nan"),
            "as UCI's table .a number is missing or not finite",
        ),
        (lambda lines: lines[3].__setitem__(9, "abc"), "as UCI's table .could not convert string"),
        (lambda lines: lines[3].pop(), "as UCI's table .the number of columns changed"),
        (
            lambda lines: lines.__delitem__(slice(30, None)),
            "no rows with y = 1, or none with y = 5",
        ),
        (lambda lines: lines.clear(), "as UCI's table .its columns are not"),
    ],
)
def test_eeg_tables_that_are_wrong_are_refused(refused, root, change, message):
    eeg_table(root, recordings=2, change=change)
    refused("eeg", message)


@pytest.mark.real_data("eeg")
@pytest.mark.parametrize("name", ["eeg", "eeg-rows", "eeg-tumour", "eeg-tumour-rows"])
def test_real_eeg(name):
    loaded = data.load(name)
    assert loaded.train[0].shape == (3450, 45, 1) and loaded.test[0].shape == (1150, 45, 1)
    assert loaded.train[1].bincount().tolist() == [1725] * 2
    assert loaded.test[1].bincount().tolist() == [575] * 2
    both = torch.cat([loaded.train[0], loaded.test[0]])
    assert both.min() >= -1885 / 200 and both.max() <= 2047 / 200 and both.abs().max() > 9
    assert (both * 200 - (both * 200).round()).abs().max() < 1e-3


@pytest.mark.real_data("eeg")
def test_real_eeg_recordings_are_recognised_and_split_apart(data_root):
    x, _, recording = eeg.read_table(data_root / "eeg" / "data.csv")
    assert np.bincount(recording).tolist() == [23] * 500
    rows = x[np.argsort(recording, kind="stable")].reshape(500, 23, 178)
    within = np.abs(rows[:, 1:, 0] - rows[:, :-1, -1]).mean()
    inside = np.abs(np.diff(rows)).mean()
    assert within == pytest.approx(inside, rel=0.05)  # a row goes on where the last one ended
    where = {row.tobytes(): r for row, r in zip(x[:, ::4], recording, strict=True)}
    for name, leaks in (("eeg", False), ("eeg-tumour", False), ("eeg-rows", True)):
        loaded = data.load(name)
        sides = [
            {where[row.tobytes()] for row in (part[:, :, 0] * 200).round().numpy()}
            for part, _ in (loaded.train, loaded.test)
        ]
        assert bool(sides[0] & sides[1]) == leaks and len(sides[0] | sides[1]) == 200
