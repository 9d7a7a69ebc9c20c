"""Names out of a file somebody else wrote: in C, Arduino files, ONNX, HTML and on a terminal."""

import re
from collections import OrderedDict
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import tpsgd
from tpsgd import TpsgdError, rules
from tpsgd.cli.terminal import grid_of
from tpsgd.common.names import printable, safe
from tpsgd.comparison.report.page import _text
from tpsgd.engine.confusion import Confusion
from tpsgd.engine.record import BlockInfo, Run
from tpsgd.nets.cuts.split import split
from tpsgd.saved import modules
from tpsgd_export.inputs import SampleFormat
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c import compiled, export
from tpsgd_export.to_c.inputs import with_inputs
from tpsgd_export.to_c.integer_scales import integer_net
from tpsgd_export.to_c.integer_source import integer_source
from tpsgd_export.to_c.libraries import as_library
from tpsgd_export.to_c.source import sources
from tpsgd_export.to_onnx.step import step_model
from tpsgd_export.to_page.page import _filled, _inputs
from tpsgd_export.to_page.samples import chosen

COMMAND = 'int system(const char*); __attribute__((constructor)) void go(void){system("%s");}'
SPLICED = f"a *\\\n/\n#ifndef GO\n#define GO\n{COMMAND}\n#endif\n/* b"  # a joined end of a comment
HOSTILE = [
    *(SPLICED, SPLICED.replace("\\\n", "??/\n"), "*/ int x; /*", "/* y", "a*", "/b", "//", "\\"),
    *("a\\", "b\\\r\n/", "a\n#error no", "nul\0nul", "\x1b[31mred\x1b]0;title\a", "\x9b2J", "\r"),
    *("\u202egnp.exe", "\u2066hidden\u2069", "\u200b", "a\u2028b\u2029", "\x85", "\ud800"),
    *("</script><script>alert(1)</script>", "<!--", "-->", "]]>", "<img src=x onerror=y>", "'\""),
    *("&lt;b&gt;", "[bold red]x[/]", "[link=file:///etc]x[/link]", "%s%n", "{0}", "$HOME", "`id`"),
    *("name=other\nurl=http://x", "# title", "a" * 500, "", " ", "Größe (mm)", "\ufeff", "🙂"),
]  # fmt: skip
SIGNS = st.text("*/\\?\n\r<>!-'\"&[]\x1b", max_size=9)
NAMES = st.sampled_from(HOSTILE) | st.text(max_size=20) | SIGNS


def model(name: str, first: nn.Module, *others: nn.Module) -> nn.Sequential:
    """A net whose first module has this name, as far as `nn.Module` takes it."""
    named = {name.replace(".", "") or "a": first} | dict(zip(("act", "out"), others, strict=False))
    return nn.Sequential(OrderedDict(named))


def written(name: str) -> dict[str, str]:
    """All files of C, of nets whose module, rule, columns and classes have this name."""
    torch.manual_seed(0)
    rule = replace(rules.readout(projection=tpsgd.projections.binary()), name=name)
    mlp = read_model(model(name, nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), rule, (4,))
    cells = read_model(model(name, tpsgd.Recurrent(4, 3), nn.Linear(3, 2)), rule, (5, 4))
    inputs = SampleFormat((name, "b", "c", name), (0.0,) * 4, (1.0,) * 4, (name, "no"), name)
    texts = with_inputs(sources(mlp), inputs, mlp)
    x, y = torch.arange(32.0).view(8, 4) / 32, torch.arange(8) % 2
    integers = integer_net(mlp, x, y, "int8", rate=0.01, epochs=1)
    return {
        **as_library("arduino", texts, mlp, 1),
        **{f"zephyr/{k}": v for k, v in as_library("zephyr", texts, mlp, 1).items()},
        **{f"cells/{k}": v for k, v in sources(cells).items()},
        **{f"integers/{k}": v for k, v in integer_source(integers).items()},
    }


NAME_IN_C = re.compile(r'^    "(?:[\w .,-]|\\[0-7]{3})*"(?=,$|\};$)', re.MULTILINE | re.ASCII)


def code(text: str) -> str:
    """A program of C as its compiler reads it: trigraphs, joined lines, no comments or names."""
    text = text.replace("??/", "\\").replace("\\\n", "")
    text = NAME_IN_C.sub('""', text)
    text = re.sub(r"(_names\[\d+\])\[\d+\]", r"\1[]", text)  # on an AVR, bytes of the longest name
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S).split())


HARMLESS = written("a")


@given(NAMES)
def test_only_letters_digits_and_a_few_signs_are_left(name):
    text = safe(name)
    assert len(text) == len(name) and safe(text) == text and text.isprintable()
    assert not set(text) & set('*\\?<>"`[]{}$!|~^\n\r\t\0') and text.encode()[:0] == b""
    assert printable(name).isprintable()


def test_names_in_all_scripts_stay_as_they_are():
    for name in ("Größe (mm)", "猫", "हिन्दी", "T-shirt/top", "it's 5 % of #3 & more; x_1=2"):
        assert safe(name) == name


@given(NAMES)
def test_a_name_changes_no_program(name):
    for file, text in written(name).items():
        assert all(c.isprintable() or c in "\n\t" for c in text)
        if file.endswith((".c", ".h", ".ino")):
            assert code(text) == code(HARMLESS[file]), file
        else:  # the one line with names has no signs that mean something there
            pairs = zip(text.splitlines(), HARMLESS[file].splitlines(), strict=True)
            others = [line for line, expected in pairs if line != expected]
            assert len(others) <= 1 and not set("".join(others)) & set("<>[]`!\\|")


