"""docs/api.md lists all public names, and no others; links between pages lead to existing places.

Fields, arguments, bases and variables are read from the code, and from the page's tables.
"""

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import shmloader
from shmloader.cli import COMMANDS

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")])


def section(heading: str) -> str:
    """The text between a heading and the next one, of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/api.md has no heading {heading!r}"
    return found[1]


def rows(text: str) -> list[list[list[str]]]:
    """The rows of tables without their heads: for each cell the names in backticks."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    cells = [[re.findall(r"`([^`]+)`", cell) for cell in line.split("|")] for line in lines]
    return [row for row in cells if row[0]]


def listed(text: str) -> list[str]:
    """The first name of each row, without arguments."""
    return [row[0][0].partition("(")[0] for row in rows(text)]


def test_every_public_name_is_listed() -> None:
    tables = rows(PAGE.split("## `DataLoader`")[0]) + rows(section("Exceptions and warnings"))
    found = {name.partition("(")[0] for row in tables for name in row[0]}
    assert found == set(shmloader.__all__)
    assert all(hasattr(shmloader, name) for name in found)


def test_the_package_shows_public_names_only() -> None:
    shown = set(dir(shmloader)) - set(shmloader.__all__)
    assert shown <= {"open", "frameworks", "monitor", "store", "tar"}
    assert {"open", "store"} <= shown
    assert all(hasattr(shmloader, name) and f"shmloader.{name}" in PAGE for name in shown)


@pytest.mark.parametrize("data", [[{"a": 1}], [1], {"a": 1}, {1}], ids=["records", "numbers", "dict", "set"])
def test_stores_show_documented_attributes_only(data: Any) -> None:
    store = shmloader.share(data)
    page = (DOCS / "stores.md").read_text(encoding="utf-8")
    plain = {*dir(list), *dir(dict), *dir(frozenset)}  # whose methods a store has, which is documented too
    names = {name for name in dir(store) if not name.startswith("_")} - plain
    assert {"describe", "save", "nbytes", "to_arrow"} <= names
    assert not [name for name in names if not re.search(rf"`?\b(store\.)?{name}\b", page)]
    assert all(hasattr(store, name) for name in names)


@pytest.mark.parametrize("kind", [shmloader.LoaderStatistics, shmloader.AutotuneReport, shmloader.BadSample])
def test_every_field_is_listed(kind: type) -> None:
    assert listed(section(f"`{kind.__name__}`")) == [field.name for field in dataclasses.fields(kind)]


def test_every_argument_that_torch_lacks_is_listed_with_its_default() -> None:
    ours = inspect.signature(shmloader.DataLoader.__init__).parameters
    own = ours.keys() - inspect.signature(torch.utils.data.DataLoader.__init__).parameters.keys()
    described = {row[0][0]: row[1][0] for row in rows(section("`DataLoader`")) if row[0][0] in ours}
    defaults = {name: ours[name].default for name in own}
    assert {name: ast.literal_eval(default) for name, default in described.items()} == defaults
    docstring = inspect.cleandoc(shmloader.DataLoader.__doc__ or "")
    begins = set(re.findall(r"^    (\w+): ", docstring, re.MULTILINE))
    assert own <= begins


def test_every_exception_is_listed_with_its_bases() -> None:
    kinds = {
        name: [base.__name__ for base in kind.__bases__]
        for name, kind in vars(shmloader).items()
        if name in shmloader.__all__ and isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert {row[0][0]: row[1] for row in rows(section("Exceptions and warnings"))} == kinds


def test_every_environment_variable_is_listed() -> None:
    read = set()
    for path in Path(shmloader.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= set(re.findall(r"^SHMLOADER_[A-Z_]+$", node.value))
    assert read
    assert set(listed(section("Environment variables"))) == read


def test_every_command_is_listed() -> None:
    words = {name.removeprefix("python -m shmloader ") for name in listed(section("Commands"))}
    assert words == set(COMMANDS)


def test_every_decision_is_in_their_list() -> None:
    text = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    listed_ones = re.findall(r"^\| \[(\d{4})\]\((\S+)\) \| (.*?) \|", text, re.MULTILINE)
    paths = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    heads = [path.read_text(encoding="utf-8").splitlines()[0] for path in paths]
    assert [f"# {number}: {title}" for number, _, title in listed_ones] == heads
    assert [name for _, name, _ in listed_ones] == [path.name for path in paths]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_to_other_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target} is none of {sorted(anchors(path))}"
