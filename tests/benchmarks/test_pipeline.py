"""The benchmark of pipelines: what it adds to the library's pipeline still fits it."""

import inspect
from importlib import import_module
from pathlib import Path

from tpsgd_parallel.pipeline import Pipeline

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_timed_pipeline_trains_as_the_librarys_is_called(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    timed = import_module("pipeline").TimedPipeline
    library, benchmark = (list(inspect.signature(c.train).parameters) for c in (Pipeline, timed))
    assert benchmark == library
