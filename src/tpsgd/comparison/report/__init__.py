"""A comparison as files: `results.json`, the plots as PNGs, and `report.html`, which holds all."""

import json
from pathlib import Path

from tpsgd.comparison.compare import Comparison
from tpsgd.comparison.report import page, plots
from tpsgd.files import write_whole

__all__ = ["save", "write"]


def save(comparison: Comparison, folder: Path) -> Path:
    """Write `results.json`: the old one stays until the new one is whole."""
    text = json.dumps(comparison.as_dict(), indent=1)
    return write_whole(folder / "results.json", text.encode())


def write(comparison: Comparison, folder: Path) -> Path:
    """Write the record, the plots and the page; the page is what is returned."""
    save(comparison, folder)
    pictures = plots.draw(comparison)
    for name, picture in pictures.items():
        write_whole(folder / f"{name}.png", picture)
    return write_whole(folder / "report.html", page.render(comparison, pictures).encode())
