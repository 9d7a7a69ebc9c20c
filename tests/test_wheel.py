"""The wheel: what is in it, and that it works in an empty environment, without our pins."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = (".*", "__pycache__", "build", "demo", "dist", "reproduced", "site")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
pytestmark = pytest.mark.full


def run(*words: str | Path, cwd: Path, env: Mapping[str, str] = ENVIRONMENT) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel, made from the source distribution, which is there too."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder / "index")]
    if subprocess.run([*pip, "hatchling"], env=ENVIRONMENT, capture_output=True).returncode:
        pytest.skip("pip cannot reach an index of packages")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    build = [sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "checkout"]
    run(*build, cwd=folder, env=os.environ)
    return folder / "dist"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    source = built.parent / "checkout" / "src"
    files = (file for file in (source / "tpsgd").rglob("*") if file.is_file())
    assert names == {file.relative_to(source).as_posix() for file in files}
    assert "tpsgd/py.typed" in names


def test_the_source_distribution_has_what_its_tests_need(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert names >= {"README.md", "LICENSE", "constraints.txt", "Makefile", "tests/conftest.py"}


def test_it_works_in_an_empty_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    (tmp_path / "torch.txt").write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    run(programs / "python", "-m", "pip", "install", "-q", "-c", "torch.txt", wheel, cwd=tmp_path)
    run(programs / "python", "-m", "pip", "check", cwd=tmp_path)
    assert "Train neural networks" in run(programs / "tpsgd", "--help", cwd=tmp_path)
    trained = run(programs / "tpsgd", "train", "--data", "digits", cwd=tmp_path)
    assert float(re.search(r"test accuracy ([\d.]+)%", trained)[1]) > 90
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "quickstart.py").write_text(re.search(r"```python\n(.*?)```", readme, re.S)[1])
    printed = run(programs / "python", "quickstart.py", cwd=tmp_path)
    assert printed.startswith("readout-learned:")
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 90
