"""`tpsgd train` with its defaults on a small table."""

import csv
import json
from pathlib import Path

import pytest
from sklearn.datasets import load_iris, load_wine


@pytest.mark.parametrize(("load", "least"), [(load_iris, 0.9), (load_wine, 0.94)])
def test_a_small_table_is_learned_by_default(says, load, least, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = load(return_X_y=True)
    with Path("table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [[f"f{i}" for i in range(x.shape[1])] + ["label"], *map(list.__add__, *columns(x, y))]
        )
    code, out, _ = says("train", "--data", "table.csv", "--model", "mlp:64", "--json")
    record = json.loads(out)
    assert code == 0 and record["accuracy"] >= least
    assert "steps a block" in record["length"]


def columns(x, y):
    """Rows of numbers, and of names of classes."""
    return x.tolist(), [[f"class {label}"] for label in y]
