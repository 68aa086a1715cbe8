"""Results that reach the batch are made in its slot, and nothing else changes."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import placement_programs
import pytest
import torch
from parity.compare import assert_same
from torch import stack as imported_stack
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import shmloader
from shmloader.worker.placed_calls import CALLS

PROGRAMS = 2000 if os.environ.get("SHMLOADER_LONG") else 40


@pytest.mark.parametrize("first", range(0, PROGRAMS, 20))
def test_random_programs_give_the_same_with_placement_and_without(first: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(first, first + 20):
            assert not placement_programs.differences(seed)
    finally:
        torch.set_num_threads(threads)


class Rows(Dataset[Any]):
    """Float rows of 16 kB, for batches of 512 kB."""

    def __len__(self) -> int:
        return 32 * 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4096,), float(index))


class Tables(Dataset[Any]):
    """Whole batches, by an expression of the subclass's."""

    def __init__(self, take: Callable[[torch.Tensor, list[int]], Any]) -> None:
        self.rows, self.take = torch.arange(320.0).repeat_interleave(4096).view(320, 4096), take

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return self.take(self.rows, list(range(32 * number, 32 * number + 32)))


def load(collate: Any, **options: Any) -> tuple[list[Any], shmloader.LoaderStatistics]:
    """All batches of one worker, and the statistics."""
    with shmloader.DataLoader(Rows(), 32, num_workers=1, collate_fn=collate, **options) as loader:
        return list(loader), loader.statistics()


def by_method(rows: list[torch.Tensor]) -> Any:
    made = rows[0].new_zeros((len(rows), 4096))
    for row, out in zip(rows, made, strict=True):
        out.copy_(row)
    return made


def by_full(rows: list[torch.Tensor]) -> Any:
    made = torch.full((len(rows), 4096), -1.0)
    made[:, :4000] = torch.stack(rows)[:, :4000]
    return made


def by_shared_storage(rows: list[torch.Tensor]) -> Any:
    storage: Any = rows[0].untyped_storage()
    out = torch.empty(0).set_(storage._new_shared(32 * 16384), 0, (32, 4096), (4096, 1))
    return torch.stack(rows, 0, out=out)


def by_imported_name(rows: list[torch.Tensor]) -> Any:
    return imported_stack(rows)


COLLATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stack": (torch.stack, "torch.stack"),
    "cat": (lambda rows: torch.cat([row[None] for row in rows]), "torch.cat"),
    "padded": (lambda rows: pad_sequence(rows, batch_first=True), "torch.pad_sequence"),
    "tensor of an array": (lambda rows: torch.tensor(np.stack(rows)), "torch.tensor"),
    "new_zeros": (by_method, "Tensor.new_zeros"),
    "full": (by_full, "torch.full"),
    "torch's old default": (by_shared_storage, "UntypedStorage._new_shared"),
}


