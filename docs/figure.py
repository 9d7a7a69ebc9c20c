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
TOP, STEP, HIGH, WIDE = 7.0, 2.15, 0.95, 2.3  # of the column of blocks
X = 2.35  # its middle


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
        axes.set(xlim=(0, 10), ylim=(-0.6, 10.9))
        axes.axis("off")
        draw(axes)
    target = Path(__file__).parent / "assets" / "how-it-works.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=170, metadata={"Software": None})


def backprop(axes: Axes) -> None:
    """The error goes back through every layer, so every layer's activations wait for it."""
    title(axes, "Backpropagation", "one error for the whole net")
    for i in range(3):
        block(axes, i)
        memory(axes, i, held=True)
    y = level(2)
    ends = (X + 3.75, y)
    say(axes, *ends, "loss", GRADIENT, "bold", box=True)
    arrow(axes, (X + WIDE / 2, y), (ends[0] - 0.72, y), FORWARD)
    say(axes, ends[0], y - 1.45, "label  $y^*$", TARGET, "bold")
    arrow(axes, (ends[0], y - 1.15), (ends[0], y - 0.42), TARGET)
    # the way back: out of the loss, up beside the column, into every block
    back = X + 2.15
    for i in (2, 1, 0):
        low, high = level(i) + 0.25, level(i - 1) + 0.25
        arrow(axes, (back, low), (X + WIDE / 2 + 0.05, low), GRADIENT)
        if i:
            axes.plot([back, back], [low, high], color=GRADIENT, lw=2.2, solid_capstyle="round")
    axes.plot([back, ends[0]], [y + 0.78] * 2, color=GRADIENT, lw=2.2, solid_capstyle="round")
    axes.plot([ends[0]] * 2, [y + 0.42, y + 0.78], color=GRADIENT, lw=2.2, solid_capstyle="round")
    say(axes, back + 0.3, level(0) - 0.75, "the error travels back\nthrough all layers",
        GRADIENT, left=True)  # fmt: skip
    foot(axes, "All activations are kept until the error returns.")


def local(axes: Axes) -> None:
    """Every block has its own target and loss; gradients stop at its edge."""
    title(axes, "Target projection (tpSGD)", "one error for every block")
    for i in range(3):
        block(axes, i)
        memory(axes, i, held=i == 1)
        y, ends = level(i), X + 3.1
        say(axes, ends, y, "loss", GRADIENT, "bold", box=True)
        arrow(axes, (X + WIDE / 2, y - 0.2), (ends - 0.72, y - 0.2), FORWARD)
        arrow(axes, (ends - 0.72, y + 0.2), (X + WIDE / 2 + 0.05, y + 0.2), GRADIENT)
        name = f"target  $P_{i + 1}\\,y^*$" if i < 2 else "label  $y^*$"
        say(axes, ends + 1.55, y, name, TARGET, "bold", left=True)
        arrow(axes, (ends + 1.45, y), (ends + 0.75, y), TARGET)
        if i < 2:
            edge = y - STEP / 2 + 0.02
            axes.plot([0.6, 9.55], [edge] * 2, color=GRADIENT, lw=1.3, ls=(0, (3, 3)))
            say(axes, 9.55, edge + 0.24, "gradients stop here", GRADIENT, right=True, size=10.5)
    foot(axes, "One block's activations at a time. $P_i$: fixed random codes, one row a class.")


def level(i: int) -> float:
    """The height of block i's middle."""
    return TOP + 0.6 - i * STEP


def block(axes: Axes, i: int) -> None:
    """One block and the arrow into it."""
    y = level(i)
    axes.add_patch(
        FancyBboxPatch(
            (X - WIDE / 2 + 0.1, y - HIGH / 2 + 0.1), WIDE - 0.2, HIGH - 0.2,
            boxstyle="round,pad=0.1,rounding_size=0.16",
            facecolor=LAYER, edgecolor=FORWARD, linewidth=1.6,
        )
    )  # fmt: skip
    say(axes, X, y, f"block {i + 1}", INK, "bold")
    above = y + STEP - HIGH / 2 if i else y + 1.25
    arrow(axes, (X, above), (X, y + HIGH / 2), FORWARD)
    if not i:
        say(axes, X, above + 0.28, "input  $x$", FORWARD, "bold")


def memory(axes: Axes, i: int, held: bool) -> None:
    """A stack of cells beside a block: its activations, in memory or not."""
    for k in range(3):
        axes.add_patch(
            FancyBboxPatch(
                (0.45, level(i) - 0.4 + 0.29 * k), 0.42, 0.2,
                boxstyle="round,pad=0.0,rounding_size=0.04",
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
    axes: Axes, x: float, y: float, text: str, colour: str, weight: str = "normal",
    left: bool = False, right: bool = False, box: bool = False, size: float = 12.5,
) -> None:  # fmt: skip
    """Words at a place."""
    frame = {"boxstyle": "round,pad=0.45", "fc": "#fdeee4", "ec": colour, "lw": 1.5}
    axes.text(
        x, y, text, color=colour, fontsize=size, weight=weight, va="center",
        ha="left" if left else "right" if right else "center", bbox=frame if box else None,
        linespacing=1.35,
    )  # fmt: skip


def title(axes: Axes, name: str, below: str) -> None:
    """A panel's heading."""
    axes.text(0.45, 10.55, name, color=INK, fontsize=16, weight="bold", va="center")
    axes.text(0.45, 9.9, below, color=QUIET, fontsize=12, va="center")


def foot(axes: Axes, text: str) -> None:
    """What the cells beside the blocks mean."""
    axes.text(0.45, 0.55, text, color=QUIET, fontsize=11, va="center")
    axes.add_patch(
        FancyBboxPatch(
            (0.45, -0.22), 0.42, 0.2, boxstyle="round,pad=0.0,rounding_size=0.04",
            facecolor=HELD, edgecolor=FORWARD, lw=1.1,
        )
    )  # fmt: skip
    axes.text(1.1, -0.12, "activations in memory", color=QUIET, fontsize=11, va="center")


if __name__ == "__main__":
    main()
