"""Copies of batches to private memory give one warning, with numbers and advice."""

import resource
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from caught_warnings import caught_warnings
from loading import Growing, Numbered

from shmloader import DataLoader, SpillWarning
from shmloader.slots import RETAINED_SLOTS
from shmloader.slots.holders import holders


def test_more_kept_batches_than_slots_are_said_once() -> None:
    with DataLoader(Numbered(200, items=10_000), num_workers=2, persistent_workers=True) as loader:
        with caught_warnings() as caught:
            kept = [batch for _ in range(2) for batch in loader]
        assert [int(batch[0, 0]) for batch in kept] == [*range(200)] * 2
        spills = loader.statistics().spills
        assert spills == 400 - RETAINED_SLOTS - 2
    (warning,) = caught
    assert warning.category is SpillWarning
    assert warning.filename == __file__
    text = str(warning.message)
    assert f"the program keeps {RETAINED_SLOTS + 2} batches" in text
    assert f"this one of {loader.statistics().spilled_nbytes // spills:,} bytes" in text
    assert "tensor.clone()" in text


def test_as_many_kept_batches_as_there_are_slots_for_are_not_copied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpillWarning)
        with DataLoader(Numbered(RETAINED_SLOTS + 2), num_workers=2) as loader:
            kept = list(loader)
            assert loader.statistics().spills == 0
    assert len(kept) == RETAINED_SLOTS + 2


def test_a_budget_without_room_for_all_says_how_many_are_made_ahead() -> None:
    """Batches have 10 pages; the budget has room for five of them."""
    sizes = [10] * 6 + [5001] * 30
    with DataLoader(
        Growing(sizes), batch_size=None, num_workers=2, prefetch_factor=4, memory_budget_nbytes=50 * 4096
    ) as loader:
        iterator = iter(loader)
        with caught_warnings() as caught:
            assert [len(batch) for batch in iterator] == sizes
        assert iterator.table.budget.most_tasks == 3
    assert [one.category for one in caught] == [SpillWarning]


def test_one_warning_says_that_batches_are_copied_and_that_fewer_are_made_ahead() -> None:
    """Batches have 10 pages and come in pieces at first: a sixth of the budget is too small for one."""
    options = {"num_workers": 2, "prefetch_factor": 2, "memory_budget_nbytes": 42 * 4096}
    with DataLoader(Growing([5001] * 30), batch_size=None, **options) as loader:
        iterator = iter(loader)
        with caught_warnings() as caught:
            assert sum(1 for _ in iterator) == 30
        assert loader.statistics().spills > 0
        assert iterator.table.budget.most_tasks == 2
    (warning,) = caught
    assert warning.category is SpillWarning
    assert "copied to private memory" in str(warning.message)
    assert "fewer than 4 are made in advance" in str(warning.message)


def limit_files(_: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_slot_that_the_host_does_not_give_is_not_called_one_that_the_budget_forbids() -> None:
    """A worker that may not make files larger than a page: the first slot is one page, and stays so."""
    with caught_warnings() as caught:
        loader = DataLoader(
            Growing([5001] * 5), batch_size=None, num_workers=1, prefetch_factor=1, worker_init_fn=limit_files
        )
        assert [len(batch) for batch in loader] == [5001] * 5
        assert loader.statistics().spills == 5
    (warning,) = caught
    assert warning.category is SpillWarning
    assert "the host gave a slot less shared memory" in str(warning.message)
    assert "ulimit -f" in str(warning.message)


def test_containers_that_another_thread_changes_meanwhile_are_no_error() -> None:
    changed, stop = deque(range(2000)), threading.Event()

    def change() -> None:
        while not stop.is_set():
            changed.append(0)
            changed.popleft()

    thread, interval = threading.Thread(target=change), sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        assert all(holders([]).startswith("No variable") for _ in range(3))
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert len(changed) == 2000


def test_tensors_without_memory_of_their_own_are_no_error() -> None:
    said: list[str] = []

    def look(inside: torch.Tensor) -> torch.Tensor:
        said.append(holders([]))
        return inside

    torch.func.vmap(look)(torch.ones(3))
    assert said[0].startswith("No variable")


class Training:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.history: list[object] = []


def _warning_of(keep: Callable[[torch.Tensor], object], **options: Any) -> str:
    loader = DataLoader(Numbered(80, items=20_000), num_workers=1, **options)
    with loader, caught_warnings() as caught:
        for batch in loader:
            keep(batch)
    (warning,) = caught
    return str(warning.message)


def test_the_warning_names_the_variable_that_keeps_batches() -> None:
    training = Training()
    text = _warning_of(lambda batch: training.history.append({"image": batch}))
    leaf = "(Tensor (1, 20000) torch.int64; 65 leaves of 65 batches)"
    assert f"kept by `training.history[0]['image']` in {Path(__file__).name}" in text
    assert leaf in text


def test_a_budget_that_is_used_up_by_kept_views_names_them() -> None:
    rows = {}
    text = _warning_of(lambda batch: rows.setdefault(len(rows), batch[0]), memory_budget_nbytes=1_600_000)
    assert f"kept by `rows[0]` in {Path(__file__).name}" in text


def test_losses_that_keep_batches_by_their_graph_are_named() -> None:
    weights, losses = torch.ones(20_000, requires_grad=True), []
    text = _warning_of(lambda batch: losses.append((batch * weights).sum()))
    assert "`losses[0]`" in text
    assert "keep `.item()` or `.detach()` of it" in text


def test_a_search_for_what_keeps_batches_keeps_nothing_itself() -> None:
    """The variables of a running function are copied to look at them; the copies must not live on."""
    history = []
    _warning_of(history.append)
    first = weakref.ref(history[0])
    del history
    assert first() is None
