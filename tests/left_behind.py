"""Files that a run of the tests leaves in the checkout."""

import subprocess
from pathlib import Path, PurePosixPath

CACHES = {"__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache"}


def untracked(root: Path) -> set[str] | None:
    """What lies in a checkout and is not committed, caches left out; None if git does not say."""
    command = ["git", "status", "--porcelain", "--ignored", "-z"]
    try:
        listing = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listing.returncode:
        return None
    entries = (entry for entry in listing.stdout.split("\0") if entry.startswith(("??", "!!")))
    names = (entry[3:] for entry in entries)
    return {name for name in names if not CACHES & set(PurePosixPath(name).parts)}
