"""The documentation builds without a warning, and the programs printed in it run."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import with_full

ROOT = Path(__file__).resolve().parents[2]
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if p.is_file()]
FENCE = re.compile(r"\s*(?P<ticks>`{3,})\s*(?P<language>\w*)")
NOT_RUN, RUN = "<!-- not run -->", "<!-- run -->"
Block = tuple[int, str, str]


def blocks_to_run(text: str) -> list[Block]:
    """The first line number, the language and the source of each block that is to be run.

    They are ```python blocks, unless the last line before that is not blank is `<!-- not run -->`,
    and ```bash blocks after `<!-- run -->`.
    """
    blocks = []
    lines = text.splitlines()
    before, i = "", 0
    while i < len(lines):
        fence = FENCE.match(lines[i])
        if fence is None:
            before = lines[i].strip() or before
            i += 1
            continue
        start = i = i + 1
        while i < len(lines) and not closes(lines[i], fence["ticks"]):
            i += 1
        language = fence["language"]
        if (language == "python" and before != NOT_RUN) or (language == "bash" and before == RUN):
            blocks.append((start + 1, language, textwrap.dedent("\n".join(lines[start:i]))))
        before, i = "", i + 1
    return blocks


def closes(line: str, ticks: str) -> bool:
    return line.strip().startswith(ticks) and not line.strip().strip("`")


def run_blocks(page: Path, says: Callable[..., tuple[int, str, str]]) -> None:
    """Execute a page's blocks in order, in one namespace; errors name the page's own lines."""
    namespace = {"__name__": "__main__"}
    for line, language, source in blocks_to_run(page.read_text(encoding="utf-8")):
        if language == "bash":
            run_commands(source, f"{page}, line {line}", says)
        else:
            exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


def run_commands(source: str, where: str, says: Callable[..., tuple[int, str, str]]) -> None:
    """Run the commands of a block one by one; `tpsgd` in this process, which has loaded torch."""
    for command in source.splitlines():
        words = shlex.split(command)
        if words[0] == "tpsgd":
            status, out, errors = says(*words[1:])
        else:
            done = subprocess.run(words, capture_output=True, text=True)
            status, out, errors = done.returncode, done.stdout, done.stderr
        assert status == 0, f"{where}: {errors or out}"


LONG = ("adapt", "choosing", "deep", "edge", "journey", "memory", "recurrent", "sklearn", "streams")
LONG = [ROOT / "docs" / f"{name}.md" for name in LONG]


@pytest.mark.parametrize(
    "page", with_full(PAGES, LONG), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_programs_on_the_page_run(page, tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    if "photos@160" in page.read_text(encoding="utf-8"):
        make_photos_and_encoder()
    run_blocks(page, says)


def make_photos_and_encoder() -> None:
    """What the pages call the reader's own: a folder of images, and an encoder's weights."""
    from PIL import Image

    from tpsgd.zoo.vgg import vgg

    for name, colour in (("left", (200, 30, 30)), ("right", (30, 30, 200))):
        Path("photos", name).mkdir(parents=True)
        for i in range(10):
            shade = tuple(c + 3 * i for c in colour)
            Image.new("RGB", (24, 24), shade).save(f"photos/{name}/{i}.png")
    torch.manual_seed(0)
    torch.save(vgg(16, (3, 32, 32), 2).state_dict(), "vgg16.pth")


@pytest.mark.full
def test_site_builds_strictly(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    if not (ROOT / "docs").is_dir():
        pytest.skip("there is no docs folder here")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "assets/extra.css" in (tmp_path / "index.html").read_text(encoding="utf-8")
    style = (tmp_path / "assets" / "extra.css").read_text(encoding="utf-8")
    assert "white-space: pre-wrap" in style  # long lines of code are not cut off


PAGE = """\
```python
a = 1
```

    ```python
    b = a + 1
    ```

<!-- not run -->

```python
raise SystemExit
```

````markdown
```python
raise SystemExit
```
````

```bash
tpsgd --help
```

```python title="c.py"
c = a + b
```
"""


def test_blocks_are_found_in_order_and_the_marked_one_is_left_out():
    assert blocks_to_run(PAGE) == [
        (2, "python", "a = 1"), (6, "python", "b = a + 1"), (26, "python", "c = a + b"),
    ]  # fmt: skip


def test_commands_run_where_they_are_marked(tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```bash\nfalse\n```\n\n<!-- run -->\n\n```bash\ntouch a\n```\n")
    run_blocks(page, says)
    assert (tmp_path / "a").exists()
    page.write_text("<!-- run -->\n\n```bash\ntpsgd train --rule redout\ntouch b\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, line 4: .*did you mean 'readout'"):
        run_blocks(page, says)
    assert not (tmp_path / "b").exists()


def test_blocks_of_a_page_share_names(tmp_path, says):
    page = tmp_path / "page.md"
    page.write_text(PAGE + "\n```python\nassert (a, b, c) == (1, 2, 3)\n```\n")
    run_blocks(page, says)


def test_an_error_names_its_line_on_the_page(tmp_path, says):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(page, says)
    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno + 1 == 6
