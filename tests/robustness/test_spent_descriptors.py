"""Errors and warnings of a program that has every descriptor: what they need is there already."""

import resource

import pytest
import torch

from robustness.processes import python
from shmloader import DataLoader

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