@pytest.mark.parametrize("name", COLLATES)
def test_results_in_the_batch_are_made_in_the_slot(name: str) -> None:
    collate, call = COLLATES[name]
    batches, statistics = load(collate)
    assert_same(batches, [collate([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert [site.call for site in statistics.placed_sites if site.placed] == [call]
    assert "test_placement.py:" in statistics.placed_sites[0].where
    assert f"{call} at test_placement.py" in str(statistics)


@pytest.mark.parametrize(
    ("take", "call"),
    [
        (lambda rows, indices: rows[indices], "Tensor.__getitem__"),
        (lambda rows, indices: rows[torch.tensor(indices)], "Tensor.__getitem__"),
        (lambda rows, indices: rows.index_select(0, torch.tensor(indices)), "Tensor.index_select"),
        (lambda rows, indices: torch.stack([rows[index] for index in indices]), "torch.stack"),
    ],
)
def test_whole_batches_of_a_data_set_are_made_in_the_slot(take: Any, call: str) -> None:
    with shmloader.DataLoader(Tables(take), batch_size=None, num_workers=1) as loader:
        batches, statistics = list(loader), loader.statistics()
    assert_same(batches, [Tables(take)[number] for number in range(10)])
    assert [site.call for site in statistics.placed_sites if site.placed] == [call]


@pytest.mark.parametrize(
    ("collate", "why"),
    [
        (lambda rows: torch.stack(rows).double(), None),
        (lambda rows: torch.stack(rows)[:, :8].clone(), None),
        (lambda rows: torch.from_numpy(np.stack(rows)), None),
        (lambda rows: torch.stack([row[:1000] for row in rows])[:2], None),
        (by_imported_name, "imported by its name"),
    ],
)
def test_other_results_are_left_to_torch(collate: Any, why: str | None) -> None:
    batches, statistics = load(collate)
    assert_same(batches, [collate([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert not any(site.placed for site in statistics.placed_sites)
    if why:
        assert why in str(statistics)


def test_the_argument_switches_it_off() -> None:
    assert not load(COLLATES["stack"][0], place_results=False)[1].placed_sites
    with pytest.raises(TypeError, match="place_results must be True or False"):
        shmloader.DataLoader(Rows(), place_results=1)  # type: ignore[arg-type]


def test_threads_and_the_main_process_are_left_alone() -> None:
    def names_are_torchs(rows: list[torch.Tensor]) -> Any:
        return torch.stack(rows), [getattr(call.owner, call.name) == own for call, own in before]

    before = [(call, getattr(call.owner, call.name)) for call in CALLS]
    for options in ({"worker_type": "thread", "num_workers": 1}, {"num_workers": 0}):
        with shmloader.DataLoader(Rows(), 32, collate_fn=names_are_torchs, **options) as loader:  # type: ignore[arg-type]
            assert all(all(same) for _, same in loader)
            assert not loader.statistics().placed_sites


class Keeper:
    """A collate function that keeps every batch, and looks at those that it has kept."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        self.kept.append(torch.stack(rows))
        right = all(torch.equal(kept[:, 0], torch.arange(32.0) + 32 * n) for n, kept in enumerate(self.kept))
        return self.kept[-1], right


def test_a_program_that_keeps_its_batches_has_them_unchanged_and_placement_ends() -> None:
    batches, statistics = load(Keeper())
    assert all(right for _, right in batches)
    assert [site.placed for site in statistics.placed_sites] == [False]
    assert "keeps its batches" in str(statistics)
    assert statistics.detached == 3


def in_another_thread(rows: list[torch.Tensor]) -> Any:
    """Stacks in this thread and in another one, each of which must have a result of its own."""
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.stack(rows) + 0))
    thread.start()
    mine = torch.stack(rows)
    thread.join()
    return mine, made[0]


def in_a_forked_process(rows: list[torch.Tensor]) -> Any:
    """Stacks in a child process first, which must not write to the batch's slot."""
    mine = torch.stack(rows)
    child = os.fork()
    if child == 0:
        torch.stack([row + 1000 for row in rows])
        os._exit(0)
    os.waitpid(child, 0)
    return mine


@pytest.mark.parametrize("collate", [in_another_thread, in_a_forked_process])
def test_only_the_thread_that_runs_the_function_writes_to_the_slot(collate: Any) -> None:
    batches, _ = load(collate)
    for number, batch in enumerate(batches):
        for tensor in batch if isinstance(batch, tuple) else (batch,):
            assert torch.equal(tensor[:, 5], torch.arange(32.0) + 32 * number)


class Remembers:
    """Pickles torch's functions while they are replaced, and when they are not any more."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        self.functions += [torch.stack, torch.Tensor.new_zeros]
        inside = pickle.loads(pickle.dumps(torch.cat))
        return self.functions[0](rows), inside, list(self.functions)


def test_replaced_functions_are_pickled_as_torchs() -> None:
    for _, inside, functions in load(Remembers())[0]:
        assert inside is torch.cat
        assert set(functions) == {torch.stack, torch.Tensor.new_zeros}


def grows_behind(rows: list[torch.Tensor]) -> Any:
    warnings.simplefilter("ignore")
    made = torch.stack(rows)
    if rows[0][0] >= 160:  # torch resizes the output, where no name stands for that
        torch.add(torch.ones(64, 4096), 1, out=made)
    return made


def test_a_resize_that_cannot_be_seen_says_how_to_avoid_it() -> None:
    with shmloader.DataLoader(Rows(), 32, num_workers=1, collate_fn=grows_behind) as loader:
        iterator, errors = iter(loader), []
        for _ in range(10):
            try:
                next(iterator)
            except RuntimeError as error:
                errors.append(str(error) + "".join(error.__notes__))
    assert len(errors) == 1, "placement ends with the first"
    assert "not resizable" in errors[0]
    assert "place_results=False" in errors[0]


def test_deterministic_algorithms_fill_empty_memory() -> None:
    def empty(rows: list[torch.Tensor]) -> Any:
        torch.use_deterministic_algorithms(True)
        return torch.empty(32, 4096)

    assert all(batch.isnan().all() for batch in load(empty)[0])


@torch.compile(backend="eager", fullgraph=True)
def stack_and_add(rows: list[torch.Tensor]) -> Any:
    return torch.stack(rows) + 1


def compiled_before(rows: list[torch.Tensor]) -> Any:
    return torch.stack(rows), stack_and_add(rows)


def compiled(rows: list[torch.Tensor]) -> Any:
    return torch.compile(lambda parts: torch.stack(parts) + 1, backend="eager", fullgraph=True)(rows)


def traced(rows: list[torch.Tensor]) -> Any:
    warnings.simplefilter("ignore", DeprecationWarning)
    return torch.jit.trace(lambda *parts: torch.stack(parts) + 1, tuple(rows))(*rows)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("collate", [compiled, compiled_before, traced])
def test_compiled_and_traced_functions_are_torchs(collate: Any) -> None:
    batches, _ = load(collate)
    assert_same(batches, [collate([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])
