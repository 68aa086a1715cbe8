"""The loader's own arguments: errors name wrong ones, and type checkers know them all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from loading import Numbered

from shmloader import DataLoader
from shmloader.failures import bad_samples
from shmloader.settings import OnError

NO_WHOLE_NUMBERS: list[tuple[str, Any]] = [
    ("memory_budget_nbytes", 1e9),
    ("memory_budget_nbytes", 1.5),
    ("memory_budget_nbytes", np.float64(1e9)),
    ("memory_budget_nbytes", "1G"),
    ("worker_restarts", 1.5),
    ("worker_restarts", "a"),
    ("worker_restarts", None),
]


@pytest.mark.parametrize(("name", "value"), NO_WHOLE_NUMBERS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: object, num_workers: int) -> None:
    arguments: Any = {name: value, "num_workers": num_workers}
    with pytest.raises(TypeError) as caught:
        DataLoader(Numbered(4), **arguments)
    text = str(caught.value)
    assert text.startswith(f"{name} must be a whole number")
    assert f"not {value!r}: pass an int, such as " in text


def test_a_budget_that_is_no_number_is_told_how_to_be_one() -> None:
    given: Any = 1e9
    with pytest.raises(TypeError, match=r"or None, not 1000000000\.0: pass an int, such as int\(1e9\)$"):
        DataLoader(Numbered(4), memory_budget_nbytes=given)


def test_the_whole_numbers_of_numpy_are_taken_as_they_are() -> None:
    budget, restarts = np.int32(1 << 20), np.uint8(1)
    given: Any = {"memory_budget_nbytes": budget, "worker_restarts": restarts}
    with DataLoader(Numbered(8), batch_size=4, num_workers=1, **given) as loader:
        assert (loader.memory_budget_nbytes, loader.worker_restarts) == (budget, restarts)
        assert loader.memory_budget_nbytes is budget
        assert loader.worker_restarts is restarts
        iterator = iter(loader)
        # Sums of narrow integers would overflow.
        assert type(iterator.table.budget.nbytes) is int
        assert [batch[0, 0] for batch in iterator] == [0, 4]


@pytest.mark.parametrize(("name", "value"), [("memory_budget_nbytes", 0), ("worker_restarts", -1)])
def test_numbers_that_are_too_small_are_refused_by_name(name: str, value: int) -> None:
    given: Any = {name: value}
    with pytest.raises(ValueError, match=f"^{name} must be at least {value + 1}, not {value}$"):
        DataLoader(Numbered(4), **given)


@pytest.mark.parametrize("word", ["Auto", "many", "2", ""])
@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor"])
def test_no_word_but_auto_is_a_number(name: str, word: str) -> None:
    given: Any = {"num_workers": 1, name: word}
    with pytest.raises(ValueError, match=f"^{name} must be a number or 'auto', not '{word}'$"):
        DataLoader(Numbered(4), **given)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_workers": 2.0}, TypeError, "num_workers must be a whole number or 'auto', not 2.0: pass an int"),
    (
        {"prefetch_factor": 2.5},
        TypeError,
        "prefetch_factor must be a whole number, 'auto' or None, not 2.5: ",
    ),
    (
        {"prefetch_factor": 0.5},
        TypeError,
        "prefetch_factor must be a whole number, 'auto' or None, not 0.5: ",
    ),
    (
        {"prefetch_factor": 0},
        ValueError,
        "prefetch_factor must be at least 1 with num_workers=1, not 0: pass 2",
    ),
    ({"timeout": "5"}, TypeError, "timeout must be a number of seconds, not '5': pass one, such as 60"),
    ({"timeout": float("inf")}, ValueError, "timeout must be finite, not inf: 0 waits as long as"),
    ({"timeout": float("nan")}, ValueError, "timeout must be finite, not nan: 0 waits as long as"),
    ({"timeout": None}, TypeError, "timeout must be a number of seconds, not None: pass one, such as 60"),
    (
        {"batch_size": "32"},
        ValueError,
        "batch_size should be a positive integer value, but got batch_size='32': ",
    ),
    (
        {"generator": 5},
        TypeError,
        "generator must be a torch.Generator or None, not 5: pass torch.Generator()",
    ),
    ({"device": "gpu"}, ValueError, "device='gpu' is not a device. Pass 'cuda', 'cuda:1', 'cpu' or None"),
    ({"worker_restarts": True}, TypeError, "worker_restarts must be a whole number, not True: pass an int"),
    (
        {"memory_budget_nbytes": True},
        TypeError,
        "memory_budget_nbytes must be a whole number of bytes or None, ",
    ),
]


@pytest.mark.parametrize(("given", "kind", "text"), WRONG, ids=lambda value: repr(value)[:40])
def test_a_wrong_argument_is_told_by_its_name_its_value_and_the_cure(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        DataLoader(Numbered(4), **({"num_workers": 1} | given))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("num_workers", [1, "auto"])
def test_no_batches_in_advance_that_are_set_later_are_refused_as_by_torch(num_workers: Any) -> None:
    loader = DataLoader(Numbered(4), num_workers=num_workers)
    loader.prefetch_factor = 0
    with pytest.raises(AssertionError, match=r"^prefetch_factor must be greater than 0 for Multi"):
        iter(loader)
    loader.prefetch_factor = 2  # after which it loads
    assert len(list(loader)) == 4
    loader.close()


def test_workers_that_are_set_later_say_what_they_lack() -> None:
    loader = DataLoader(Numbered(4))
    loader.num_workers = 1  # torch's default of 2 is set by the constructor
    with pytest.raises(AssertionError, match=r"loader\.prefetch_factor is None, set it to 2, say$"):
        iter(loader)
    loader.prefetch_factor, loader.num_workers = 2, -1
    with pytest.raises(AssertionError, match=r"^num_workers must be greater than 0 for .*num_workers is -1"):
        iter(loader)


@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor"])
def test_a_fraction_that_is_set_later_is_refused_by_name(name: str) -> None:
    """If it were rounded down to 0, an epoch would be empty."""
    loader = DataLoader(Numbered(4), num_workers=1)
    setattr(loader, name, 1.5)
    with pytest.raises(TypeError, match=f"^{name} must be a whole number.*, not 1.5: pass an int, such as 2"):
        iter(loader)


def test_numbers_that_torch_takes_are_taken() -> None:
    given: Any = {"num_workers": np.int64(1), "prefetch_factor": np.int8(2), "timeout": np.float32(60)}
    with DataLoader(Numbered(4), generator=torch.Generator(), **given) as loader:
        assert len(list(loader)) == 4


def test_a_loader_and_its_iterators_tell_what_they_are() -> None:
    with DataLoader(Numbered(8), batch_size=4, num_workers=2, on_error="skip") as loader:
        assert repr(loader) == "<DataLoader of Numbered: batch_size=4, num_workers=2, on_error='skip'>"
        iterator = iter(loader)
        next(iterator)
        assert repr(iterator) == "<SlotIterator: 1 batches of this epoch returned, 2 workers>"
    assert repr(iterator) == "<SlotIterator: 1 batches of this epoch returned, closed>"
    in_process = iter(DataLoader(Numbered(8), batch_size=4))
    assert repr(in_process) == "<InProcessIterator: 0 batches of this epoch returned, no workers>"
    for kind in (DataLoader, type(iterator), type(in_process)):
        unmade = kind.__new__(kind)  # a debugger shows it while its constructor runs
        assert kind.__name__ in repr(unmade)


def test_the_type_and_the_fetchers_know_the_same_words() -> None:
    assert get_args(OnError) == (bad_samples.RAISE, bad_samples.SKIP, bad_samples.REPLACE)


PROGRAM = """
from shmloader import DataLoader

