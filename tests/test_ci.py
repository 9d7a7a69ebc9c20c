"""`.ci/run`, with programs in place of make and apt-get: what it prints last, and its status."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
TOOLS = ("bash", "dirname", "grep", "mktemp", "rm", "tail", "tee", "timeout", "true")
CLOSING = {"test": "9 passed, 1 skipped in 3.20s", "test-all": "7 passed in 65.00s (0:01:05)"}
CLOSING |= {"units": "6 passed in 4.00s", "fleet": "5 passed in 2.00s"}
FAILED = "1 failed, 8 passed in 3.10s"

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="timeout is not installed")


def ends(tmp_path, outputs, failing=(), installs=False):
    """The last lines and the status, where make's targets print these lines and some fail."""
    programs = tmp_path / "bin"
    for folder in (programs, tmp_path / ".ci", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))
    cases = [f"{t}) echo '{line}'; exit {int(t in failing)};;" for t, line in outputs.items()]
    others = [f"{target}) exit 1;;" for target in failing if target not in outputs]
    texts = {
        programs / "make": f'case "${{!#}}" in {" ".join(cases + others)} esac',
        programs / "apt-get": f"echo \"$@\" >> '{tmp_path}/asked'; exit {int(not installs)}",
        programs / "sudo": 'shift; exec "$@"',
        tmp_path / ".venv" / "bin" / "python": "exit 1",
    }
    for file, text in texts.items():
        file.write_text(f"#!{programs}/bash\n{text}\n")
        file.chmod(0o755)
    environment = {"PATH": str(programs), "TPSGD_DATA": str(tmp_path)}
    run = subprocess.run([tmp_path / ".ci/run"], env=environment, capture_output=True, text=True)
    return run.stdout.splitlines(), run.returncode


def test_the_closing_line_of_make_test_comes_last(tmp_path):
    lines, status = ends(tmp_path, CLOSING, installs=True)
    targets = ("fleet", "units", "test-all", "test")
    closing = [line for t in targets for line in (f"make {t} passed.", CLOSING[t])]
    assert status == 0 and lines[-8:] == closing
    asked = (tmp_path / "asked").read_text()
    packages = {"clang", "lld", "qemu-system-arm", "chromium", "picolibc-riscv64-unknown-elf"}
    packages |= {"qemu-system-misc", "avr-libc", "simavr", "libc6-dev-powerpc-cross", "qemu-user"}
    assert packages <= set(asked.split())


@pytest.mark.parametrize("target", CLOSING)
def test_what_fails_comes_last(target, tmp_path):
    lines, status = ends(tmp_path, CLOSING | {target: FAILED}, failing=[target])
    assert status == 1
    assert lines[-2:] == [f"make {target} did not pass; what failed is above.", FAILED]


@pytest.mark.parametrize("line", ["3 skipped in 0.10s", "no tests ran in 0.01s", "killed"])
def test_a_run_in_which_nothing_passes_is_no_success(line, tmp_path):
    lines, status = ends(tmp_path, CLOSING | {"test-all": line})
    assert status == 1
    assert lines[-1] == ("pytest did not finish: no closing line." if line == "killed" else line)


def test_what_cannot_be_installed_is_a_line_each(tmp_path):
    lines, status = ends(tmp_path, CLOSING, failing=[".venv-fleet/.installed"])
    assert status == 0 and lines[-1] == CLOSING["test"] and CLOSING["fleet"] not in lines
    missing = [line for line in lines if "could not be installed" in line]
    assert len(missing) == 14 and missing[-1].startswith("Flower")


def test_nothing_runs_without_an_environment(tmp_path):
    lines, status = ends(tmp_path, CLOSING, failing=["setup"])
    assert status == 1 and not set(lines) & set(CLOSING.values())
