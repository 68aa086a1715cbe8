"""An index or key of any size takes a line at most in notes, warnings and errors of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
from caught_warnings import caught_warnings
from torch.utils.data import Dataset

from shmloader import BadSampleWarning, DataLoader, WorkerDied, WorkerTimeout
from shmloader.messages import LINE, page

WAYS = {
    "no workers": {"num_workers": 0},
    "a process": {"num_workers": 1},
    "a thread": {"num_workers": 1, "worker_type": "thread"},
}


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("repr")


INDICES = {
    "a list": list(range(100_000)),
    "a key": "k" * 1_000_000,
    "a dict": dict.fromkeys(range(50_000), "value"),
    "a tensor": torch.arange(900).reshape(30, 30),
    "without a repr": NoRepr(),
}


class Fails(Dataset):
    """Does ``what`` for every sample."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.sleeps = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        if self.what == "raise":
            raise ValueError("bad")
        if self.what == "look up":
            return {}[str(index)]
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "sleep":
            self.sleeps.set()
            time.sleep(60)
        return index if self.what == "return" else torch.zeros(1)


def bad_collate(samples: Any) -> Any:
    raise ValueError("collate")


def notes_of(loader: Any) -> list[str]:
    with pytest.raises(ValueError, match=r"bad|collate") as caught:
        next(iter(loader))
    return [line for note in caught.value.__notes__ for line in note.split("\n")]


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("batched", [False, True])
def test_notes_of_a_sample(index: Any, way: str, batched: bool) -> None:
    how = {"batch_sampler": [[index]]} if batched else {"batch_size": None, "sampler": [index]}
    lines = notes_of(DataLoader(Fails("raise"), **how, **WAYS[way]))
    assert lines[0].startswith("raised by dataset[")
    assert max(map(len, lines)) < LINE + 100
    assert sum(not line.startswith("  ") for line in lines) < 12  # without the traceback's frames


@pytest.mark.parametrize("way", WAYS)
def test_notes_of_a_collate_function(way: str) -> None:
    how = {"batch_sampler": [[*INDICES.values()] * 8], "collate_fn": bad_collate}
    lines = notes_of(DataLoader(Fails("zeros"), **how, **WAYS[way]))
    assert lines[0].startswith("raised by collate_fn, given dataset[[0, 1, ")
    assert lines[0].endswith("... and 16 more")
    assert max(map(len, lines)) < 900


@pytest.mark.parametrize("way", ["a process", "a thread"])
def test_the_traceback_of_a_long_text(way: str) -> None:
    how = {"batch_size": None, "sampler": [INDICES["a list"]], **WAYS[way]}
    with pytest.raises(KeyError) as caught:
        next(iter(DataLoader(Fails("look up"), **how)))
    assert len(caught.value.args[0]) > 500_000  # the program's own argument stays whole
    assert len("".join(caught.value.__notes__)) < 5_000


@pytest.mark.parametrize("way", WAYS)
def test_the_warning_of_bad_samples(way: str) -> None:
    how = {"batch_sampler": [[INDICES["a list"], 3], [INDICES["a key"], 3]], "on_error": "skip"}
    loader = DataLoader(Fails("raise"), **how, **WAYS[way])
    with caught_warnings() as caught:
        assert list(loader) == []
    (text,) = [str(each.message) for each in caught if each.category is BadSampleWarning]
    assert len(text) < 2_000
    assert loader.statistics().bad_sample_list[0].index == INDICES["a list"]
    loader.close()


def test_a_worker_that_died() -> None:
    loader = DataLoader(Fails("die"), batch_size=None, sampler=[INDICES["a list"]], num_workers=1)
    with pytest.raises(WorkerDied) as caught:
        next(iter(loader))
    assert len(str(caught.value)) < 2_000
    assert f"... (causes and cures: {page('docs/messages.md')})" in str(caught.value)
    assert caught.value.indices == (INDICES["a list"],)


def test_a_worker_that_does_not_answer() -> None:
    dataset = Fails("sleep")
    loader = DataLoader(dataset, batch_size=None, sampler=[INDICES["a key"]], num_workers=1, timeout=0.3)
    iterator = iter(loader)
    assert dataset.sleeps.wait(60)
    with pytest.raises(WorkerTimeout) as caught:
        next(iterator)
    iterator._workers[0].kill()  # closing would wait for it
    first, *stack = str(caught.value).split("\n")
    _, indices = first.split("; outstanding index batches: ")
    assert len(indices) == LINE
    assert any("__getitem__" in line for line in stack)
