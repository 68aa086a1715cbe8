"""Results that reach the batch are made in its slot, and nothing else changes."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType
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

PROGRAMS = 2000 if os.environ.get("SHMLOADER_LONG") else 20


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
    "stack": (lambda rows: torch.stack(rows), "torch.stack"),  # noqa: PLW0108 - by torch's name
    "cat": (lambda rows: torch.cat([row[None] for row in rows]), "torch.cat"),
    "padded": (lambda rows: pad_sequence(rows, batch_first=True), "torch.pad_sequence"),
    "tensor of an array": (lambda rows: torch.tensor(np.stack(rows)), "torch.tensor"),
    "stacked arrays": (lambda rows: torch.from_numpy(np.stack([row.numpy() for row in rows])), "numpy.stack"),
    "stacked by NumPy": (lambda rows: torch.from_numpy(np.stack(rows)), "numpy.stack"),
    "array of arrays": (lambda rows: np.array([row.numpy() for row in rows]), "numpy.array"),
    "joined arrays": (lambda rows: np.concatenate([row.numpy()[None] for row in rows]), "numpy.concatenate"),
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


def test_collate_fn_may_be_torchs_function_itself() -> None:
    batches, statistics = load(torch.stack)
    assert_same(batches, [torch.stack([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert [str(site) for site in statistics.placed_sites] == ["torch.stack at collate_fn: made in the slot"]


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


def test_threads_that_keep_batches_leave_torchs_names_alone() -> None:
    kept: list[torch.Tensor] = []

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        kept.append(torch.stack(rows, out=shmloader.empty(32, 4096)))
        return kept[-1]

    own = torch.Tensor.resize_
    with shmloader.DataLoader(Rows(), 32, num_workers=1, worker_type="thread", collate_fn=collate) as loader:
        assert len(list(loader)) == 10
        assert loader.statistics().detached
    assert torch.Tensor.resize_ is own


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


def in_a_forked_process_that_writes(rows: list[torch.Tensor]) -> Any:
    """Has a child process that writes to the copy of the batch that it was forked with."""
    mine = torch.stack(rows)
    child = os.fork()
    if child == 0:
        mine.add_(1000)
        os._exit(0 if isinstance(torch.cat, BuiltinFunctionType) else 1)
    assert os.waitpid(child, 0)[1] == 0, "the names are torch's in the child"
    return mine


@pytest.mark.parametrize("collate", [in_another_thread, in_a_forked_process, in_a_forked_process_that_writes])
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
        names = [f"{one.__module__}.{one.__qualname__}" for one in (torch.stack, np.stack)]
        return self.functions[0](rows), inside, list(self.functions), names


def test_replaced_functions_are_pickled_and_named_as_torchs() -> None:
    for _, inside, functions, names in load(Remembers())[0]:
        assert inside is torch.cat
        assert names == [f"{one.__module__}.{one.__qualname__}" for one in (torch.stack, np.stack)]
        assert set(functions) == {torch.stack, torch.Tensor.new_zeros}


class Resizes:
    """Keeps results, and resizes one later in the way that is asked for."""

    def __init__(self, way: Callable[[torch.Tensor], Any], at: int, *, kept: bool) -> None:
        self.way, self.at, self.kept, self.made = way, at, kept, []  # type: ignore[var-annotated]

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        made, number = torch.stack(rows), int(rows[0][0]) // 32
        if number == self.at:
            resized = self.made[-1] if self.kept else made
            alias = resized.view(-1)
            self.way(resized)
            assert resized.untyped_storage().nbytes() == alias.untyped_storage().nbytes() >= resized.nbytes
            resized.view(-1)[2 * 32 * 4096 :] = 7.0  # what resizing adds has no values
        if self.kept and number > 3:
            self.made.append(made)
        return made, [one.clone() for one in self.made]


RESIZING = {
    "resize_": lambda tensor: tensor.resize_(80, 4096),
    "resize_as_": lambda tensor: tensor.resize_as_(torch.ones(80, 4096)),
    "torch.resize_as_": lambda tensor: torch.resize_as_(tensor, torch.ones(80, 4096)),
    "a storage": lambda tensor: tensor.untyped_storage().resize_(80 * 4096 * 4),
    "less": lambda tensor: tensor.resize_(3, 4096),
}


@pytest.mark.each_value
@pytest.mark.parametrize(("at", "kept"), [(5, False), (5, True), (9, True)])
@pytest.mark.parametrize("way", RESIZING)
def test_a_placed_result_can_be_resized(way: str, at: int, kept: bool) -> None:
    def play(**options: Any) -> list[Any]:
        collate = Resizes(RESIZING[way], at, kept=kept)
        with shmloader.DataLoader(Rows(), 32, num_workers=1, collate_fn=collate, **options) as loader:
            return [of_its_values(batch) for batch in loader]

    assert_same(play(), play(place_results=False))


def of_its_values(batch: Any) -> Any:
    """The batch; of a tensor that was resized without values only the rows that had some."""
    return [[tuple(one.shape), one[:32].clone()] for one in (batch[0], *batch[1])]


class Waits(Dataset[Any]):
    """Rows, one of which resizes what the collate function has kept."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 300:
            self.kept[-1].resize_(64, 4096)[32:] = 5
        return torch.full((4096,), float(index))


