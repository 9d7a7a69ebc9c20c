"""Weights out of files and into models: what is read, what is refused, and nothing half done."""

import os
import pickle
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.serialization import config

from tpsgd.common.errors import TpsgdError
from tpsgd_adapt import weights


def net() -> nn.Module:
    """A backbone with BatchNorm, and a head."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    made = nn.Sequential()
    made.add_module("features", features)
    made.add_module("head", nn.Linear(4, 2))
    return made


def other() -> nn.Module:
    """The same net with other numbers."""
    made = net()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(1)
    return made


def state() -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net().state_dict().items()}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def write(file: Path, tensors: dict[str, Tensor]) -> Path:
    if file.suffix == ".npz":
        np.savez(file, **{k: v.numpy() for k, v in tensors.items()})  # type: ignore[arg-type]
    elif file.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(tensors, file)
    else:
        torch.save(tensors, file)
    return file


def one_sentence(error: pytest.ExceptionInfo[TpsgdError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    for word in words:
        assert word in text


# ---- load ----------------------------------------------------------------------------------------

SUFFIXES = (".pth", ".pt", ".npz", ".safetensors")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_tensors(suffix: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"weights{suffix}", state())
    assert same(weights.load(file), state())
    assert same(weights.load(str(file)), state())


def test_the_old_format_and_files_without_checksums(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same(weights.load(tmp_path / "old.pth"), state())
    config.save.compute_crc32 = False
    try:
        torch.save(state(), tmp_path / "fast.pth")
    finally:
        config.save.compute_crc32 = True
    assert same(weights.load(tmp_path / "fast.pth"), state())


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_checkpoint_is_unwrapped(key: str, tmp_path: Path) -> None:
    parallel = {f"module.{k}": v for k, v in state().items()}
    torch.save({key: parallel, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "a.pth")
    assert same(weights.load(tmp_path / "a.pth"), state())


def test_a_prefix_that_some_names_have_stays(tmp_path: Path) -> None:
    some = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert weights.load(write(tmp_path / "a.pt", some)).keys() == some.keys()


def test_another_byte_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([1.5, -2.0], ">f4"))
    assert weights.load(tmp_path / "a.npz")["a"].tolist() == [1.5, -2.0]


class Trap:
    """Runs a command where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("how", ["torch", "old", "pickle", "npz"])
def test_what_could_run_code_is_refused(how: str, tmp_path: Path) -> None:
    trap, file = {"a": Trap(tmp_path / "ran")}, tmp_path / "a.pth"
    if how == "pickle":
        file.write_bytes(pickle.dumps(trap))
    elif how == "npz":
        file = tmp_path / "a.npz"
        np.savez(file, a=np.array([trap["a"]], dtype=object))
    else:
        torch.save(trap, file, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(TpsgdError) as error:
        weights.load(file)
    one_sentence(error, str(file), "run any code", "state_dict()")
    assert not (tmp_path / "ran").exists()


def test_a_whole_model_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1), tmp_path / "a.pth")
    with pytest.raises(TpsgdError) as error:
        weights.load(tmp_path / "a.pth")
    one_sentence(error, "run any code")


def test_indices_outside_of_a_sparse_tensor_are_refused(tmp_path: Path) -> None:
    at, ones = torch.tensor([[0, 10**6]]), torch.ones(2)
    bad = torch.sparse_coo_tensor(at, ones, (3,), check_invariants=False)
    with pytest.raises(TpsgdError) as error:
        weights.load(write(tmp_path / "a.pth", {"a": bad}))
    one_sentence(error, "damaged")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_that_are_missing_empty_or_cut_short(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(TpsgdError, match="does not exist"):
        weights.load(tmp_path / f"none{suffix}")
    file = tmp_path / f"folder{suffix}"
    file.mkdir()
    with pytest.raises(TpsgdError, match="is a folder"):
        weights.load(file)
    file = tmp_path / f"empty{suffix}"
    file.touch()
    with pytest.raises(TpsgdError, match="is empty"):
        weights.load(file)
    file = write(tmp_path / f"whole{suffix}", state())
    whole = file.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:-9], whole[:7], b"<html>not found</html>"):
        file.write_bytes(part)
        with pytest.raises(TpsgdError) as error:
            weights.load(file)
        one_sentence(error, str(file), "damaged")


@pytest.mark.parametrize("suffix", [".pth", ".npz"])
def test_a_flipped_bit_is_found(suffix: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"a{suffix}", {"a": torch.zeros(10_000)})
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(TpsgdError) as error:
        weights.load(file)
    one_sentence(error, "damaged")


