"""Batches lie in slots, and parts that a program or a worker keeps never change."""

import io
import warnings
from collections.abc import Callable
from multiprocessing import resource_sharer

import pytest
import torch
from caught_warnings import caught_warnings
from loading import Growing, KeepsBatches, Numbered, SendsAgain, into_empty
from parity.run import descriptors_for_torch

from shmloader import DataLoader, SpillWarning

BATCH = 4


def _first(batch: torch.Tensor) -> int:
    return int(batch[0, 0])


def test_slots_are_as_many_as_the_tasks_and_two() -> None:
    loader = DataLoader(Numbered(4000), batch_size=BATCH, num_workers=2, prefetch_factor=3)
    most = 0
    for batch in loader:
        figures = loader.statistics()
        total = figures.slots_free + figures.slots_granted + figures.slots_published + figures.slots_leased
        most = max(most, total)
        assert figures.reserved_nbytes <= 8 * 4096
        assert figures.slots_leased >= 1
        assert figures.used_nbytes >= batch.nbytes
    assert most == 3 * 2 + 2
    assert loader.statistics().spills == 0
    assert loader.statistics().batches == 1000


def test_reserved_memory_is_the_largest_batch_times_the_slots() -> None:
    sizes = [200_000 + 1000 * (i % 7) for i in range(300)]
    loader = DataLoader(Growing(sizes), batch_size=None, num_workers=2)
    for _ in loader:
        figures = loader.statistics()
        assert figures.reserved_nbytes <= (2 * 2 + 2) * (figures.largest_batch_nbytes + 4096)


