"""Batches are views of shared memory, and a held one never changes, whatever it is held by."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from parity.compare import assert_same
from parity.datasets import Rows, row
from parity.holding import ARRAY_WAYS, TENSOR_WAYS, Leaves, leaves
from parity.run import Build, assert_plays
from shmloader import DataLoader, SpillWarning

WIDTH = 6000


def _forked(*args: Any, **kwargs: Any) -> Any:
    return DataLoader(*args, multiprocessing_context="fork", **kwargs)


def _shared_ranges() -> list[tuple[int, int]]:
    """The address ranges of this process that lie in shared memory."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[5].startswith(("/memfd:", "/dev/shm/")):
            first, last = (int(number, 16) for number in fields[0].split("-"))
            ranges.append((first, last))
    return ranges


def _is_shared(address: int, nbytes: int) -> bool:
    return any(first <= address and address + nbytes <= last for first, last in _shared_ranges())


def _addresses(batch: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    for name, leaf in batch.items():
        if isinstance(leaf, torch.Tensor):
            yield name, leaf.data_ptr(), leaf.nbytes
        else:
            yield name, leaf.ctypes.data, leaf.nbytes


@pytest.mark.parametrize("collated", [True, False])
def test_leaves_are_aligned_views_of_shared_memory(collated: bool) -> None:
    """Collated or copied in, every leaf begins at a multiple of 64 bytes of a shared mapping."""
    how = {"batch_size": 3} if collated else {"batch_size": None, "collate_fn": leaves}
    seen = 0
    for batch in _forked(Leaves(30), num_workers=2, **how):
        for name, address, nbytes in _addresses(batch):
            assert address % 64 == 0, name
            assert _is_shared(address, nbytes), name
            seen += 1
    assert seen > 10


def test_a_batch_shares_its_memory_with_the_batch_before_it_at_most_once_released() -> None:
    """Slots are used again: many batches have few addresses; held ones do not overlap."""
    loader = _forked(Rows(400, WIDTH), 2, num_workers=2)
    addresses = [batch.data_ptr() for batch in loader]
    assert len(set(addresses)) <= 2 * 2 + 3
    held = list(loader)
    assert len({batch.data_ptr() for batch in held}) == len(held) == 200


def _run_on(iterator: Iterator[Any], count: int) -> None:
    """Take and drop batches, so that every slot that is free is written again."""
    for _ in range(count):
        next(iterator)
    gc.collect()


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "array", "F array", "permuted"])
def test_what_is_derived_from_a_batch_keeps_it_unchanged(kind: str) -> None:
    """The program holds one derived object of each batch, of every sort, and far more batches follow."""
    ways = ARRAY_WAYS if "array" in kind else TENSOR_WAYS
    dataset = Leaves(len(ways) + 60, only=kind)
    iterator = iter(_forked(dataset, None, num_workers=2, collate_fn=leaves))
    held: list[tuple[str, Any, Callable[[Any], Any], Any]] = []
    for index, (name, (derive, read)) in enumerate(ways.items()):
        derived = derive(next(iterator)["leaf"])
        held.append((name, derived, read, read(derive(dataset[index]["leaf"]))))
        del derived
    _run_on(iterator, 60)
    for name, derived, read, expected in held:
        assert_same((name, read(derived)), (name, expected))


def test_an_autograd_graph_keeps_the_batch_it_was_built_on() -> None:
    """backward() long after the batch was dropped sees the batch's values."""
    weight = torch.ones(WIDTH, requires_grad=True)
    iterator = iter(_forked(Rows(100, WIDTH), num_workers=2))
    losses = [(next(iterator)[0] * weight).sum() for _ in range(6)]
    _run_on(iterator, 60)
    for index, loss in enumerate(losses):
        weight.grad = None
        loss.backward()
        assert torch.equal(weight.grad, row(index, WIDTH))


def test_one_leaf_of_many_keeps_its_batch() -> None:
    """Dropping the dict and its other leaves does not free the slot."""
    iterator = iter(_forked(Leaves(90), None, num_workers=2, collate_fn=leaves))
    names = list(Leaves(1)[0])
    held = {name: next(iterator)[name] for name in names}
    _run_on(iterator, 60)
    for index, name in enumerate(names):
        assert_same(held[name], Leaves(90)[index][name])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_list_of_all_batches_is_torchs(workers: int) -> None:
    """Three hundred batches are held at once, far more than there are slots; our loader warns."""

    def play(build: Build) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpillWarning)
            return [list(build(Rows(300, 700), num_workers=workers))]

    assert_plays(play)