def touching(file: Path) -> str:
    return SPLICED % f"touch {file}"


def evil_model(name: str) -> nn.Sequential:
    return model(name, nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.skipif(compiled.compiler() is None, reason="no C compiler")
def test_a_module_with_code_in_its_name_is_exported_without_running_it(tmp_path):
    name = touching(tmp_path / "ran")
    exported = tpsgd.export.c(evil_model(name), tmp_path / "net", shape=(4,))
    assert "run beside tpsgd.fit" in exported.checked and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [n for n in HOSTILE if "." not in n and not n.isalpha()])
def test_a_saved_model_has_no_such_names(name):
    description = modules.describe(evil_model("a"))
    layers = description["modules"]
    layers[name] = layers.pop("a")
    with pytest.raises(TpsgdError, match=r"a module is called .* letters, digits and _") as error:
        modules.build(description)
    assert str(error.value).isprintable()
    with pytest.raises(TpsgdError):
        modules.describe(evil_model(name or " "))


@pytest.mark.parametrize("name", ["0", "conv1", "größe", "_hidden", "3x3"])
def test_a_saved_model_has_the_names_that_people_use(name):
    net = modules.build(modules.describe(evil_model(name)))
    assert next(iter(dict(net.named_children()))) == name


@pytest.mark.parametrize("name", ["__deepcopy__", "__array__", "__torch_function__"])
def test_a_saved_model_has_no_names_that_python_calls(name):
    with pytest.raises(TpsgdError, match="a module is called"):
        modules.build({"type": "Sequential", "modules": {name: {"type": "ReLU", "arguments": {}}}})


def test_a_graph_has_no_tensors_with_such_names():
    pytest.importorskip("onnx")
    recipe = read_model(evil_model("\x1b]0;x\a"), rules.readout(), (4,))
    with pytest.raises(TpsgdError, match="cannot name a tensor of an ONNX graph"):
        step_model(recipe, (4,))
    rule = replace(rules.readout(), name=SPLICED)
    graph, _ = step_model(read_model(evil_model("a"), rule, (4,)), (4,))
    assert graph.doc_string.isprintable() and "\\" not in graph.doc_string


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data):
        self.text.append(data)


@given(NAMES)
def test_a_report_shows_a_name_as_text(name):
    page = Tags(f"<p>{_text(name)}</p>")
    assert page.tags == [("p", [])] and "".join(page.text) == printable(name)


def test_a_page_shows_names_as_text():
    x, y = torch.rand(40, 3), torch.arange(40) % 2
    pages = []
    for names in ((" ".join(HOSTILE), HOSTILE[3]), ("yes", "no")):
        reading = {"columns": [*names, "c"]}
        data = tpsgd.data.Data(names[0], (x, y), (x, y), names, (3,), "", reading=reading)
        record = _inputs(data, chosen(data, 10_000, 0)) | {"rule": safe(names[0])}
        pages.append(_filled(record))
        assert all(map(str.isprintable, [*record["classes"], *record["columns"], record["name"]]))
    assert Tags(pages[0]).tags == Tags(pages[1]).tags


@given(NAMES)
def test_a_terminal_gets_no_control_characters(name):
    capture = Console(file=StringIO(), force_terminal=False, width=200)
    capture.print(grid_of("a", "b", rows=[(name, "x")]))
    record = Run(name, 0, {}, [BlockInfo(name, name, 1, name)], hint=f"1{name}")
    confusion = Confusion(((1, 1), (1, 1)), (name, "b" if name != "b" else "c"))
    printed = [capture.file.getvalue(), str(record), str(confusion), str(TpsgdError(name))]
    printed.append(str(split(evil_model(name))[0]))
    for text in printed:
        assert all(c.isprintable() or c == "\n" for c in text)
    assert str(record).count("\n") == 3


def test_predictions_on_a_terminal_and_in_a_pipe(says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    run = tpsgd.fit(evil_model("a"), (x, y), epochs=1, progress=False)
    run.save("model", classes=["\x1b[31m", "b"], inputs={"shape": [4]})
    np.savez("new.npz", x=x.numpy())
    assert "\x1b[31m" in says("predict", "model", "--data", "new.npz")[1]  # as in a file
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b" not in says("predict", "model", "--data", "new.npz")[1]


DEATHS = {
    "was ended by SIGSEGV": "*(volatile int *)0 = 1;",
    "ended with status 77": "extern void exit(int); exit(77);",
    "took more than 0.2 seconds": "for (;;) {}",
}


@pytest.mark.skipif(compiled.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("how", DEATHS)
def test_a_program_that_dies_in_its_trial_ends_no_other(how, tmp_path, monkeypatch):
    def dying(recipe):
        texts = sources(recipe)
        begin = "void net_begin(net_state *s)\n{"
        return texts | {"net.c": texts["net.c"].replace(begin, begin + DEATHS[how])}

    monkeypatch.setattr(export, "sources", dying)
    monkeypatch.setattr(compiled, "LONGEST_TRIAL", 0.2)
    with pytest.raises(TpsgdError, match=rf"program {how} in its trial run, and nothing was writ"):
        tpsgd.export.c(evil_model("a"), tmp_path / "net", shape=(4,))
    assert not (tmp_path / "net").exists()