def test_a_header_that_asks_for_too_much_memory(tmp_path: Path) -> None:
    head = BytesIO()
    large = {"descr": "<f4", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(head, large)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", head.getvalue())
    with pytest.raises(TpsgdError, match="damaged"):
        weights.load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("content", "words"),
    [(5, "one int"), ({}, "nothing"), ({"a": 3}, "'a', of type int"), ({3: torch.ones(1)}, "3")],
)
def test_files_of_other_things(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(TpsgdError) as error:
        weights.load(tmp_path / "a.pth")
    one_sentence(error, words, "expected tensors by name")


def test_other_suffixes_and_arrays(tmp_path: Path) -> None:
    for name in ("a.h5", "a"):
        with pytest.raises(TpsgdError) as error:
            weights.load(tmp_path / name)
        one_sentence(error, ".safetensors", ".npz")
    np.savez(tmp_path / "a.npz", a=np.array(["words"]))
    with pytest.raises(TpsgdError, match="damaged"):
        weights.load(tmp_path / "a.npz")


# ---- put -----------------------------------------------------------------------------------------


def test_all_of_it() -> None:
    model = other()
    weights.put(model, state())
    assert same(model.state_dict(), state())
    assert all(p.requires_grad for p in model.parameters())


def test_a_part_leaves_the_rest() -> None:
    model, head = other(), other().state_dict()["head.weight"]
    found = {k: v for k, v in state().items() if not k.startswith("head")}
    weights.put(model, {**found, "head.weight": torch.zeros(9, 9), "fc": torch.ones(1)}, "features")
    assert torch.equal(model.state_dict()["features.0.weight"], state()["features.0.weight"])
    assert torch.equal(model.state_dict()["head.weight"], head)
    weights.put(model, state(), ("features.0", "head"))
    assert torch.equal(model.state_dict()["head.weight"], state()["head.weight"])
    weights.put(model, {**state(), "fc": torch.ones(1)}, "")
    assert same(model.state_dict(), state())


def test_half_precision_takes_the_models_type() -> None:
    model = other()
    half = {k: v.half() if v.is_floating_point() else v for k, v in state().items()}
    weights.put(model, half)
    want = {k: v.float() if v.is_floating_point() else v for k, v in half.items()}
    assert same(model.state_dict(), want)
    assert model.state_dict()["features.0.weight"].dtype is torch.float32


def test_old_files_without_batch_norms_counter() -> None:
    model = other()
    weights.put(model, {k: v for k, v in state().items() if "num_batches" not in k})
    assert same(model.state_dict(), state())


def test_pruned_weights_go_in_as_their_product() -> None:
    pruned = net()
    head: Any = pruned.get_submodule("head")
    prune.random_unstructured(head, "weight", amount=0.5)
    prune.ln_structured(pruned.get_submodule("features.0"), "weight", amount=0.5, n=2, dim=0)
    model = other()
    weights.put(model, pruned.state_dict())
    assert torch.equal(model.state_dict()["head.weight"], head.weight)
    assert (model.state_dict()["head.weight"] == 0).sum() == 4
    again = net()
    prune.identity(again.get_submodule("head"), "weight")  # a pruned model takes them as they are
    prune.identity(again.get_submodule("features.0"), "weight")
    weights.put(again, pruned.state_dict())
    assert same(again.state_dict(), pruned.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_weights_go_in_dense(layout: Any, tmp_path: Path) -> None:
    want, model = torch.tensor([[0.0, 2, 0, 0], [0, 0, 0, -1]]), other()
    found = {**state(), "head.weight": want.to_sparse(layout=layout)}
    weights.put(model, weights.load(write(tmp_path / "a.pth", found)))
    assert torch.equal(model.state_dict()["head.weight"], want)


BAD = {
    "missing": ({"head.weight": None}, ("lack 'head.weight'",)),
    "extra": ({"fc.weight": torch.ones(1)}, ("'fc.weight'", "needed=")),
    "shape": ({"head.weight": torch.ones(3, 4)}, ("'head.weight'", "(3, 4)", "(2, 4)")),
    "nan": ({"head.bias": torch.tensor([0.0, float("nan")])}, ("'head.bias'", "not finite")),
    "inf": ({"head.bias": torch.tensor([0.0, float("inf")])}, ("'head.bias'", "not finite")),
    "too large": ({"head.bias": torch.tensor([0.0, 1e300]).double()}, ("not finite",)),
    "kind": ({"head.bias": torch.ones(2, dtype=torch.int8)}, ("int8", "float32")),
    "mask": (
        {"head.weight": None, "head.weight_orig": torch.ones(2, 4),
         "head.weight_mask": torch.ones(1)},
        ("'head.weight_mask'", "(1,)", "(2, 4)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_changes_nothing(name: str) -> None:
    change, words = BAD[name]
    found = {k: v for k, v in {**state(), **change}.items() if v is not None}
    model, before = other(), other().state_dict()
    with pytest.raises(TpsgdError) as error:
        weights.put(model, found)
    one_sentence(error, *words)
    assert same(model.state_dict(), before)


def test_long_lists_are_cut_and_prefixes_must_exist() -> None:
    with pytest.raises(TpsgdError, match="and 5 more"):
        weights.put(net(), {})
    with pytest.raises(TpsgdError, match=r"'feat'.*features, head"):
        weights.put(net(), state(), "feat")
    with pytest.raises(TpsgdError, match=r"'head\.bias'"):
        weights.put(net(), {"head.weight": torch.ones(2, 4)}, ("head",))


@pytest.mark.real_data("vgg16")
def test_the_real_vgg16(data_root: Path) -> None:
    from tpsgd.zoo.vgg import vgg

    model = vgg(16, (3, 32, 32), 10)
    found = weights.load(data_root / "vgg16" / "vgg16_features.npz")
    weights.put(model, found, needed="features")
    own = model.state_dict()
    assert len(found) == 26 and all(torch.equal(own[k], v) for k, v in found.items())
