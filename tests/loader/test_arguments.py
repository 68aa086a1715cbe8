"""The loader's own arguments: errors name wrong ones, and type checkers know them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
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


@pytest.mark.parametrize("num_workers", [1, "auto"])
def test_no_batches_in_advance_are_refused_at_iteration_as_by_torch(num_workers: Any) -> None:
    loader = DataLoader(Numbered(4), num_workers=num_workers, prefetch_factor=0)
    with pytest.raises(AssertionError, match=r"^prefetch_factor must be greater than 0 for Multi"):
        iter(loader)
    loader.prefetch_factor = 2  # after which it loads
    assert len(list(loader)) == 4
    loader.close()


@pytest.mark.parametrize("num_workers", [1, "auto"])
@pytest.mark.parametrize("prefetch_factor", [0.5, 1.5])
def test_a_fraction_of_a_batch_in_advance_is_refused_as_by_torch(
    num_workers: Any, prefetch_factor: Any
) -> None:
    """If it were rounded down to 0, an epoch would be empty."""
    # torch's is not run: its half-made iterator prints an error when it dies.
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        iter(DataLoader(Numbered(4), num_workers=num_workers, prefetch_factor=prefetch_factor))


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


def test_mypy_finds_wrong_words_in_a_program(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "settings.ini").write_text(SETTINGS)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=settings.ini", "--cache-dir=cache", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = PROGRAM.splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if "skipp" in line or "dynamc" in line]
    wrong += [number for number, line in enumerate(lines, 1) if "threads" in line or "Auto" in line]
    found = [line for line in result.stdout.splitlines() if ": error:" in line]
    assert [int(line.split(":")[1]) for line in found] == sorted(wrong), result.stdout + result.stderr
    assert all("Literal[" in line for line in found)