KEPT: dict[str, Callable] = {
    "numpy": lambda t: t.numpy(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "slice": lambda t: t[1:, 2:5],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "storage": lambda t: t.untyped_storage(),
    "view": lambda t: t.view(torch.int32),
    "memoryview": lambda t: memoryview(t.numpy()),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "saved for backward": lambda t: t.double() @ torch.ones(8, 1, dtype=torch.double, requires_grad=True),
}


def _bytes(kept) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        return bytes(kept)
    if isinstance(kept, memoryview):
        return kept.tobytes()
    if type(kept).__name__ == "PyCapsule":
        kept = torch.utils.dlpack.from_dlpack(kept)
    if isinstance(kept, torch.Tensor):
        kept = kept.detach().numpy()
    return kept.tobytes()


@pytest.mark.parametrize("how", [how for how in KEPT if how != "dlpack"])
def test_what_is_kept_of_a_batch_never_changes(how: str) -> None:
    loader = DataLoader(Numbered(4000), batch_size=BATCH, num_workers=2)
    iterator = iter(loader)
    kept = [KEPT[how](next(iterator)) for _ in range(3)]
    before = [_bytes(item) for item in kept]
    for _ in iterator:
        pass
    assert [_bytes(item) for item in kept] == before
    assert len(set(before)) == 3


def test_a_dlpack_capsule_keeps_its_batch() -> None:
    iterator = iter(DataLoader(Numbered(4000), batch_size=BATCH, num_workers=2))
    capsule = KEPT["dlpack"](next(iterator))
    for _ in iterator:
        pass
    assert (torch.utils.dlpack.from_dlpack(capsule)[:, 0] == torch.arange(4)).all()


def sent(tensor: torch.Tensor) -> torch.Tensor:
    queue = torch.multiprocessing.SimpleQueue()
    queue.put(tensor)
    came = queue.get()
    queue.close()
    resource_sharer.stop()
    return came


@pytest.mark.parametrize("share", [torch.Tensor.share_memory_, sent])
@pytest.mark.parametrize("budget_nbytes", [None, 1])
def test_an_array_of_a_tensor_that_is_shared_later_never_changes(
    share: Callable[[torch.Tensor], torch.Tensor], budget_nbytes: int | None
) -> None:
    """Also where batches spill; and after the loader's end, when the slots are unmapped."""
    loader = DataLoader(
        Numbered(400, items=4096), batch_size=BATCH, num_workers=1, memory_budget_nbytes=budget_nbytes
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpillWarning)
        iterator = iter(loader)
        tensor = next(iterator)
        array, part = tensor.numpy(), tensor[1:].numpy()
        shared = share(tensor)
        for _ in range(20):
            next(iterator)
    loader.close()
    assert shared[:, 0].tolist() == tensor[:, 0].tolist() == array[:, 0].tolist() == [0, 1, 2, 3]
    assert part[:, 0].tolist() == [1, 2, 3]


def test_so_do_arrays_of_tensors_of_whom_many_were_kept_before() -> None:
    loader = DataLoader(Numbered(2400), batch_size=BATCH, num_workers=1)
    kept = [batch for position, batch in enumerate(loader) if position % 2]
    arrays = [kept[number].numpy() for number in (0, -1)]
    for number in (0, -1):
        kept[number].share_memory_()
    del kept
    assert [len(list(loader)), *(array[0, 0] for array in arrays)] == [600, 4, 2396]


def test_the_lease_of_a_tensor_that_is_shared_ends_with_its_last_view() -> None:
    loader = DataLoader(Numbered(400), batch_size=BATCH, num_workers=1)
    iterator = iter(loader)
    tensor = next(iterator)
    array = tensor.numpy()
    tensor.share_memory_()
    del tensor
    assert loader.statistics().slots_leased == 1
    del array
    assert loader.statistics().slots_leased == 0
    loader.close()


@pytest.mark.parametrize("share", [torch.Tensor.share_memory_, sent])
def test_the_lease_of_a_tensor_without_views_ends_when_it_is_shared(
    share: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with descriptors_for_torch(), DataLoader(Numbered(400), batch_size=BATCH, num_workers=1) as loader:
        kept = []
        for batch in loader:
            kept += batch, share(batch)
        assert loader.statistics().slots_leased == 0
        assert loader.statistics().spills == 0
        assert [_first(batch) for batch in kept[::2]] == list(range(0, 400, BATCH))


def test_a_list_of_far_more_batches_than_slots_is_exact() -> None:
    loader = DataLoader(Numbered(4000), batch_size=BATCH, num_workers=2)
    assert [_first(batch) for batch in list(loader)] == list(range(0, 4000, BATCH))
    assert loader.statistics().spills > 0


def test_epochs_of_persistent_workers_go_on_while_everything_is_kept() -> None:
    loader = DataLoader(Numbered(800), batch_size=BATCH, num_workers=2, persistent_workers=True)
    kept = [batch for _ in range(4) for batch in loader]
    assert [_first(batch) for batch in kept] == list(range(0, 800, BATCH)) * 4
    loader.close()


def test_beyond_the_budget_batches_spill_with_one_warning_and_stay_right() -> None:
    loader = DataLoader(
        Numbered(400, items=4096), batch_size=BATCH, num_workers=2, memory_budget_nbytes=8 * 140_000
    )
    with caught_warnings() as caught:
        batches = list(loader)
    (warning,) = caught
    assert warning.category is SpillWarning
    assert "memory_budget_nbytes" in str(warning.message)
    assert warning.filename == __file__
    assert [_first(batch) for batch in batches] == list(range(0, 400, BATCH))
    figures = loader.statistics()
    assert figures.spills > 80
    assert figures.spilled_nbytes > figures.spills * 4096 * 8 * BATCH


@pytest.mark.parametrize("budget_nbytes", [1, 100_000])
def test_batches_larger_than_a_slot_may_be_come_in_parts(budget_nbytes: int) -> None:
    sizes = [10, 200_000, 20, 30, 150_000, 0, 9]
    loader = DataLoader(Growing(sizes), batch_size=None, num_workers=2, memory_budget_nbytes=budget_nbytes)
    with pytest.warns(SpillWarning, match="larger than a slot"):
        for index, (size, sample) in enumerate(zip(sizes, loader, strict=True)):
            assert sample.shape == (size,)
            assert bool((sample == index).all())
            assert loader.statistics().reserved_nbytes <= max(budget_nbytes, 6 * 4096)
    assert loader.statistics().spills == 2


def test_a_spill_warning_that_is_an_error_loses_no_batch() -> None:
    loader = DataLoader(
        Growing([8] * 6 + [100_000] * 6), batch_size=None, num_workers=2, memory_budget_nbytes=1 << 18
    )
    seen, errors = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpillWarning)
        iterator = iter(loader)
        while True:
            try:
                seen.append(int(next(iterator)[0]))
            except SpillWarning:
                errors += 1
            except StopIteration:
                break
    assert (seen, errors) == (list(range(12)), 1)


def test_a_batch_in_parts_that_is_abandoned_does_not_disturb_the_next_epoch() -> None:
    sizes = [10, 200_000, 200_000, 200_000, 200_000, 20]
    loader = DataLoader(
        Growing(sizes), batch_size=None, num_workers=2, memory_budget_nbytes=1, persistent_workers=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpillWarning)
        for _ in range(3):
            assert len(next(iter(loader))) == 10
        assert [len(sample) for sample in loader] == sizes
    loader.close()


@pytest.mark.parametrize("collate", [KeepsBatches, SendsAgain])
def test_what_a_worker_keeps_of_its_batches_never_changes(collate: type) -> None:
    loader = DataLoader(Numbered(400), batch_size=BATCH, num_workers=2, collate_fn=collate())
    for number, result in enumerate(loader):
        batch = result
        if collate is SendsAgain:
            batch, first = result
            assert _first(first) == BATCH * (number % 2)
        assert (batch[:, 0] == torch.arange(BATCH * number, BATCH * number + BATCH)).all()
    # The first batch of a slot is collated elsewhere and copied in: only later ones need detaching.
    assert 60 < loader.statistics().detached <= 100


def test_ordinary_collation_detaches_nothing() -> None:
    loader = DataLoader(Numbered(400), batch_size=BATCH, num_workers=2)
    assert len(list(loader)) == 100
    assert loader.statistics().detached == 0


def test_custom_collates_write_into_the_slot_through_empty() -> None:
    loader = DataLoader(Numbered(400), batch_size=BATCH, num_workers=2, collate_fn=into_empty)
    for number, batch in enumerate(loader):
        expected = torch.arange(BATCH * number, BATCH * number + BATCH)
        assert (batch["rows"] == expected[:, None]).all()
        assert (batch["first"] == BATCH * number).all()
        if number > 12:  # every slot has its size now: leaves lie as they were made, not as they are named
            assert batch["first"].data_ptr() + batch["first"].nbytes == batch["rows"].data_ptr()


def test_saving_a_batch_writes_the_batch_and_not_the_slot() -> None:
    loader = DataLoader(Growing([1_000_000, 10, 10, 10, 10, 10, 10, 10]), batch_size=None, num_workers=1)
    for sample in loader:
        file = io.BytesIO()
        torch.save(sample, file)
        assert len(file.getvalue()) < sample.nbytes + 4000


def test_leaves_lie_in_shared_memory_at_cache_lines() -> None:
    for batch in DataLoader(Numbered(40), batch_size=BATCH, num_workers=1):
        assert batch.data_ptr() % 64 == 0
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps if "memfd:shmloader-slots" in line]
        assert any(int(a, 16) <= batch.data_ptr() < int(b, 16) for a, b in spans)
