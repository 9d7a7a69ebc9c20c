"""`confusion`: counts by hand, figures per class, pairs, text of every width, and mistakes."""

import json

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd import TpsgdError
from tpsgd.engine.confusion import Confusion, Mistake

LOGITS = torch.tensor([[2.0, 1, 0], [0, 3, 1], [1, 0, 5], [0, 1, 0.5], [4, 0, 0]])
LABELS = torch.tensor([0, 1, 1, 0, 0])


def result() -> Confusion:
    return tpsgd.confusion(nn.Identity(), (LOGITS, LABELS), classes=["cat", "dog", "emu"])


def test_counts_by_hand():
    assert result().counts == ((2, 1, 0), (0, 1, 1), (0, 0, 0))
    assert result().samples == 5 and result().accuracy == 0.6
    assert tpsgd.confusion(nn.Identity(), (LOGITS, LABELS), batch_size=2).counts == result().counts


def test_figures_per_class():
    cat, dog, emu = result().per_class
    assert (cat.samples, cat.predictions, cat.recall, cat.precision) == (3, 2, 2 / 3, 1.0)
    assert (dog.recall, dog.precision) == (0.5, 0.5)
    assert (emu.samples, emu.recall, emu.precision) == (0, None, 0.0)


def test_it_agrees_with_scikit_learn_and_with_evaluate():
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    digits = tpsgd.data.load("digits", max_train=200)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    tpsgd.fit(model, digits.train, epochs=2)
    x, y = digits.test
    matrix = tpsgd.confusion(model, (x, y))
    with torch.no_grad():
        predicted = model(x).argmax(1)
    assert confusion_matrix(y, predicted).tolist() == [list(row) for row in matrix.counts]
    precision, recall, _, support = precision_recall_fscore_support(y, predicted, zero_division=0)
    assert [c.recall for c in matrix.per_class] == pytest.approx(recall.tolist())
    assert [c.precision or 0 for c in matrix.per_class] == pytest.approx(precision.tolist())
    assert [c.samples for c in matrix.per_class] == support.tolist()
    assert matrix.accuracy == tpsgd.evaluate(model, (x, y))


def test_mistakes_begin_with_the_most_frequent():
    counts = ((5, 1, 0), (3, 5, 0), (0, 2, 2))
    pairs = Confusion(counts, ("a", "b", "c")).mistakes()
    assert pairs == [
        Mistake("b", "a", 3, 3 / 8), Mistake("c", "b", 2, 0.5), Mistake("a", "b", 1, 1 / 6),
    ]  # fmt: skip
    assert Confusion(counts, ("a", "b", "c")).mistakes(1) == pairs[:1]


def test_soft_labels_and_a_single_output():
    soft = torch.nn.functional.one_hot(LABELS, 3) * 0.5 + 0.5 / 3
    assert tpsgd.confusion(nn.Identity(), (LOGITS, soft)).counts == result().counts
    x, y = torch.tensor([[0.4], [0.6], [-1.0]]), torch.tensor([1, 1, 0])
    assert tpsgd.confusion(nn.Identity(), (x, y)).counts == ((1, 0), (0, 2))
    squashed = tpsgd.confusion(nn.Sequential(nn.Identity(), nn.Sigmoid()), (x, y))
    assert squashed.counts == ((1, 0), (0, 2)) and squashed.classes == ("0", "1")


def test_what_has_no_matrix_is_refused():
    rows = torch.tensor([[1.0, 1, 0]] * 5)
    with pytest.raises(TpsgdError, match="a sample has several classes"):
        tpsgd.confusion(nn.Identity(), (LOGITS, rows))
    with pytest.raises(TpsgdError, match="3 classes, but 2 names"):
        tpsgd.confusion(nn.Identity(), (LOGITS, LABELS), classes=["a", "b"])
    with pytest.raises(TpsgdError, match="output is NaN"):
        tpsgd.confusion(nn.Linear(3, 3).requires_grad_(False).apply(spoil), (LOGITS, LABELS))
    with pytest.raises(TpsgdError, match="empty"):
        tpsgd.confusion(nn.Identity(), (LOGITS[:0], LABELS[:0]))
    with pytest.raises(TpsgdError, match="different classes"):
        result() + tpsgd.confusion(nn.Identity(), (LOGITS, LABELS))


