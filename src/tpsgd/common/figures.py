"""The look of all figures, and figures as files. Only drawing needs matplotlib."""

import io
from pathlib import Path
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole

METADATA = {"png": {"Software": None}, "svg": {"Date": None}}  # not written: files stay the same
# Okabe and Ito's colours, which colour-blind readers can tell apart, and four darker ones.
COLOURS = (
    *("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#8F7F00", "#009E73", "#CC79A7"),
    *("#7A3E9D", "#7B2D00", "#00504A", "#8C564B"),
)
LOOK: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#ececec",
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
}


def as_bytes(figure: Any, kind: str = "png") -> bytes:
    """A figure as the content of a PNG or an SVG file."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=160, metadata=METADATA[kind])
    return content.getvalue()


def check_file(file: Path, what: str) -> None:
    """Refuse a file name that no figure can be written to."""
    if file.suffix.lower()[1:] not in METADATA:
        raise TpsgdError(f"a figure of a {what} is FILE.png or FILE.svg, not {file}")
    if not file.parent.is_dir():
        raise TpsgdError(f"cannot write {file}: there is no folder {file.parent}")


def write(figure: Any, file: Path) -> Path:
    """Write a figure as a PNG or an SVG, by the suffix of the file name."""
    try:
        return write_whole(file, as_bytes(figure, file.suffix.lower()[1:]))
    except OSError as error:
        raise TpsgdError(f"cannot write {file}: {error.strerror or error}") from error