def test_holding_beyond_the_memory_budget_is_slower_but_right() -> None:
    """Batches that find no slot, and batches larger than any slot, with one warning."""
    loader = _forked(Rows(60, 8 * WIDTH), 2, num_workers=2, memory_budget_nbytes=3_200_000)
    with pytest.warns(SpillWarning) as caught:
        held = list(loader)
    assert len([seen for seen in caught if seen.category is SpillWarning]) == 1
    assert_same(held, list(TorchLoader(Rows(60, 8 * WIDTH), 2)))
    small = _forked(Rows(20, WIDTH), 10, num_workers=1, memory_budget_nbytes=50_000)
    with pytest.warns(SpillWarning):
        assert_same(list(small), list(TorchLoader(Rows(20, WIDTH), 10)))


def test_looking_one_batch_ahead_is_safe() -> None:
    """accelerate and Lightning fetch the next batch before the last one is used."""

    def play(build: Build) -> list[Any]:
        iterator, used = iter(build(Rows(80, WIDTH), 2, num_workers=2, prefetch_factor=1)), []
        ahead = next(iterator)
        for following in iterator:
            used.append(ahead.sum(dim=1))
            ahead = following
        return [*used, ahead.sum(dim=1)]

    assert_plays(play)


def test_held_batches_survive_the_iterator_and_the_loader() -> None:
    """Batches are compared after the epoch, after the workers are gone, and after the next epoch."""
    loader = _forked(Rows(30, WIDTH), 3, num_workers=2, persistent_workers=True)
    held = list(loader)
    _run_on(iter(loader), 10)
    loader._iterator = None
    del loader
    gc.collect()
    assert_same(held, list(TorchLoader(Rows(30, WIDTH), 3)))


def test_batches_may_be_dropped_in_any_order_and_in_other_threads() -> None:
    """A few are held, at random distances, and each is dropped by a thread of its own."""
    import random
    import threading

    draw = random.Random(5)
    held: dict[int, Any] = {}
    for index, batch in enumerate(_forked(Rows(400, WIDTH), num_workers=2)):
        held[index] = batch
        del batch
        while len(held) > draw.randrange(1, 9):
            gone = draw.choice(list(held))
            thread = threading.Thread(target=held.pop, args=(gone,))
            thread.start()
            thread.join()
        for kept, tensor in held.items():
            assert torch.equal(tensor[0], row(kept, WIDTH))


def _saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def test_a_batch_is_saved_pickled_and_copied_at_its_own_size() -> None:
    """Each leaf has a storage of its own, so a file holds the leaf and not the slot."""
    for batch in _forked(Leaves(8), 2, num_workers=1):
        for name, leaf in batch.items():
            for kept in (_saved(leaf), pickle.dumps(leaf)):
                assert leaf.nbytes <= len(kept) < leaf.nbytes + 4096, name
            assert leaf.untyped_storage().nbytes() == leaf.nbytes, name
            assert leaf.storage_offset() == 0, name
            assert_same(copy.deepcopy(leaf), leaf)
            assert_same(pickle.loads(pickle.dumps(leaf)), leaf)
            assert_same(torch.load(io.BytesIO(_saved(leaf))), leaf)
            assert not _is_shared(copy.deepcopy(leaf).data_ptr(), leaf.nbytes), name


def test_a_batch_may_be_resized_and_reshaped_like_any_tensor() -> None:
    """In-place changes of a batch's geometry leave its neighbours alone."""

    def play(build: Build) -> list[Any]:
        seen = []
        for batch in build(Rows(40, WIDTH), 2, num_workers=2):
            batch.t_().unsqueeze_(0)
            batch.resize_(10)
            seen.append(batch.clone())
            batch.set_(torch.zeros(3))
            seen.append(batch)
        return seen

    assert_plays(play)


def test_arrays_in_a_batch_are_writeable_and_keep_to_themselves() -> None:
    """An ndarray leaf may be written, sorted and sent like one that the caller made."""
    for index, batch in enumerate(_forked(Leaves(40, only="array"), None, num_workers=2)):
        array = batch["leaf"]
        as_array = array if isinstance(array, np.ndarray) else array.numpy()
        assert as_array.flags.writeable
        assert_same(as_array, Leaves(40, only="array")[index]["leaf"])
        as_array[:] = -1