def spoil(module: nn.Linear) -> None:
    module.weight.fill_(float("nan"))


def test_matrices_add_up():
    assert (result() + result()).counts == ((4, 2, 0), (0, 2, 2), (0, 0, 0))


def test_modes_are_left_as_they_were():
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 3))
    tpsgd.confusion(model, (LOGITS, LABELS))
    assert model.training and model[0].training


def test_plain_values_leave_zeros_out():
    plain = json.loads(json.dumps(result().as_dict()))
    assert plain["confusion"] == {
        "cat": {"cat": 2, "dog": 1},
        "dog": {"dog": 1, "emu": 1},
        "emu": {},
    }
    assert plain["per_class"][2]["recall"] is None


def test_a_wide_matrix_becomes_its_worst_pairs():
    names = tuple(f"a class with a long name {i}" for i in range(12))
    counts = [[0] * 12 for _ in names]
    for i in range(12):
        counts[i][i] = 10
    counts[3][4] = 5
    text = Confusion(tuple(map(tuple, counts)), names).text(80)
    assert "most confused:" in text and text.endswith("33.3%")
    assert max(map(len, text.splitlines())) <= 80
    assert "true \\ predicted" in Confusion(((3, 1), (0, 2)), ("a", "b")).text(80)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("size", [2, 25, 100])
def test_long_names_lose_their_middle_and_the_text_stays_within_the_width(width, size):
    counts = tuple(tuple(10 * (i == j) + (i + 1 == j) for j in range(size)) for i in range(size))
    text = Confusion(counts, tuple(f"first {'x' * 150} {i} last" for i in range(size))).text(width)
    assert max(map(len, text.splitlines())) <= width and "1 last " in text
    assert len(text.splitlines()) < 50


def test_too_many_classes_are_refused_before_memory_is_taken(tmp_path):
    model = nn.Linear(2, 60_000)
    with pytest.raises(TpsgdError, match="60,000 classes are too many for a confusion matrix"):
        tpsgd.confusion(model, (torch.ones(3, 2), torch.arange(3)))
    assert 0 <= tpsgd.evaluate(model, (torch.ones(3, 2), torch.arange(3))) <= 1
    many = tpsgd.confusion(nn.Linear(2, 1500), (torch.ones(3, 2), torch.arange(3)))
    assert many.samples == 3 and len(many.per_class) == 1500
    with pytest.raises(TpsgdError, match="a heat map has at most 1,000 classes, not 1,500"):
        many.plot(tmp_path / "map.png")


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "a", None, True, 2**63])
def test_a_batch_size_that_is_none_is_refused(batch_size):
    for measure in (tpsgd.confusion, tpsgd.evaluate):
        with pytest.raises(TpsgdError, match="batch_size must be 1 or more, got"):
            measure(nn.Identity(), (LOGITS, LABELS), batch_size=batch_size)


def test_of_many_classes_the_worst_are_listed():
    size = 100
    counts = [[10 * (i == j) for j in range(size)] for i in range(size)]
    counts[70] = [10] + [0] * (size - 1)
    text = str(Confusion(tuple(map(tuple, counts)), tuple(map(str, range(size)))))
    assert text.startswith("the 30 of 100 classes with the least recall:")
    assert text.splitlines()[2].split()[0] == "70" and len(text.splitlines()) < 40


@pytest.mark.parametrize("size", with_full([2, 20, 50], [20]))
def test_a_heat_map_is_drawn(tmp_path, size):
    counts = tuple(tuple(10 * (i == j) + (i + 1 == j) for j in range(size)) for i in range(size))
    matrix = Confusion(counts, tuple(f"class {i}" for i in range(size)))
    assert matrix.plot(tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TpsgdError, match="a figure of a confusion matrix is FILE"):
        matrix.plot(tmp_path / "map.gif")


def test_a_loaded_model_has_the_names_of_its_classes(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3))
    tpsgd.fit(model, (LOGITS, torch.tensor([0, 1, 2, 0, 1])), epochs=1).save(
        tmp_path, classes=["cat", "dog", "emu"]
    )
    trained = tpsgd.load(tmp_path)
    assert trained.confusion((LOGITS, LABELS)).classes == ("cat", "dog", "emu")
    assert trained.confusion((LOGITS, LABELS)).accuracy == trained.evaluate((LOGITS, LABELS))
