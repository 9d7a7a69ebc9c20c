"""The figure of a plan: what it shows, that no text covers another, and files it refuses."""

from itertools import combinations

import pytest
from matplotlib import rc_context
from matplotlib.colors import to_hex

import tpsgd
from tpsgd.common.figures import COLOURS, LOOK
from tpsgd.common.units import size
from tpsgd.memory import plot
from tpsgd.memory.meter import PARTS
from tpsgd.memory.plan import Line, Plan
from tpsgd.zoo import words as models

MB = 1 << 20
PLAIN = {"weights": 4 * MB, "gradients": MB, "optimizer": 2 * MB, "activations": 3 * MB}
LONG = "2 2: Conv2d + BatchNorm2d + LeakyReLU + MaxPool2d + Flatten"


def planned(kept: int = 0, blocks: int = 1) -> Plan:
    """A plan of two ways, the first with kept inputs and blocks."""
    inner = tuple(Line(f"{i} {LONG}", PLAIN) for i in range(blocks))
    return Plan((Line("sequential", PLAIN, kept, inner), Line("backprop", PLAIN)))


def drawn(plan: Plan):
    with rc_context(LOOK):
        made = plot.figure(plan)
        made.draw_without_rendering()
    return made


def bars(axes) -> list[list]:
    """The pieces of every bar, from left to right."""
    rows: dict[int, list] = {}
    for piece in axes.patches:
        rows.setdefault(round(piece.get_y() + piece.get_height() / 2), []).append(piece)
    return [rows[y] for y in sorted(rows)]


def texts(figure) -> list:
    """Every piece of text that is seen."""
    found = [t for one in figure.axes for t in (*one.texts, one.title, one.xaxis.label)]
    for one in figure.axes:
        ticks = zip(one.get_xticks(), one.get_xticklabels(), strict=True)
        found += [label for x, label in ticks if x <= one.get_xlim()[1]]
        found += one.get_yticklabels()
    found += figure.legends[0].get_texts()
    return [t for t in found if t.get_text()]


def test_a_bar_is_its_parts():
    panel = drawn(planned(kept=5 * MB)).axes[0]
    first, second = bars(panel)
    assert [piece.get_width() for piece in first] == [4, 1, 2, 3, 5]
    assert [piece.get_x() for piece in first] == [0, 4, 5, 7, 10]
    assert [piece.get_width() for piece in second] == [4, 1, 2, 3]
    assert panel.get_xlabel() == "MB"
    assert [text.get_text() for text in panel.texts] == ["15.0 MB", "10.0 MB"]
    assert panel.yaxis.get_inverted()  # the way that was asked for is at the top


def test_one_colour_for_each_part():
    figure = drawn(Plan((Line("a", dict.fromkeys(PARTS, MB), MB),)))
    shades = [to_hex(piece.get_facecolor()) for piece in figure.axes[0].patches]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(set(shades)) == len(PARTS) + 1 and set(map(str.upper, shades[:-1])) < set(COLOURS)
    handles = [to_hex(handle.get_facecolor()) for handle in figure.legends[0].get_patches()]
    assert handles == shades
    assert names == [
        *("weights", "gradients", "optimizer state", "activations", "class codes"),
        *("cuDNN workspace", "kept inputs"),
    ]


def test_what_nobody_has_is_not_in_the_legend():
    names = [t.get_text() for t in drawn(planned()).legends[0].get_texts()]
    assert names == ["weights", "gradients", "optimizer state", "activations"]


@pytest.mark.parametrize(("times", "cut"), [(4, False), (6, True), (5000, True)])
def test_kept_inputs_that_dwarf_the_rest_are_cut(times, cut):
    plan = planned(kept=times * 10 * MB)
    panel = drawn(plan).axes[0]
    first = bars(panel)[0]
    assert bool(first[-1].get_width() < 10) is cut and bool(first[-1].get_hatch()) is cut
    assert not any(piece.get_hatch() for piece in first[:-1])
    said = f"{size((times + 1) * 10 * MB)}, {size(times * 10 * MB)} kept" if cut else "50.0 MB"
    assert panel.texts[0].get_text() == said
    if cut:  # the rest stays readable
        assert panel.get_xlim()[1] < 30


def test_the_blocks_have_a_panel_where_there_are_several():
    assert len(drawn(planned(blocks=1)).axes) == 1
    figure = drawn(planned(blocks=10))
    assert len(figure.axes) == 2 and len(bars(figure.axes[1])) == 10
    assert figure.axes[1].get_title(loc="left").startswith("sequential")


@pytest.mark.parametrize("unit", ["bytes", "KB", "MB", "GB"])
def test_the_unit_fits_the_longest_bar(unit):
    step = {"bytes": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}[unit]
    panel = drawn(Plan((Line("a", {"weights": 3 * step}),))).axes[0]
    assert panel.get_xlabel() == unit and panel.patches[0].get_width() == 3


@pytest.mark.cover(1)
@pytest.mark.parametrize("kept", [0, 3 * MB, 900 * MB])
@pytest.mark.parametrize("blocks", [1, 2, 10])
def test_no_text_covers_another_or_leaves_the_figure(kept, blocks):
    figure = drawn(planned(kept, blocks))
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts(figure)]
    assert len(boxes) > 8
    for (a, one), (b, other) in combinations(boxes, 2):
        assert not one.padded(-0.5).overlaps(other.padded(-0.5)), (a, b)
    for text, box in boxes:
        ends = (*box.padded(-0.5).min, *box.padded(-0.5).max)
        assert figure.bbox.contains(*ends[:2]) and figure.bbox.contains(*ends[2:]), text
    for panel in figure.axes:
        for note in panel.texts:
            assert note.get_window_extent().x1 <= panel.bbox.x1


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_a_file_by_its_suffix(tmp_path, name, start):
    model = models.factory("mlp:4", (6,), 2)()
    found = tpsgd.plan(model, (6,), batch_size=8, others=False)
    file = found.plot(tmp_path / name)
    assert file == tmp_path / name and file.read_bytes().startswith(start)


def test_files_that_cannot_be_written(tmp_path):
    (tmp_path / "folder.png").mkdir()
    for name, said in (
        ("a.bmp", "FILE.png or FILE.svg, not"),
        ("none/a.png", "there is no folder"),
        ("folder.png", "cannot write"),
    ):
        with pytest.raises(tpsgd.TpsgdError, match=said) as caught:
            plot.draw(planned(), tmp_path / name)
        assert "\n" not in str(caught.value)
