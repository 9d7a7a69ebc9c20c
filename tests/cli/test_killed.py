"""SIGKILL at random moments of a command: nothing half-written is taken for whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed.py")
COMMANDS = ["compare", "adapt", "search", "search-adaptors", "export-c", "export-onnx"]


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_killed_can_be_started_again(command):
    if command == "export-onnx":
        pytest.importorskip("onnx")
    words = [sys.executable, str(SCRIPT), command, "6", "0"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith("6 kills")
