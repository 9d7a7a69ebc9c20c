"""Tests of `tpsgd.fleet`, skipped where Flower is not installed: constraints-fleet.txt."""

import importlib.util
import os
import warnings

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
installed = importlib.util.find_spec("flwr") is not None
if installed:
    with warnings.catch_warnings():  # its typer is older than the newest click
        warnings.simplefilter("ignore")
        import flwr.serverapp.strategy  # noqa: F401

collect_ignore = [] if installed else ["desk.py", "simulated.py"]