def test_what_is_kept_of_a_placed_result_can_be_resized_elsewhere() -> None:
    kept: list[torch.Tensor] = []

    def collate(rows: list[torch.Tensor]) -> Any:
        made = torch.stack(rows)
        if rows[0][0] == 192:
            kept.append(made)
        return made, [one.sum().item() for one in kept]

    with shmloader.DataLoader(Waits(kept), 32, num_workers=1, collate_fn=collate) as loader:
        sums = [batch[1] for batch in loader]
    of_kept = sum(range(192, 224)) * 4096
    assert sums[6:] == [[of_kept]] * 3 + [[of_kept + 32 * 4096 * 5]]


def fails_to_grow(rows: list[torch.Tensor]) -> Any:
    made = torch.from_numpy(np.zeros(4, np.float32))
    with contextlib.suppress(RuntimeError):
        made.resize_(10_000_000)
    return made


def test_a_tensor_that_was_resized_in_vain_is_an_error() -> None:
    said = r"16 bytes of memory and needs 40,000,000.*clone\(\)"
    loader = shmloader.DataLoader(Rows(), 32, num_workers=1, collate_fn=fails_to_grow)
    with loader, pytest.raises(RuntimeError, match=said):
        next(iter(loader))


def test_an_array_over_a_result_that_was_resized_keeps_its_values() -> None:
    """torch does not resize what has an array; then there is nothing to keep."""
    arrays: list[Any] = []

    def collate(rows: list[torch.Tensor]) -> Any:
        made = torch.stack(rows)
        if rows[0][0] == 160:
            arrays.append(made.numpy())
            with contextlib.suppress(RuntimeError):
                made.resize_(80, 4096)
            made = torch.stack(rows)
        return made, [array[:, 0].tolist() for array in arrays]

    with shmloader.DataLoader(Rows(), 32, num_workers=1, collate_fn=collate) as loader:
        seen = [batch[1] for batch in loader]
    assert seen[5:] == [[list(range(160, 192))]] * 5


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


def resizes_an_array(rows: list[torch.Tensor]) -> Any:
    made = np.stack([row.numpy() for row in rows])
    if rows[0][0] >= 4 * 32:  # one that is resized before, and so moved, is not in the batch
        made.resize((40, 4096), refcheck=False)
    return made


def test_an_array_that_cannot_be_resized_in_the_slot_says_how_to_avoid_it() -> None:
    with shmloader.DataLoader(Rows(), 32, num_workers=1, collate_fn=resizes_an_array) as loader:
        iterator, errors, batches = iter(loader), [], []
        for _ in range(10):
            try:
                batches.append(next(iterator))
            except ValueError as error:
                errors.append(str(error) + "".join(error.__notes__))
    assert len(errors) == 1, "placement ends with the first"
    assert "does not own its data" in errors[0]
    assert "place_results=False" in errors[0]
    assert [batch.shape for batch in batches] == [(32, 4096)] * 4 + [(40, 4096)] * 5