def load(data: object) -> None:
    loader: DataLoader[int] = DataLoader(
        data, num_workers="auto", on_error="skip", dispatch="dynamic", worker_type="thread"
    )
    DataLoader[int](data, on_error="skipp")
    DataLoader[int](data, dispatch="dynamc")
    DataLoader[int](data, worker_type="threads")
    DataLoader[int](data, num_workers="Auto")
    loader.on_error = "skipp"
    loader.dispatch = "dynamc"
    loader.worker_type = "threads"
"""
# Without other libraries, mypy takes a fifth of the time.
SETTINGS = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,pyarrow.*,psutil.*,tqdm.*]
follow_imports = skip
"""


TYPED = """
from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
import torch
from torch.utils.data import Dataset

import shmloader
from shmloader import DataLoader, LoaderStatistics
from shmloader.store import MappingStore, SetStore, Store

Row = dict[str, int]

class Rows(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, rows: list[Row]) -> None:
        self.rows = shmloader.share(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = assert_type(self.rows[index], Row)
        return torch.tensor(row["a"]), index

def rows() -> list[Row]:
    return [{"a": 1}]

def stream() -> Iterator[str]:
    yield "a"

dataset = assert_type(shmloader.share(Rows(rows())), Rows)
store = assert_type(shmloader.share(rows()), Store[Row])
store.save("rows.arrow")
assert_type(store[:5], Store[Row])
assert_type(store["a"], Store[Any])
assert_type([row for row in store], list[Row])
assert_type(shmloader.share(stream()), Store[str])
assert_type(shmloader.share({"a": 1}), MappingStore[str, int])
assert_type(shmloader.share({"a": 1})["a"], int)
assert_type(shmloader.share({1, 2}), SetStore[int])
assert_type(shmloader.share(np.ones(3)), np.ndarray[tuple[int], np.dtype[np.float64]])
assert_type(shmloader.share(torch.ones(3)), torch.Tensor)
assert_type(shmloader.share_on_host(rows, name="rows"), Store[Row])
assert_type(shmloader.share_on_host(lambda: Rows(rows()), name="dataset"), Rows)
assert_type(shmloader.open("rows.arrow", columns=["a"]), Store[Any])
with DataLoader(dataset, batch_size=4, num_workers=2, on_error="skip", shuffle=True) as loader:
    assert_type(loader, DataLoader[tuple[torch.Tensor, int]])
    loader.set_epoch(3)
    iterator = iter(loader)
    images, labels = next(iterator)
    images, labels = iterator.try_next()
    assert_type(iterator.fileno(), int)
    for images, labels in loader:
        print(images.sum(), labels)
    assert_type(loader.statistics(), LoaderStatistics)
    assert_type(loader.state_dict(), dict[str, Any])
    assert_type(shmloader.Queue[int](2).get(), int)
    iter(loader).no_such_method(shmloader.no_such_name)
"""


