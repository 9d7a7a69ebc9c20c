"""Skipped tests, counted by their reason, with what would let them run."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

ADVICE = {  # a pattern of the reason, and what to install or to do
    r"\bGPU\b": "a machine with a CUDA GPU",
    r"WebAssembly": "apt install clang lld, or pip install ziglang",
    r"Chromium": "apt install chromium",
    r"riscv": "apt install gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf qemu-system-misc",
    r"\bavr-|simavr": "apt install gcc-avr avr-libc simavr",
    r"powerpc|qemu-ppc": "apt install gcc-powerpc-linux-gnu libc6-dev-powerpc-cross qemu-user",
    r"cmake": "apt install cmake",
    r"arm-none-eabi|qemu": "apt install gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm",
    r"(clang|gcc|g\+\+) is not installed": r"apt install \1",
    r"C compiler": "apt install gcc",
    r"C\+\+ compiler": "apt install g++",
    r"Flower|\bray\b": "make fleet",
    r"TPSGD_DATA has no (\w+)": r"tpsgd data fetch \1, into the folder that TPSGD_DATA names",
    r"TPSGD_DATA": "TPSGD_DATA=FOLDER, for example by tpsgd data fetch mnist",
    r"\broot\b|superuser": "another user than root",
    r"(\w+) (?:is not installed|runs the|writes the)": r"pip install \1",
}
MISSING = re.compile(r"could not import '(\w+).*")


def advice(reason: str) -> str:
    """What would let a test with this reason run; "" if nothing would.

    Examples:
        >>> advice("pandas is not installed")
        'pip install pandas'
        >>> advice("not for recurrent nets")
        ''
    """
    for pattern, words in ADVICE.items():
        if match := re.search(pattern, reason):
            return match.expand(words).replace(" PIL", " pillow")
    return ""


def skipped_lines(reports: Iterable[Any]) -> list[str]:
    """A line for each reason, the most frequent first."""
    words = (str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    reasons = Counter(MISSING.sub(r"\1 is not installed", reason) for reason in words)
    lines = []
    for reason, count in reasons.most_common():
        words = advice(reason)
        lines.append(f"{count:5}  {reason}" + (f"  ->  {words}" if words else ""))
    return lines
