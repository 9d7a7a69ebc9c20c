"""A comparison as files: `results.json`, plots as PNGs, and `report.html` with all of it."""

import json
from pathlib import Path

from tpsgd.common.files import write_whole
from tpsgd.comparison.report import page, plots
from tpsgd.comparison.results import Results

__all__ = ["FILES", "save", "write"]

FILES = ("results.json", "report.html")  # by which a folder is known to hold a comparison


def save(comparison: Results, folder: Path) -> Path:
    """Write `results.json`, replacing an older one only when the new one is complete."""
    text = json.dumps(comparison.as_dict(), indent=1)
    return write_whole(folder / "results.json", text.encode())


def write(comparison: Results, folder: Path) -> Path:
    """Write the record, the plots and the page; returns the file of the page."""
    save(comparison, folder)
    images = plots.draw(comparison)
    for name, image in images.items():
        write_whole(folder / f"{name}.png", image)
    return write_whole(folder / "report.html", page.render(comparison, images).encode())