def test_numpys_names_stay_where_numba_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to find NumPy's own functions in what it compiles."""
    (tmp_path / "numba.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in "stacked arrays", "array of arrays", "joined arrays":
        assert not any(site.placed for site in load(COLLATES[name][0])[1].placed_sites)
    assert [site.placed for site in load(torch.stack)[1].placed_sites] == [True]


def test_deterministic_algorithms_fill_empty_memory() -> None:
    def empty(rows: list[torch.Tensor]) -> Any:
        torch.use_deterministic_algorithms(True)
        return torch.empty(32, 4096)

    assert all(batch.isnan().all() for batch in load(empty)[0])


@functools.cache
def stack_and_add() -> Any:
    """Made when first asked for: it imports the compiler, in seconds."""
    return torch.compile(lambda rows: torch.stack(rows) + 1, backend="eager", fullgraph=True)


def compiled_before(rows: list[torch.Tensor]) -> Any:
    return torch.stack(rows), stack_and_add()(rows)


def compiled(rows: list[torch.Tensor]) -> Any:
    return torch.compile(lambda parts: torch.stack(parts) + 1, backend="eager", fullgraph=True)(rows)


def traced(rows: list[torch.Tensor]) -> Any:
    warnings.simplefilter("ignore", DeprecationWarning)
    return torch.jit.trace(lambda *parts: torch.stack(parts) + 1, tuple(rows))(*rows)


def stack_and_subtract(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) - torch.ones(1)


def scripted(rows: list[torch.Tensor]) -> Any:
    warnings.simplefilter("ignore", DeprecationWarning)
    return torch.stack(rows), torch.jit.script(stack_and_subtract)(rows)


@pytest.mark.in_ci(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("collate", [compiled, compiled_before, traced, scripted])
def test_compiled_and_traced_functions_are_torchs(collate: Any) -> None:
    stack_and_add()
    batches, _ = load(collate)
    assert_same(batches, [collate([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])


def stack_and_add_1000(rows: list[torch.Tensor]) -> torch.Tensor:
    return imported_stack(rows) + 1000


def put_own_stack(_: Any = None) -> None:
    torch.stack = stack_and_add_1000


class PutsOwnStack(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            put_own_stack()
        return super().__getitem__(index)


def puts_own_stack(rows: list[torch.Tensor]) -> Any:
    if rows[0][0] == 160:
        put_own_stack()
    return torch.stack(rows)


@pytest.mark.parametrize("where", ["main process", "worker_init_fn", "dataset", "collate_fn"])
def test_a_function_that_the_program_puts_in_place_of_torchs_stays(where: str) -> None:
    try:
        if where == "main process":
            put_own_stack()
        with shmloader.DataLoader(
            PutsOwnStack() if where == "dataset" else Rows(),
            32,
            num_workers=1,
            worker_init_fn=put_own_stack if where == "worker_init_fn" else None,
            collate_fn=puts_own_stack if where == "collate_fn" else lambda rows: torch.stack(rows),  # noqa: PLW0108
        ) as loader:
            batches = list(loader)
    finally:
        torch.stack = imported_stack
    first = 5 if where == "collate_fn" else 0
    firsts = [32.0 * number + 1000 * (number >= first) for number in range(10)]
    assert [float(batch[0, 0]) for batch in batches] == firsts


class AnswersAnything:
    """A collate function as of a compiler or a configuration: its attributes are not a function's."""

    __code__ = stack_and_add_1000.__code__
    __name__ = None

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        return torch.stack(rows)

    def __eq__(self, other: object) -> Any:
        return torch.ones(2) == other  # whose truth is an error

    __hash__ = None  # type: ignore[assignment]


def test_a_collate_function_may_be_any_object() -> None:
    batches, statistics = load(AnswersAnything())
    assert len(batches) == 10
    assert [site.placed for site in statistics.placed_sites] == [True]


class Subclass(torch.Tensor):
    """Has a stack of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.stack:
            return torch.full((4,), 7.0)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_torch_function_of_the_program_gets_the_function_that_torch_has() -> None:
    def collate(rows: list[torch.Tensor]) -> Any:
        return torch.stack(rows), torch.stack([row.as_subclass(Subclass) for row in rows])  # type: ignore[arg-type]

    batches, statistics = load(collate)
    assert all(torch.equal(other, torch.full((4,), 7.0)) for _, other in batches)
    assert [site.placed for site in statistics.placed_sites] == [True]


class HasALoader(Dataset[Any]):
    """Whole batches of a loader with threads."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        with shmloader.DataLoader(
            Rows(), 32, num_workers=1, worker_type="thread", collate_fn=torch.stack
        ) as loader:
            return torch.stack(list(next(iter(loader)) + number))


def test_a_loader_with_threads_in_the_data_set() -> None:
    with shmloader.DataLoader(HasALoader(), batch_size=None, num_workers=1) as loader:
        assert [float(batch[0, 0]) for batch in loader] == list(range(10))


def of_a_readonly_array(rows: list[torch.Tensor]) -> Any:
    array = np.stack([row.numpy() for row in rows])
    array.flags.writeable = False
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        return torch.tensor(array), [str(warning.message) for warning in warned]


def test_an_array_that_cannot_be_written_gives_no_warning() -> None:
    batches, statistics = load(of_a_readonly_array)
    assert not any(warned for _, warned in batches)
    assert [site.placed for site in statistics.placed_sites] == [True]


def test_an_array_keeps_the_strides_that_torch_gives_it() -> None:
    def collate(rows: list[torch.Tensor]) -> Any:
        array = np.stack([row.numpy() for row in rows])
        made = torch.tensor(array if rows[0][0] < 160 else array[None])
        return made, made.stride()

    batches, statistics = load(collate)
    assert_same(batches, [collate([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert [site.placed for site in statistics.placed_sites] == [True]


def test_rows_keep_the_strides_that_torch_gives_them() -> None:
    def take(rows: torch.Tensor, indices: list[int]) -> Any:
        rows = rows if indices[0] < 160 else rows.as_strided((320, 4096, 1), (4096, 1, 7))
        made = rows[indices]
        return [made, str(made.stride())]

    with shmloader.DataLoader(Tables(take), batch_size=None, num_workers=1) as loader:
        batches, statistics = list(loader), loader.statistics()
    assert_same(batches, [Tables(take)[number] for number in range(10)])
    assert [site.placed for site in statistics.placed_sites] == [True]


ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
ROW = torch.arange(8192.0).view(4, 2048)
UNLIKE: dict[str, Callable[[], torch.Tensor]] = {
    "ordinary": lambda: ROW + 1,
    "turned": lambda: (ROW + 1).view(2048, 4).t(),
    "negated when it is read": lambda: torch.view_as_complex(torch.stack([ROW, ROW], -1)).conj().imag,
    "of another dtype": ROW.double,
    "with a gradient": lambda: ROW.clone().requires_grad_(),
    "of a graph": lambda: ROW.clone().requires_grad_() * 2,
    "sparse": ROW.to_sparse,
    "nested": lambda: torch.nested.nested_tensor([ROW]),
    "without memory": lambda: ROW.to("meta"),
    "images in channels_last": lambda: ROW.view(4, 2048, 1, 1).to(memory_format=torch.channels_last),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("name", [*UNLIKE, pytest.param("on a GPU", marks=ON_A_GPU)])
@pytest.mark.parametrize("call", ["stack", "cat", "pad_sequence"])
def test_a_tensor_unlike_the_others_is_joined_as_by_torch(call: str, name: str, place: int) -> None:
    unlike = ROW.cuda() if name == "on a GPU" else UNLIKE[name]()
    tensors = [unlike if unlike.dim() == 4 else ROW] * 3
    tensors[place] = unlike
    arguments = (True, 0.0) if call == "pad_sequence" else ()
    (way,) = [one.second_way for one in CALLS if str(one) == f"torch.{call}"]
    try:
        made: Any = way(lambda shape, dtype: torch.empty(shape, dtype=dtype), tensors, *arguments)
    except Exception:
        made = None
    if made is not None:
        own: Any = pad_sequence if call == "pad_sequence" else getattr(torch, call)
        expected = own(tensors, *arguments)
        assert (made.dtype, made.device) == (expected.dtype, expected.device)
        assert torch.equal(made, expected)
        assert made.stride() == expected.stride()
        assert made.requires_grad is expected.requires_grad
    joined = ["turned"]
    if call != "pad_sequence":  # which is by NumPy
        joined.append("negated when it is read")
    is_placed = name == "ordinary" or (place > 0 and name in joined)
    assert (made is not None) is is_placed


@pytest.mark.parametrize(("padding", "dtype"), [(-1, torch.uint8), (2**53 + 1, torch.int64)])
def test_padding_is_the_number_that_torch_makes_of_it(padding: int, dtype: torch.dtype) -> None:
    def pad(rows: list[torch.Tensor]) -> Any:
        rows = [row.to(dtype).repeat(4) for row in rows]
        value = padding if rows[0][0] >= 160 else 0
        try:
            return pad_sequence([*rows, rows[0][:-1]], batch_first=True, padding_value=value)
        except RuntimeError as error:
            return torch.stack(rows), str(error)

    batches, statistics = load(pad)
    assert_same(batches, [pad([Rows()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert "torch.pad_sequence" in [site.call for site in statistics.placed_sites if site.placed]


class RaisesAtTimes(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        made = torch.stack([torch.full((4096,), float(number))] * 32)
        if number % 7 == 5:
            raise ValueError(number)
        return made


@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
def test_batches_that_are_left_out_say_nothing_about_a_call() -> None:
    with shmloader.DataLoader(RaisesAtTimes(), batch_size=None, num_workers=1, on_error="skip") as loader:
        assert [int(batch[31, 5]) for batch in loader] == [n for n in range(40) if n % 7 != 5]
        assert [site.placed for site in loader.statistics().placed_sites] == [True]
