"""The default rule: one place says what it is, and everything that takes a rule takes that one."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mlp, points
from typer.main import get_command

import tpsgd
from tpsgd import Rule, rules
from tpsgd.cli.app import app
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.comparison.search import search

NAME = rules.default().name


def net() -> torch.nn.Module:
    return mlp(6, 32, 32, 3)


def test_the_default_learns_its_codes():
    assert rules.default().name == "readout-learned" == DEFAULT
    assert str(rules.default()) == str(rules.readout(learned=True))
    assert rules.readout().name == "readout"  # fixed codes keep their word


def test_what_trains_takes_the_default():
    assert tpsgd.fit(net(), points(40), epochs=1).rule == NAME
    assert tpsgd.fit_many(net, points(40), restarts=2, epochs=1).runs[1].rule == NAME
    planned, fixed = (tpsgd.plan(net(), (6,), rule=rule) for rule in (None, rules.readout()))
    assert planned.peak_bytes == tpsgd.plan(net(), (6,), rule=rules.default()).peak_bytes
    assert planned.peak_bytes > fixed.peak_bytes  # codes and their moments
    stream, named = tpsgd.Stream(net()), tpsgd.Stream(net(), rule=rules.default())
    for each in (stream, named):
        for _ in range(3):
            each.partial_fit(*points(40))
    for a, b in zip(stream.model.parameters(), named.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [tpsgd.TPSGDClassifier, search])
def test_words_are_those_of_the_default(make: Any):
    assert inspect.signature(make).parameters["rule"].default == NAME


class Read(Exception):
    """A model was read with this rule."""


@pytest.mark.parametrize("kind", ["c", "onnx", "page"])
def test_exports_take_the_default(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read_model(model: Any, rule: Rule, *_: Any, **__: Any) -> None:
        raise Read(rule.name)

    monkeypatch.setattr(import_module("tpsgd_export.plain_steps"), "read_model", read_model)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(Read, match=NAME):
        if kind == "page":
            tpsgd.export.page(model, tpsgd.data.load("digits"), tmp_path / "page.html")
        elif kind == "onnx":
            tpsgd.export.onnx(model, tmp_path / "step.onnx", shape=(64,))
        else:
            tpsgd.export.c(model, tmp_path, shape=(64,))
    if kind == "c":  # integers have fixed codes
        with pytest.raises(Read, match=r"readout$"):
            tpsgd.export.c(model, tmp_path, shape=(64,), numbers="int8")


@pytest.mark.parametrize("command", ["train", "plan", "adapt", "search", "export"])
def test_help_names_the_default(command: str):
    group: Any = get_command(app)
    chosen = group.commands[command]
    chosen = chosen.commands["c"] if command == "export" else chosen
    (option,) = [p for p in chosen.params if p.name == "rule"]
    assert NAME in f"{option.default} {option.show_default}"
