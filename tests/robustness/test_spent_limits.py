"""A program that has spent its descriptors or its memory: errors and warnings, and the loader goes on."""

import os
import resource

import pytest
import torch

import shmloader
from robustness.processes import python
from shmloader import DataLoader
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.memory import Extent, Segment

SPENT = """
    import os, resource, signal, sys, warnings
    import torch
    from spent_descriptors import descriptors_left
    from shmloader import DataLoader, WorkerDied

    class Dies(torch.utils.data.Dataset):
        def __init__(self, go):
            self.go = go
        def __len__(self):
            return 100
        def __getitem__(self, index):
            if self.go is not None:
                os.read(self.go, 1)
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.full((30_000,), index)
"""


def test_a_worker_that_dies_first_is_told_of_while_the_program_has_every_descriptor() -> None:
    """What an error needs is imported before: then nothing can be."""
    printed = python(
        SPENT
        + """
    go, tell = os.pipe()
    iterator = iter(DataLoader(Dies(go), num_workers=1))
    with descriptors_left(0):
        os.write(tell, b"x")
        try:
            next(iterator)
        except WorkerDied as error:
            print(error)
    """
    )
    assert "SIGKILL" in printed


def test_batches_that_are_kept_are_warned_of_while_the_program_has_every_descriptor() -> None:
    printed = python(
        SPENT
        + """
    iterator = iter(DataLoader(Dies(None), num_workers=1))
    kept = [next(iterator)]
    with warnings.catch_warnings(record=True) as caught, descriptors_left(0):
        warnings.simplefilter("always")
        kept += iterator
    print([batch[0, 0].item() for batch in kept] == list(range(100)), caught[0].message)
    """
    )
    assert printed.startswith("True the program keeps 66 batches, the most that slots are made for")
    assert "cannot be told without a free descriptor" in printed


def test_tensors_of_a_dataset_that_take_every_descriptor_are_named_as_the_cause() -> None:
    class Wide(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.tensors = [torch.full((10,), index) for index in range(300)]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises((RuntimeError, OSError), match="Too many open files") as caught:
            iter(DataLoader(Wide(), num_workers=1, multiprocessing_context="spawn"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (note,) = caught.value.__notes__
    assert note.startswith("Each tensor of the dataset takes a descriptor")
    assert "ulimit -n" in note


def test_a_main_process_without_memory_for_pieces_gets_an_error_in_the_place_of_the_batch() -> None:
    code = """
        import resource, warnings
        import torch
        import shmloader

        class Large(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.full((16 << 20 if index == 2 else 1000,), index, dtype=torch.float32)

        warnings.simplefilter("ignore")
        options = {"num_workers": 2, "memory_budget_nbytes": 1 << 20}
        loader = shmloader.DataLoader(Large(), None, **options)
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        iterator = iter(loader)
        got = [int(next(iterator)[0])]
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (24 << 20), unlimited[1]))
        while True:
            try:
                got.append(int(next(iterator)[0]))
            except shmloader.SharedMemoryExhausted as error:
                assert error.needed_nbytes > 64 << 20, error
                assert "ulimit -v" in str(error), error
                got.append("error")
                assert loader.state_dict()["batches"] == 3
            except StopIteration:
                break
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        print(got, [int(batch[0]) for batch in loader])
        """
    assert python(code).strip() == "[0, 1, 'error', 3, 4, 5, 6, 7] [0, 1, 2, 3, 4, 5, 6, 7]"


# The worker's side of a slot alone.


class _NoAddressSpace(Segment):
    """Cannot map more than ``most_nbytes`` at once."""

    most_nbytes = 0

    def map(self, slot: int, nbytes: int, *, private: bool = False, fills: bool = False) -> Extent:
        if nbytes > self.most_nbytes:
            raise shmloader.SharedMemoryExhausted("no address space", needed_nbytes=nbytes)
        return super().map(slot, nbytes, private=private, fills=fills)


def test_an_allocator_that_cannot_map_its_slot_maps_what_it_can() -> None:
    segment = _NoAddressSpace()
    segment.most_nbytes = 3 << 16
    segment.reserve(0, 0, 1 << 20)
    allocator = SlotAllocator(segment)
    allocator.begin(0, 1 << 20, 1 << 22)
    assert allocator.nbytes == len(allocator.view()) == 1 << 17
    assert allocator.tensor((1 << 17,), torch.uint8) is not None
    assert allocator.tensor((1,), torch.uint8) is None
    assert not allocator.ensure(1 << 20)
    with pytest.raises(shmloader.SharedMemoryExhausted, match="index batch of 262,144 bytes"):
        allocator.read(1 << 18)
    allocator.release()
    segment.close()


def test_an_allocator_that_cannot_map_what_it_reserved_gives_it_back() -> None:
    segment = _NoAddressSpace()
    segment.most_nbytes = 1 << 16
    nbytes = segment.reserve(0, 0, 1 << 16)
    allocator = SlotAllocator(segment)
    allocator.begin(0, nbytes, 1 << 24)
    allocator.view()[:] = b"\x07" * nbytes
    assert not allocator.ensure(1 << 22)
    assert allocator.nbytes == nbytes
    assert os.fstat(segment._descriptor.fd).st_blocks * 512 == nbytes
    assert bytes(allocator.view()) == b"\x07" * nbytes
    allocator.release()
    segment.close()
