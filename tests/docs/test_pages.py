"""The pages agree with the code: the API list, the paper's program and the files that are named."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tpsgd"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"(?<![\w/.:-])((?:[\w-]+/)+[\w-]+\.(?:py|pyi|md|toml|json))\b")

DEFINED = re.compile(r"^ *(?:def |class )?(\w+)(?=[(:]| *=)", re.MULTILINE)


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_api_page_has_every_public_name_and_no_other():
    stub = ast.parse(read("src/tpsgd/__init__.pyi"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    public = {alias.name for node in imports for alias in node.names}
    page = read("docs/api.md")
    assert set(re.findall(r"^::: tpsgd\.(\w+)", page, re.MULTILINE)) == public
    plugins = {folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir()}
    assert set(re.findall(r"^::: tpsgd_(\w+)", page, re.MULTILINE)) == plugins


def test_concepts_shows_the_program_of_the_paper():
    program = read("examples/paper.py")
    core = program[program.index("# Table 1") : program.index("\n\ndef predict")]
    assert core.strip() in read("docs/concepts.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_on_the_page_exist(page):
    """Paths start at the root of the repository, or in the package: `engine/run.py`."""
    missing = []
    for path in sorted(set(FILE.findall(read(page)))):
        home = next((h for h in (ROOT, PACKAGE) if (h / path.split("/")[0]).is_dir()), None)
        if home is not None and "NAME" not in path and not (home / path).is_file():
            missing.append(path)
    assert missing == []


def test_the_names_on_the_page_of_the_architecture_exist():
    """Names in code font, in the code or its tests; in the path of a batch, in their file."""
    page = read("docs/architecture.md")
    folders = PACKAGE, ROOT / "tests", ROOT / "plugins"
    files = [file for folder in folders for file in folder.rglob("*.py")]
    defined = {name for file in files for name in DEFINED.findall(file.read_text("utf-8"))}
    spans = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))
    names = {m[1] for span in spans if (m := re.fullmatch(r"(?:\w+\.)*(\w{2,})(?:\(.*\))?", span))}
    assert len(names & defined) > 20 and names - defined <= {"md", "py", "Conv3d", "xfail"}
    assert all((PACKAGE / span).is_file() for span in spans if re.fullmatch(r"\w+\.py", span))
    path = re.findall(r"^([\w/]+\.py) +(\w+)  ", page, re.MULTILINE)
    assert len(path) > 3
    for file, name in path:
        assert name in DEFINED.findall((PACKAGE / file).read_text("utf-8")), (file, name)


def test_the_map_of_the_code_is_complete():
    page = read("docs/architecture.md")
    tree = page[page.index("src/tpsgd/\n") : page.index("examples/ ")]
    on_the_map = set(re.findall(r"^  ([\w.]+)/?  ", tree, re.MULTILINE))
    in_the_package = {
        p.name for p in PACKAGE.iterdir() if p.is_dir() or p.suffix in (".py", ".pyi")
    }
    assert on_the_map == in_the_package - {"__init__.py", "__main__.py", "__pycache__"}
