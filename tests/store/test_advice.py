"""Advice in warnings and errors is right, and agrees with their other numbers."""

from __future__ import annotations

import re
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import torch
from caught_warnings import caught_warnings
from loading import Growing, Numbered
from warm_python import warm_python

from shmloader import DataLoader, SpillWarning, WorkerTimeout

BUDGET = re.compile(r"the slots' memory budget is ([\d,]+) bytes")
ADVISED = re.compile(r"is at least ([\d,]+) bytes \(memory_budget_nbytes=")


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    assert found, text
    return int(found[1].replace(",", ""))


def test_the_budget_advised_is_not_below_the_least_there_can_be() -> None:
    with (
        DataLoader(
            Growing([20_000] * 16), batch_size=None, num_workers=2, memory_budget_nbytes=20_000
        ) as loader,
        caught_warnings() as caught,
    ):
        list(loader)
    assert [one.category for one in caught] == [SpillWarning]
    text = str(caught[0].message)
    assert _number(BUDGET, text) == 6 * 4096
    assert _number(ADVISED, text) >= 6 * 160_000
    assert "(a page for each of 6 slots, the least there can be)" in text


@pytest.mark.parametrize(
    ("sizes", "budget_nbytes", "parts"),
    [
        ([5001] * 9, 30_000, 1),
        ([10] * 8 + [5001] + [10] * 8, 6 * 10 * 4096, 4),  # much larger than all before it
    ],
)
def test_the_budget_advised_for_large_batches_holds_them(
    sizes: list[int], budget_nbytes: int, parts: int
) -> None:
    seen: list[int] = []
    for advised in (False, True):
        with (
            DataLoader(
                Growing(sizes), batch_size=None, num_workers=2, memory_budget_nbytes=budget_nbytes
            ) as loader,
            caught_warnings() as caught,
        ):
            for sample in loader:
                seen.append(len(sample))
            assert (loader.statistics().spills == 0) is advised
        if not advised:
            text = str(caught[0].message)
            assert "a batch of 40," in text
            assert _number(BUDGET, text) == budget_nbytes
            assert "the least there can be" not in text
            budget_nbytes = _number(ADVISED, text)
            assert budget_nbytes == parts * 6 * 10 * 4096  # whole pages
    assert seen == sizes * 2


def test_a_program_without_a_main_guard_is_told_of_it_and_not_of_pickling(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(
            """
            from shmloader import DataLoader
            for batch in DataLoader([1, 2], num_workers=1, multiprocessing_context="spawn"):
                print(batch)
            """
        )
    )
    result = subprocess.run([*warm_python(), script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "if __name__ == '__main__':" in result.stderr
    assert "pickle" not in result.stderr
    assert "lambda" not in result.stderr


class Hangs(Numbered):
    """Writes a file when a sample is requested, and hangs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(4)
        self.begun = folder / "begun"

    def __getitem__(self, index: int) -> torch.Tensor:
        self.begun.touch()
        time.sleep(30)
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_timeout_says_what_to_change_and_shows_only_the_programs_threads(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmloader.failures.stacks._ANSWER_S", 20.0)
    dataset = Hangs(tmp_path)
    loader = DataLoader(dataset, num_workers=1, timeout=0.3, multiprocessing_context=method)
    iterator = iter(loader)
    while not dataset.begun.exists():
        time.sleep(0.05)
    with pytest.raises(WorkerTimeout) as caught:
        next(iterator)
    iterator._workers[0].kill()  # instead of waiting for its sleep
    loader.close()
    first_line, _, stack = str(caught.value).partition("\n")
    assert "  " not in first_line
    assert "raise timeout=" in first_line
    assert "in __getitem__" in stack
    assert stack.count("most recent call first") == 1
    assert "in wait" not in stack
