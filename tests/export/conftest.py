"""A quicker C compiler for the tests of exported programs."""

import os
import shutil

import pytest

CC = """#!/bin/sh
for word; do shift; [ "$word" = -O2 ] && word=-O0; set -- "$@" "$word"; done
exec {} "$@"
"""


@pytest.fixture(scope="session", autouse=True)
def _hasty_compiler(tmp_path_factory, request):
    """In make test, `cc` does not optimize, for a third of the time: test_c.py compares bits."""
    compiler = shutil.which("cc")
    if compiler is None or "not full" not in request.config.getoption("markexpr"):
        yield
        return
    folder = tmp_path_factory.mktemp("bin")
    (folder / "cc").write_text(CC.format(compiler))
    (folder / "cc").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        yield
