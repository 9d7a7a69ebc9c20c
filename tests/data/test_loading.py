"""Loading: max_train and seed, what is imported, and real data."""

import subprocess
import sys

import pytest
import torch

from tpsgd import TpsgdError, data


def test_max_train_is_seeded_and_stratified_and_keeps_the_test_set():
    one, again, other = (data.load("digits", max_train=100, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.train[0], again.train[0])
    assert not torch.equal(one.train[0], other.train[0])
    assert torch.equal(one.test[0], other.test[0])
    assert one.train[1].bincount().tolist() == pytest.approx([10] * 10, abs=1)
    assert "100 of 1438 training samples, stratified, seed 1" in one.note


def test_max_train_beyond_the_data_keeps_all_samples():
    assert data.load("digits", max_train=10**6).note == data.load("digits").note


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": value} for value in (-1, 1.5, "a", None, 2**63)),
        *({"max_train": value} for value in (0, -5, 2.5, "3", 2**63)),
    ],
)
def test_a_wrong_seed_or_max_train_is_refused(wrong):
    with pytest.raises(TpsgdError, match=r"(seed|max_train) must be a whole number from [01] to"):
        data.load("digits", **wrong)


ALONE = """
import sys

class Nothing_else:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"there is no {name}")

sys.meta_path.insert(0, Nothing_else())
import tpsgd_adapt, tpsgd.data
for module in (tpsgd, tpsgd.adapt, tpsgd.data):
    for name in module.__all__:
        if name not in ("TPSGDClassifier", "TPSGDRegressor", "fleet"):
            getattr(module, name)
print("all there")
"""


def test_importing_needs_torch_and_numpy_alone():
    """Whatever torch may import where it is there: it is not there, and every name is.

    But for the two classes that inherit from scikit-learn's, and the fleet, which needs Flower.
    """
    images, files = ("PIL", "matplotlib"), ("pooch", "requests", "safetensors", "onnx")
    others = ("onnxruntime", "optuna", "rich", "scipy", "sklearn", "tqdm", "typer")
    call = [sys.executable, "-c", ALONE, *images, *files, *others]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.stdout.strip() == "all there", done.stderr


@pytest.mark.real_data("eeg")
def test_a_real_table_is_loaded(data_root):
    eeg = data.load(str(data_root / "eeg" / "data.csv"), max_train=100)
    assert eeg.shape == (178,) and eeg.classes == tuple("12345")
    assert len(eeg.test[1]) == 2300 and eeg.train[1].bincount().tolist() == [20] * 5


@pytest.mark.real_data("imagenette2-160")
def test_a_real_image_folder_is_loaded(data_root, tmp_path):
    for part in ("train", "val"):
        for folder in sorted((data_root / "imagenette2-160" / part).iterdir())[:3]:
            (tmp_path / part / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:4]:
                (tmp_path / part / folder.name / file.name).symlink_to(file)
    few = data.load(f"{tmp_path}@32")
    assert few.train[0].shape == few.test[0].shape == (12, 3, 32, 32)
    assert few.classes == ("n01440764", "n02102040", "n02979186")
    assert 0.2 < few.train[0].mean() < 0.8
