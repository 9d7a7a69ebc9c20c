"""The built-in sets: their entries, their names, and the folders in which they are found."""

import pytest

from tpsgd import TpsgdError, data
from tpsgd.data.registry import DATASETS

IMAGES = ["digits", "mnist", "fashion-mnist", "cifar10", "imagenette"]
BUILT_IN = [
    *("digits", "mnist", "fashion-mnist", "seq-mnist-rows", "seq-mnist-pixels"),
    *("cifar10", "imagenette", "eeg", "eeg-rows", "eeg-tumour", "eeg-tumour-rows"),
    *("tweets", "tweets-holdout", "tweets-vectors", "tweets-vectors-holdout", "ucf101"),
]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No data anywhere: an empty cache and no TPSGD_DATA."""
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mnits", "did you mean 'mnist'"),
        ("MNIST", "did you mean 'mnist'"),
        ("fashion", "did you mean 'fashion-mnist'"),
        ("cifar-10", "did you mean 'cifar10'"),
        ("elephants", "choose from digits, mnist"),
        ("", "choose from digits, mnist"),
    ],
)
@pytest.mark.parametrize("ask", [data.load, data.fetch, data.path])
def test_unknown_names_get_a_suggestion(ask, name, hint):
    with pytest.raises(TpsgdError, match=hint):
        ask(name)


def test_every_entry_of_the_registry_is_complete():
    assert list(DATASETS) == BUILT_IN
    for entry in DATASETS.values():
        assert len(set(entry.classes)) == len(entry.classes)
        assert bool(entry.classes) != bool(entry.class_count)
        assert len(entry.classes) == 10 or entry.name not in IMAGES
        assert bool(entry.by_hand) == bool(entry.files and not entry.downloads)
        assert bool(entry.mirrors) == bool(entry.downloads)
        assert all(url.startswith("http") and url.endswith("/") for url in entry.mirrors)
        assert all(len(check) == len("md5:") + 32 for _, check in entry.downloads)


def test_describe_and_path_without_data(bare):
    rows = data.describe()
    assert [row.name for row in rows] == BUILT_IN
    assert rows[0] == ("digits", "1438 + 359", "1 x 8 x 8", "10", "comes with scikit-learn")
    assert rows[1].where == "not here: tpsgd data fetch mnist"
    assert all(isinstance(cell, str) for row in rows for cell in row)
    assert data.path("mnist") is None and data.path("digits") is not None


def test_digits_need_scikit_learn(bare, monkeypatch):
    monkeypatch.setattr("tpsgd.data.registry.find_spec", lambda name: None)
    assert data.path("digits") is None
    with pytest.raises(TpsgdError, match="pip install scikit-learn"):
        data.load("digits")


def test_a_data_folder_that_does_not_exist_is_refused(bare, monkeypatch):
    monkeypatch.setenv("TPSGD_DATA", str(bare / "nowhere"))
    with pytest.raises(TpsgdError, match="which is not a folder; make it or unset it"):
        data.load("mnist")


def test_the_missing_files_of_a_data_folder_are_named(bare, monkeypatch):
    (bare / "mnist").mkdir()
    (bare / "mnist" / "train-images-idx3-ubyte.gz").touch()
    monkeypatch.setenv("TPSGD_DATA", str(bare))
    assert data.path("mnist") is None
    with pytest.raises(TpsgdError, match=r"mnist lacks train-labels-idx1-ubyte.gz, t10k"):
        data.load("mnist")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eeg", r"UCI withdrew .* X1 to X178, y from 1 to 5\); put data.csv into .*/eeg/\.$"),
        ("tweets", "six columns .* put training.csv, test.csv into"),
        ("tweets-vectors-holdout", "GloVe page; put training.csv, glove.6B.100d.txt into"),
        ("ucf101", "ucf101_features.py .*; put classInd.txt, trainlist01.txt, testlist01"),
    ],
)
def test_fetch_says_where_to_get_other_sets(refused, root, monkeypatch, name, message):
    refused(name, message)
    monkeypatch.delenv("TPSGD_DATA")
    with pytest.raises(TpsgdError, match=r"into \$TPSGD_DATA/"):
        data.fetch(name)
    assert not (root / "cache").exists()


def test_sequence_sets_are_described(root):
    rows = {row.name: row for row in data.describe()}
    assert rows["eeg"][1:4] == ("3450 + 1150", "45 x 1", "2")
    assert rows["tweets"].shape == "15 of 1000" and rows["tweets-vectors"].shape == "15 x 100"
    assert rows["ucf101"].classes == "101"


@pytest.mark.parametrize("name", [entry.name for entry in DATASETS.values() if entry.files])
@pytest.mark.parametrize("kind", ["half there", "empty", "folders"])
def test_a_set_that_is_damaged_is_one_sentence(root, refused, name, kind):
    """One file of several, files without content, and folders with the names of files."""
    entry = DATASETS[name]
    for file in entry.files[:1] if kind == "half there" else entry.files:
        path = root / entry.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folders":
            path.mkdir()
        else:
            path.write_bytes(b"")
    sentence = refused(name, str(root))
    if kind == "half there" and len(entry.files) > 1:
        assert entry.files[-1] in sentence