def checked(program: str, settings: str, folder: Path) -> tuple[list[str], str]:
    """The errors that mypy finds in a program, and all that it says."""
    pytest.importorskip("mypy")
    (folder / "program.py").write_text(program)
    (folder / "settings.ini").write_text(settings)
    command = [sys.executable, "-m", "mypy", "--config-file=settings.ini", "--cache-dir=cache", "program.py"]
    environment = {**os.environ, "MYPYPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if ": error:" in line], done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)  # it reads all of torch
def test_mypy_knows_the_types_of_results(tmp_path: Path) -> None:
    settings = "[mypy]\nstrict = true\n[mypy-shmloader.*]\nfollow_imports = silent\n"
    found, said = checked(TYPED, settings, tmp_path)
    last = len(TYPED.splitlines())  # where it has to find a wrong name
    assert {line.split(":")[1] for line in found} == {str(last)}, said
    assert "no_such_method" in said
    assert "no_such_name" in said


@pytest.mark.long
def test_pyright_knows_the_types_of_results(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="make test installs it")
    (tmp_path / "program.py").write_text(TYPED)
    settings = {"extraPaths": [str(Path(__file__).parents[2])], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["generalDiagnostics"]
    except ValueError:  # it is a Node.js program, which it fetches when it runs for the first time
        pytest.skip(f"pyright does not run here: {(done.stdout + done.stderr)[-300:]}")
    assert {each["range"]["start"]["line"] for each in found} == {len(TYPED.splitlines()) - 1}, found
    assert {"no_such_method", "no_such_name"} <= set(re.findall(r"no_such_\w+", str(found)))


def test_mypy_finds_wrong_words_in_a_program(tmp_path: Path) -> None:
    found, said = checked(PROGRAM, SETTINGS, tmp_path)
    lines = PROGRAM.splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if "skipp" in line or "dynamc" in line]
    wrong += [number for number, line in enumerate(lines, 1) if "threads" in line or "Auto" in line]
    assert [int(line.split(":")[1]) for line in found] == sorted(wrong), said
    assert all("Literal[" in line for line in found)
