"""Draw the one figure of the README: backprop beside a local rule.

python docs/figure.py        # writes docs/assets/how-it-works.png
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Okabe and Ito's colours, told apart by every kind of colour vision.
FORWARD, GRADIENT, TARGET = "#0072B2", "#D55E00", "#007A5A"
INK, QUIET, LINE = "#1b1f24", "#5b6470", "#b9c0c9"
LAYER, HELD = "#dcebf7", "#56B4E9"
TOP, STEP, HIGH, WIDE = 7.6, 2.15, 0.95, 2.3  # of the column of blocks
X, BESIDE = 2.35, 0.32  # its middle, and how far from it the arrows run


def main() -> None:
    """Two panels on one white card, which reads on a dark page as well."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"})
    figure = plt.figure(figsize=(10, 6.1))
    figure.patch.set_alpha(0)
    card = figure.add_axes((0, 0, 1, 1))
    card.set(xlim=(0, 20), ylim=(0, 12.2))
    card.axis("off")
    card.add_patch(
        FancyBboxPatch(
            (0.3, 0.3), 19.4, 11.6, boxstyle="round,pad=0.25,rounding_size=0.4",
            facecolor="white", edgecolor=LINE, linewidth=1,
        )
    )  # fmt: skip
    card.plot([9.55, 9.55], [0.7, 11.5], color=LINE, lw=1)
    for x, draw in ((0.015, backprop), (0.49, local)):
        axes = figure.add_axes((x, 0.03, 0.5, 0.94))
        axes.set(xlim=(0, 10), ylim=(-0.3, 10.9))
        axes.axis("off")
        draw(axes)
    target = Path(__file__).parent / "assets" / "how-it-works.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=170, metadata={"Software": None})


def backprop(axes: Axes) -> None:
    """The error goes back through every layer, so every layer's activations wait for it."""
    title(axes, "Backpropagation", "one error for the whole net")
    for i in range(3):
        block(axes, i, BESIDE)
        memory(axes, i, held=True)
        if i:  # the way back
            up = level(i) + HIGH / 2, level(i - 1) - HIGH / 2
            arrow(axes, (X + BESIDE, up[0]), (X + BESIDE, up[1]), GRADIENT)
    loss(axes, 2, "label  $y^*$")
    say(axes, X + 1.0, level(0.5), "the error travels back\nthrough all layers", GRADIENT, "left")
    foot(axes, "All activations are kept until the error returns:", "memory grows with depth.")


def local(axes: Axes) -> None:
    """Every block has its own target and loss; gradients stop at its edge."""
    title(axes, "Target projection (tpSGD)", "one error for every block")
    for i in range(3):
        block(axes, i, BESIDE)
        memory(axes, i, held=i == 1)
        loss(axes, i, f"target  $P_{i + 1}\\,y^*$" if i < 2 else "label  $y^*$")
        if i < 2:
            edge = level(i + 0.5)
            axes.plot([0.45, 9.45], [edge] * 2, color=GRADIENT, lw=1.3, ls=(0, (3, 3)))
            say(axes, 9.45, edge + 0.25, "gradients stop here", GRADIENT, "right", size=11)
    foot(
        axes,
        "One block's activations at a time: memory stays flat.",
        "$P_i$ holds fixed random codes, one row for each class.",
    )


def loss(axes: Axes, i: int, target: str) -> None:
    """The loss beside block i: the block's output and a target in, a gradient out."""
    y, x = level(i), X + 3.1
    axes.text(
        x, y, "loss", color=GRADIENT, fontsize=13, weight="bold", va="center", ha="center",
        bbox={"boxstyle": "round,pad=0.45", "fc": "#fdeee4", "ec": GRADIENT, "lw": 1.6},
    )  # fmt: skip
    arrow(axes, (X + WIDE / 2, y - 0.2), (x - 0.68, y - 0.2), FORWARD)
    arrow(axes, (x - 0.66, y + 0.2), (X + WIDE / 2 + 0.04, y + 0.2), GRADIENT)
    arrow(axes, (x + 1.45, y), (x + 0.7, y), TARGET)
    say(axes, x + 1.58, y, target, TARGET, "left", "bold")


def level(i: float) -> float:
    """The height of block i's middle."""
    return TOP - i * STEP


def block(axes: Axes, i: int, beside: float) -> None:
    """One block and the arrow into it, a little left of its middle."""
    y, x = level(i), X - beside
    axes.add_patch(
        FancyBboxPatch(
            (X - WIDE / 2 + 0.1, y - HIGH / 2 + 0.1), WIDE - 0.2, HIGH - 0.2,
            boxstyle="round,pad=0.1,rounding_size=0.16",
            facecolor=LAYER, edgecolor=FORWARD, linewidth=1.6,
        )
    )  # fmt: skip
    say(axes, X, y, f"block {i + 1}", INK, weight="bold")
    start = level(i - 1) - HIGH / 2 if i else y + 1.2
    arrow(axes, (x, start), (x, y + HIGH / 2), FORWARD)
    if not i:
        say(axes, x, start + 0.3, "input  $x$", FORWARD, weight="bold")


def memory(axes: Axes, i: int, held: bool) -> None:
    """A stack of cells beside a block: its activations, in memory or not."""
    for k in range(3):
        cell(axes, level(i) - 0.4 + 0.29 * k, held)


def cell(axes: Axes, y: float, held: bool = True) -> None:
    """A cell of memory, full or empty."""
    axes.add_patch(
        FancyBboxPatch(
            (0.45, y), 0.42, 0.2, boxstyle="round,pad=0.0,rounding_size=0.04",
            facecolor=HELD if held else "white", edgecolor=FORWARD if held else LINE, lw=1.1,
        )
    )  # fmt: skip


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A straight arrow."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=15, lw=2.2, color=colour,
            shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def say(
    axes: Axes, x: float, y: float, text: str, colour: str, side: str = "center",
    weight: str = "normal", size: float = 13,
) -> None:  # fmt: skip
    """Words at a place; `side` is where they are held."""
    axes.text(
        x, y, text, color=colour, fontsize=size, weight=weight, va="center", ha=side,
        linespacing=1.35,
    )  # fmt: skip


def title(axes: Axes, name: str, below: str) -> None:
    """A panel's heading."""
    say(axes, 0.45, 10.5, name, INK, "left", "bold", size=17)
    say(axes, 0.45, 9.85, below, QUIET, "left")


def foot(axes: Axes, text: str, more: str) -> None:
    """What the cells beside the blocks mean."""
    cell(axes, 1.33)
    say(axes, 1.1, 1.42, "activations in memory", QUIET, "left", size=12)
    say(axes, 0.45, 0.78, text, INK, "left", size=12)
    say(axes, 0.45, 0.2, more, INK, "left", size=12)


if __name__ == "__main__":
    main()
