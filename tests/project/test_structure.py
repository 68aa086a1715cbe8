"""Numbers of the structure that may only fall: writes into other objects, files and calls of a batch.

Whoever lowers one of them lowers its ceiling here. The commands that print what is counted are
``python tests/project/foreign_writes.py`` and ``python tests/project/traced_files.py``.
"""

import ast
import re
import subprocess
from pathlib import Path

import foreign_writes
import pytest
import traced_files
from warm_python import warm_python

WRITES = 40
BATCH_FILES, ITER_FILES = 20, 32
CALLS_IN_MAIN, CALLS_IN_WORKER = 41, 31
STATES_OF_THE_STORE = 3
STORE = Path(__file__).parents[2] / "shmloader" / "store"

PLANTED = """
class Owner:
    def own(self):
        self.count = 1
        new = Task()
        new.state = 1
        made = cls.__new__(cls)
        made.state = 1

    def others(self, task):
        task.state = 1
        self.pool.count += 1
        del task.slot
        self.pool.first, second = 1, 2
        setattr(task, "state", 1)

        def inner():
            task.state = 1

new.state = 1
"""


def test_writes_into_other_objects_do_not_grow() -> None:
    found = foreign_writes.in_package()
    assert sum(map(len, found.values())) <= WRITES, found


def test_planted_writes_are_found() -> None:
    found = {text for _, text in foreign_writes.writes(ast.parse(PLANTED))}
    assert len(list(foreign_writes.writes(ast.parse(PLANTED)))) == 7
    assert found == {
        "task.state",
        "self.pool.count",
        "task.slot",
        "self.pool.first",
        "setattr(task, 'state', 1)",
        "new.state",
    }


def states_of(source: str) -> list[str]:
    """Variables of a module that change: what is empty at first, or has a name that is no constant's."""
    empty = {"{}", "[]", "set()", "dict()", "list()"}
    found = []
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            name = ast.unparse(line.targets[0] if isinstance(line, ast.Assign) else line.target)
            is_container = isinstance(line.value, ast.List | ast.Dict | ast.Set | ast.Call)
            if ast.unparse(line.value) in empty or (re.fullmatch("_[a-z][a-z_]*", name) and is_container):
                found.append(name)
    return found


def test_variables_of_the_stores_modules_do_not_become_more() -> None:
    """Beside the tables of kinds, which are complete once their modules are imported."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in STORE.rglob("*.py")}
    found = [(name, one) for name, text in texts.items() for one in states_of(text)]
    found = [one for one in found if one[0] != "kind.py" and one[1] != "_log"]
    assert len(found) <= STATES_OF_THE_STORE, found
    assert states_of("_a: list[int] = []\n_b = {1: 2}\nC = {}\nD = {1: 2}\n_e = local()") == [
        "_a",
        "_b",
        "C",
        "_e",
    ]


@pytest.fixture(scope="module")
def traced() -> traced_files.Traced:
    """The files that are entered in a program of its own: here objects of other tests may end meanwhile."""
    out = subprocess.check_output([*warm_python(), traced_files.__file__], text=True)
    listed = re.findall(r"^\w+: \d+ files\n((?: +.*\n)*)", out, re.MULTILINE)
    calls = re.findall(r"([\d.]+) in (?:the main process|a worker)", out)
    return traced_files.Traced(*(set(names.split()) for names in listed), *map(float, calls))


def test_a_plain_batch_does_not_enter_more_files(traced: traced_files.Traced) -> None:
    assert "iterator.py" in traced.batch_in_main
    assert "worker/loop.py" in traced.batch_in_worker
    entered = traced.batch_in_main | traced.batch_in_worker
    assert len(entered) <= BATCH_FILES, sorted(entered)


def test_a_plain_batch_makes_no_more_calls(traced: traced_files.Traced) -> None:
    assert 20 < traced.calls_in_main <= CALLS_IN_MAIN
    assert 20 < traced.calls_in_worker <= CALLS_IN_WORKER


def test_iter_does_not_enter_more_files(traced: traced_files.Traced) -> None:
    assert "loader.py" in traced.by_iter
    assert len(traced.by_iter) <= ITER_FILES, sorted(traced.by_iter)
