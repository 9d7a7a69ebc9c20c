"""What a run of the tests says at its end: what it skipped, and what it left in the checkout."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from left_behind import untracked
from skipped import skipped_lines


@pytest.fixture
def checkout(tmp_path):
    """A folder under git that has a file of each kind."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("/demo/\n__pycache__/\n")
    caches = "src/__pycache__/a.pyc", ".hypothesis/a"
    for name in ("trained.npz", "demo/page.html", "src/a.py", *caches):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "add", "src/a.py"], cwd=tmp_path, check=True)
    return tmp_path


def test_new_files_are_found_ignored_ones_too_but_not_caches(checkout):
    assert untracked(checkout) == {".gitignore", "trained.npz", "demo/"}


def test_without_git_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert untracked(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert untracked(tmp_path) is None


@pytest.mark.parametrize(("before", "status"), [("a.npz", 0), ("b.npz", 1)])
def test_a_run_that_leaves_a_file_fails(before, status, checkout, request):
    plugins = request.config.pluginmanager.get_plugins()
    path = str(Path(__file__).with_name("conftest.py"))
    conftest = next(p for p in plugins if getattr(p, "__file__", None) == path)
    (checkout / before).touch()
    stash = {conftest.BEFORE: untracked(checkout)}
    (checkout / "a.npz").touch()
    config = SimpleNamespace(stash=stash, rootpath=checkout)
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == status and stash[conftest.LEFT] == ["a.npz"] * status


def test_skipped_tests_are_counted_by_reason_with_what_to_install():
    reasons = [
        "could not import 'pandas': No module named 'pandas'", "pandas is not installed",
        "could not import 'PIL.Image': No module named 'PIL'", "there is no GPU here",
        "arm-none-eabi-gcc not installed", "onnxruntime runs the graphs", "g++ is not installed",
        "Flower is not installed: pip install tpsgd-fleet", "TPSGD_DATA has no mnist",
        "no compiler for WebAssembly: clang with lld, or ziglang", "not for recurrent nets",
    ]  # fmt: skip
    reports = [SimpleNamespace(longrepr=("a.py", 1, f"Skipped: {reason}")) for reason in reasons]
    first, *lines = skipped_lines(reports)
    assert first == "    2  pandas is not installed  ->  pip install pandas"
    assert [line.partition("  ->  ")[2] for line in lines] == [
        "pip install pillow", "a machine with a CUDA GPU",
        "apt install gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm",
        "pip install onnxruntime", "apt install g++", "make fleet",
        "tpsgd data fetch mnist, into the folder that TPSGD_DATA names",
        "apt install clang lld, or pip install ziglang", "",
    ]  # fmt: skip
