"""C files as a WebAssembly module, by clang or by the compiler of the ziglang package."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tpsgd.common.errors import TpsgdError

FLAGS = (
    "-std=c99", "-O2", "-nostdlib", "-ffreestanding", "-fno-builtin", "-ffp-contract=off",
    "-Wl,--no-entry", "-Wl,--strip-all",
)  # fmt: skip
MISSING = (
    "a page needs a compiler for WebAssembly: run `pip install ziglang`, or install clang and lld "
    "(Debian and Ubuntu: `apt install clang lld`; macOS: `brew install llvm lld`)"
)


def compiled(sources: Mapping[str, str]) -> bytes:
    """The WebAssembly module of C files, by name; it exports what `export_name` marks."""
    compiler = wasm_compiler()
    if compiler is None:
        raise TpsgdError(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in sources.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        files = [name for name in sources if name.endswith(".c")]
        command = [*compiler, *FLAGS, "-o", "net.wasm", *files]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if run.returncode:
            raise TpsgdError(f"{compiler[0]} cannot compile the net for WebAssembly:\n{run.stderr}")
        return Path(folder, "net.wasm").read_bytes()


def wasm_compiler() -> list[str] | None:
    """The words that start a compiler for WebAssembly; None if none is installed."""
    if (clang := shutil.which("clang")) and shutil.which("wasm-ld"):  # Apple's has no WebAssembly
        targets = subprocess.run([clang, "--print-targets"], capture_output=True, text=True)
        if "wasm32" in targets.stdout:
            return [clang, "--target=wasm32"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-freestanding"]
    if zig := shutil.which("zig"):
        return [zig, "cc", "-target", "wasm32-freestanding"]
    return None
