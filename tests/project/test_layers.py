"""Imports inside shmloader go strictly downwards, by the table in docs/architecture.md.

The table is read from the document, so that document and check cannot differ.
The second half of this file plants each kind of violation and sees it found.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import shmloader

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "shmloader"
INSTALLED = Path(shmloader.__file__).parent
TORCH_PRIVATE = f"{PACKAGE}.torch_private"

# Public in spite of the underscore: namedtuple's own methods.
PUBLIC = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}

Table = dict[str, int]


def read_table(markdown: str) -> Table:
    """Map each module, or package with a slash at its end, to its layer.

    A row counts when its first cell is a number; its modules are the names in backticks in the
    second.
    """
    table: Table = {}
    for row in re.finditer(r"^\| *(\d+) *\|([^|]*)\|", markdown, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row[2]):
            if name in table:
                raise ValueError(f"`{name}` has two rows")
            table[name] = int(row[1])
    return table


@dataclass
class Module:
    """One source file.

    Attributes:
        name: Its dotted name.
        is_package: Whether it is an `__init__.py`.
        tree: Its syntax tree.
        imports: The line and the full dotted name of everything that it imports.
        bound: The dotted origin of each name that an import binds, for torch and this package.
    """

    name: str
    is_package: bool
    tree: ast.Module
    imports: list[tuple[int, str]] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):  # everywhere: in functions and under TYPE_CHECKING too
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports.append((node.lineno, alias.name))
                    top = alias.name.partition(".")[0]
                    self._bind(alias.asname or top, alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                for alias in node.names:
                    full = source if alias.name == "*" else f"{source}.{alias.name}"
                    self.imports.append((node.lineno, full))
                    self._bind(alias.asname or alias.name, full)

    def _bind(self, name: str, origin: str) -> None:
        if origin.partition(".")[0] in {PACKAGE, "torch"}:
            self.bound[name] = origin

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        package = package[: len(package) - node.level + self.is_package]
        return ".".join([*package, *filter(None, [node.module])])

    def uses(self) -> Iterator[tuple[int, str]]:
        """Yield the line and full dotted name of every import, and of every attribute of one."""
        yield from self.imports
        for node in ast.walk(self.tree):
            parts, value = [], node
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if parts and isinstance(value, ast.Name) and value.id in self.bound:
                yield value.lineno, ".".join([self.bound[value.id], *reversed(parts)])


def read_package(directory: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(directory.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(directory).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, is_package, ast.parse(path.read_text(encoding="utf-8")))
    return modules


def row_of(module: Module) -> str:
    """Return the name under which the table lists a module: all of a subpackage is one row."""
    parts = module.name.split(".")[1:]
    if not parts:
        return "__init__"
    return f"{parts[0]}/" if module.is_package or len(parts) > 1 else parts[0]


def imported_module(full: str, modules: dict[str, Module]) -> Module | None:
    """Return the module of ours that importing `full` loads: itself, or the one that defines it."""
    while full and full not in modules:
        full = full.rpartition(".")[0]
    return modules.get(full)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def is_foreign_private(full: str, user: Module, modules: dict[str, Module]) -> bool:
    """Whether a dotted name contains a private part that `user` may not touch."""
    parts = full.split(".")
    privates = [n for n, part in enumerate(parts) if is_private(part)]
    if parts[0] == "torch":
        return bool(privates) and user.name != TORCH_PRIVATE
    for n in privates:
        owner = ".".join(parts[:n])
        inside = user.name == owner or user.name.startswith(f"{owner}.")
        is_module = ".".join(parts[: n + 1]) in modules
        if not (inside and is_module):  # a package's private module is for the package itself
            return True
    return False


def find_violations(directory: Path, table: Table) -> list[str]:
    modules = read_package(directory)
    found = [f"{name}: not in the table" for name, module in modules.items() if row_of(module) not in table]
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        found += private_uses(module, modules)
        for line, full in module.imports:
            target = imported_module(full, modules) if full.split(".")[0] == PACKAGE else None
            if target is None:
                continue
            graph.setdefault(module.name, set()).add(target.name)
            if wrong := direction(row_of(module), row_of(target), table):
                found.append(f"{module.name}:{line}: {wrong} import of {target.name}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("cyclic import: " + " <- ".join(error.args[1]))
    return found


def direction(row: str, target: str, table: Table) -> str | None:
    """Return "upward" or "sideways" for an import that the table forbids, else None."""
    inside_package = row == target and row.endswith("/")
    if inside_package or row not in table or target not in table or table[target] < table[row]:
        return None
    return "sideways" if table[target] == table[row] else "upward"


def private_uses(module: Module, modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.name}:{line}: private name {full}"
        for line, full in sorted(set(module.uses()))
        if full.split(".")[0] in {PACKAGE, "torch"} and is_foreign_private(full, module, modules)
    ]


# The package as it is.


@pytest.fixture(scope="module")
def table() -> Table:
    return read_table((REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8"))


def test_the_package_keeps_to_its_layers(table: Table) -> None:
    assert find_violations(INSTALLED, table) == []


def test_the_table_lists_only_modules_that_exist(table: Table) -> None:
    assert set(table) - {row_of(m) for m in read_package(INSTALLED).values()} == set()


# The check itself: a small table, and packages planted in a temporary directory.

PLANTED_TABLE = """
| layer | module | what it is |
|---|---|---|
| 0 | `errors`, `torch_private` | two in one row, and `backticks` that name nothing |
| 1 | `segment` | |
| 1 | `limits` | |
| 2 | `store/` | a package |
| 3 | `loader` | |
| 4 | `__init__` | |
"""

CLEAN = {
    "__init__.py": "from shmloader.loader import DataLoader\nfrom . import errors, store",
    "errors.py": "import os\nimport torch\ntorch.nn.Module\n__version__ = '1'",
    "torch_private.py": "import torch\nfrom torch.utils.data import _utils\ntorch._C._x",
    "segment.py": "from .errors import Oops\nfrom shmloader.errors import __version__\nself._mine",
    "limits.py": "def f():\n    from shmloader import errors\n    errors.Oops()",
    "store/__init__.py": "from ._strings import Strings\nfrom .arrays import Arrays",
    "store/_strings.py": "from ..segment import Segment\nSegment.open()",
    "store/arrays.py": "from . import _strings\nfrom ._strings import Strings\n_strings.Strings",
    "loader.py": "import shmloader.store\nfrom shmloader.errors import Oops\nOops._make([])",
}

VIOLATIONS = {
    "upward": (
        {"limits.py": "from shmloader.loader import DataLoader"},
        "upward import of *.loader",
    ),
    "upward_relative": (
        {"limits.py": "from .loader import DataLoader"},
        "upward import of *.loader",
    ),
    "upward_from_package": (
        {"store/arrays.py": "from .. import loader"},
        "store.arrays:1: upward import of shmloader.loader",
    ),
    "upward_to_the_root": (
        {"loader.py": "import shmloader"},
        "loader:1: upward import of shmloader",
    ),
    "upward_to_a_name_of_the_root": (
        {"segment.py": "from shmloader import DataLoader"},
        "segment:1: upward import of shmloader",
    ),
    "in_a_function": (
        {"errors.py": "def f():\n    import shmloader.segment as s"},
        "errors:2: upward import of shmloader.segment",
    ),
    "under_type_checking": (
        {"errors.py": "if TYPE_CHECKING:\n    from .segment import Segment"},
        "errors:2: upward import of shmloader.segment",
    ),
    "sideways": (
        {"segment.py": "from shmloader.limits import f"},
        "segment:1: sideways import of shmloader.limits",
    ),
    "cycle_in_a_package": (
        {"store/_strings.py": "from .arrays import Arrays"},
        "cyclic import: shmloader.store.* <- shmloader.store.* <- shmloader.store.*",
    ),
    "cycle_through_a_package": (
        {"store/arrays.py": "from shmloader.store import Strings"},
        "cyclic import: *",
    ),
    "not_in_the_table": ({"extra.py": ""}, "shmloader.extra: not in the table"),
    "package_not_in_the_table": ({"extra/deep.py": ""}, "shmloader.extra.deep: not in the table"),
    "private_import": (
        {"loader.py": "from shmloader.segment import _map"},
        "loader:1: private name shmloader.segment._map",
    ),
    "private_attribute": (
        {"loader.py": "from shmloader import segment as s\ns._map()"},
        "loader:2: private name shmloader.segment._map",
    ),
    "private_attribute_by_full_name": (
        {"loader.py": "import shmloader.segment\nshmloader.segment._map"},
        "loader:2: private name shmloader.segment._map",
    ),
    "private_member_of_an_imported_class": (
        {"loader.py": "from .segment import Segment\nSegment._cache.x"},
        "loader:2: private name shmloader.segment.Segment._cache.x",
    ),
    "private_module_of_another_package": (
        {"loader.py": "from shmloader.store._strings import Strings"},
        "loader:1: private name shmloader.store._strings.Strings",
    ),
    "private_name_within_a_package": (
        {"store/arrays.py": "from ._strings import _pack"},
        "store.arrays:1: private name shmloader.store._strings._pack",
    ),
    "private_torch_module": (
        {"loader.py": "import torch._C"},
        "loader:1: private name torch._C",
    ),
    "private_torch_import": (
        {"loader.py": "from torch.utils.data import _utils"},
        "loader:1: private name torch.utils.data._utils",
    ),
    "public_name_of_a_private_torch_module": (
        {"loader.py": "from torch.utils.data._utils.collate import default_collate"},
        "loader:1: private name torch.utils.data._utils.collate.default_collate",
    ),
    "private_torch_attribute": (
        {"loader.py": "import torch.nn as nn\ndef f():\n    return nn._x.y"},
        "loader:3: private name torch.nn._x",
    ),
}


def plant(directory: Path, files: dict[str, str]) -> list[str]:
    for name, source in files.items():
        path = directory / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return find_violations(directory / PACKAGE, read_table(PLANTED_TABLE))


def test_a_package_that_keeps_to_the_table_is_clean(tmp_path: Path) -> None:
    assert plant(tmp_path, CLEAN) == []


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_planted_violation_is_found(tmp_path: Path, case: str) -> None:
    files, expected = VIOLATIONS[case]
    pattern = re.escape(expected).replace(r"\*", ".*")
    found = plant(tmp_path, CLEAN | files)
    assert any(re.search(pattern, violation) for violation in found), found


def test_the_table_is_read_from_markdown() -> None:
    assert read_table(PLANTED_TABLE) == {
        "errors": 0,
        "torch_private": 0,
        "segment": 1,
        "limits": 1,
        "store/": 2,
        "loader": 3,
        "__init__": 4,
    }


def test_a_module_has_one_row() -> None:
    with pytest.raises(ValueError, match="`segment` has two rows"):
        read_table(PLANTED_TABLE + "| 3 | `segment` | |\n")
