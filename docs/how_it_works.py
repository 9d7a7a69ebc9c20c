"""Draw how backprop and a local rule learn: docs/assets/how-it-works.png.

python docs/how_it_works.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Okabe and Ito's colours, for every kind of colour vision.
FORWARD, GRADIENT, TARGET = "#0072B2", "#D55E00", "#007A5A"
INK, QUIET, LINE = "#1b1f24", "#5b6470", "#b9c0c9"
HIGH, WIDE = 0.95, 2.3  # of a block
X, SIDE = 2.35, 0.32  # the middle of the blocks, and how far from it the arrows run


def main() -> None:
    """Two panels on one white card, which is readable on a dark page too."""
    figure = plt.figure(figsize=(10, 6.1))
    figure.patch.set_alpha(0)
    card = panel(figure.add_axes((0, 0, 1, 1)), (0, 20), (0, 12.2))
    box(card, 0.3, 0.3, 19.4, 11.6, 0.25, 0.4, "white", LINE, 1)
    card.plot([9.55, 9.55], [0.7, 11.5], color=LINE, lw=1)
    for x, draw in ((0.015, backprop), (0.49, local)):
        draw(panel(figure.add_axes((x, 0.03, 0.5, 0.94)), (0, 10), (-0.3, 10.9)))
    file = Path(__file__).parent / "assets" / "how-it-works.png"
    figure.savefig(file, dpi=170, metadata={"Software": None})


def panel(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> Axes:
    """Axes without a frame."""
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return axes


def backprop(axes: Axes) -> None:
    """The error goes back through every layer, and every layer's activations wait for it."""
    say(axes, 0.45, 10.5, "Backpropagation", INK, "left", "bold", size=17)
    say(axes, 0.45, 9.85, "one error for the whole net", QUIET, "left")
    for i in range(3):
        block(axes, i, stored=True)
        if i:  # the way back
            bottom, top = level(i) + HIGH / 2, level(i - 1) - HIGH / 2
            arrow(axes, (X + SIDE, bottom), (X + SIDE, top), GRADIENT)
    loss(axes, 2, "label  $y^*$")
    say(axes, X + 1.0, level(0.5), "the error travels back\nthrough all layers", GRADIENT, "left")
    foot(axes, "All activations are kept until the error returns:", "memory grows with depth.")


def local(axes: Axes) -> None:
    """Every block has its own target and loss; gradients stop at its edge."""
    say(axes, 0.45, 10.5, "Target projection (tpSGD)", INK, "left", "bold", size=17)
    say(axes, 0.45, 9.85, "one error for every block", QUIET, "left")
    for i in range(3):
        block(axes, i, stored=i == 1)
        loss(axes, i, f"target  $P_{i + 1}\\,y^*$" if i < 2 else "label  $y^*$")
        if i < 2:
            edge = level(i + 0.5)
            axes.plot([0.45, 9.45], [edge] * 2, color=GRADIENT, lw=1.3, ls=(0, (3, 3)))
            say(axes, 9.45, edge + 0.25, "gradients stop here", GRADIENT, "right", size=11)
    codes = "$P_i$ holds fixed random codes, one row for each class."
    foot(axes, "One block's activations at a time: memory stays flat.", codes)


def level(i: float) -> float:
    """The height of block i's middle."""
    return 7.6 - 2.15 * i


def block(axes: Axes, i: int, stored: bool) -> None:
    """A block, the arrow into it, and three cells of memory: its activations, stored or not."""
    y, x = level(i), X - SIDE
    bottom = y - HIGH / 2 + 0.1
    box(axes, X - WIDE / 2 + 0.1, bottom, WIDE - 0.2, HIGH - 0.2, 0.1, 0.16, "#dcebf7", FORWARD)
    say(axes, X, y, f"block {i + 1}", INK, weight="bold")
    start = level(i - 1) - HIGH / 2 if i else y + 1.2
    arrow(axes, (x, start), (x, y + HIGH / 2), FORWARD)
    if not i:
        say(axes, x, start + 0.3, "input  $x$", FORWARD, weight="bold")
    for k in range(3):
        cell(axes, y - 0.4 + 0.29 * k, stored)


def loss(axes: Axes, i: int, target: str) -> None:
    """The loss next to block i: the block's output and a target in, a gradient out."""
    y, x = level(i), X + 3.1
    frame = {"boxstyle": "round,pad=0.45", "fc": "#fdeee4", "ec": GRADIENT, "lw": 1.6}
    say(axes, x, y, "loss", GRADIENT, weight="bold", bbox=frame, linespacing=None)
    arrow(axes, (X + WIDE / 2, y - 0.2), (x - 0.68, y - 0.2), FORWARD)
    arrow(axes, (x - 0.66, y + 0.2), (X + WIDE / 2 + 0.04, y + 0.2), GRADIENT)
    arrow(axes, (x + 1.45, y), (x + 0.7, y), TARGET)
    say(axes, x + 1.58, y, target, TARGET, "left", "bold")


def cell(axes: Axes, y: float, stored: bool = True) -> None:
    """A cell of memory, full or empty."""
    colours = ("#56B4E9", FORWARD) if stored else ("white", LINE)
    box(axes, 0.45, y, 0.42, 0.2, 0.0, 0.04, *colours, 1.1)


def foot(axes: Axes, *lines: str) -> None:
    """What the cells mean, and what follows."""
    cell(axes, 1.33)
    say(axes, 1.1, 1.42, "activations in memory", QUIET, "left", size=12)
    for y, line in zip((0.78, 0.2), lines, strict=True):
        say(axes, 0.45, y, line, INK, "left", size=12)


def box(
    axes: Axes, x: float, y: float, width: float, height: float, pad: float, rounding: float,
    face: str, edge: str, line: float = 1.6,
) -> None:  # fmt: skip
    """A rounded rectangle."""
    style = f"round,pad={pad},rounding_size={rounding}"
    patch = FancyBboxPatch((x, y), width, height, style, fc=face, ec=edge, lw=line)
    axes.add_patch(patch)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A straight arrow."""
    shape = {"arrowstyle": "-|>", "mutation_scale": 15, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, lw=2.2, color=colour, **shape))


def say(
    axes: Axes, x: float, y: float, text: str, colour: str, side: str = "center",
    weight: str = "normal", size: float = 13, **more: object,
) -> None:  # fmt: skip
    """Words at a place; `side` is the end that is fixed there."""
    looks = {"color": colour, "fontsize": size, "weight": weight, "linespacing": 1.35}
    axes.text(x, y, text, va="center", ha=side, **(looks | more))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
