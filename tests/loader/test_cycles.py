"""A loader that its own arguments lead back to is freed by the garbage collector, with its workers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import loading
import pytest
import torch
from torch.utils.data import RandomSampler

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Owned:
    """Refers to a trainer, but for its copy in another process."""

    owner: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"owner": None}


class OwnedDataset(Owned, loading.Numbered):
    """A dataset."""


class SetUp(OwnedDataset):
    """A dataset that each worker sets up."""

    def worker_setup(self, _: Any) -> None:
        self.is_set_up = True

    def worker_teardown(self) -> None:
        self.is_set_up = False


class OwnedSampler(Owned, RandomSampler):
    """A sampler."""


class OwnedGenerator(torch.Generator):
    """A generator."""

    owner: Any = None


class Trainer:
    """Holds a loader, to one of whose arguments it belongs: to the one named ``how``."""

    def __init__(self, how: str, **arguments: Any) -> None:
        data = SetUp(24) if how == "worker_setup" else OwnedDataset(24)
        if how in ("dataset", "worker_setup"):
            data.owner = self
        elif how in ("collate_fn", "worker_init_fn"):
            arguments[how] = getattr(self, how)
        elif how in ("sampler", "generator"):
            arguments[how] = owned = OwnedSampler(data) if how == "sampler" else OwnedGenerator()
            owned.owner = self
        self.loader = DataLoader(data, batch_size=2, **arguments)
        if how == "profile":
            self.profile = self.loader.profile(every_s=0.0, callback=self.collate_fn).__enter__()
        self.iterator: Iterator[Any] = iter(self.loader)
        next(self.iterator)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def collate_fn(self, samples: Any) -> Any:
        return torch.stack(samples) if isinstance(samples, list) else None

    def worker_init_fn(self, worker_id: int) -> None:
        pass


HOWS = ["dataset", "collate_fn", "worker_init_fn", "worker_setup", "sampler", "generator", "profile"]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_cycle_is_freed(how: str, persistent: bool) -> None:
    """In mid-epoch; the leak guard looks for its processes, descriptors and slots."""
    trainer = weakref.ref(Trainer(how, num_workers=2, persistent_workers=persistent))
    gc.collect()
    assert trainer() is None


@pytest.mark.parametrize("how", ["dataset", "worker_init_fn"])
def test_a_cycle_is_freed_however_workers_start(how: str, start_method: str) -> None:
    trainer = weakref.ref(Trainer(how, num_workers=1, multiprocessing_context=start_method))
    gc.collect()
    assert trainer() is None


@pytest.mark.parametrize("how", HOWS)
def test_a_cycle_is_freed_without_workers(how: str) -> None:
    trainer = weakref.ref(Trainer(how))
    gc.collect()
    assert trainer() is None


def test_the_last_of_several_epochs_is_freed() -> None:
    """With all that the loader was told meanwhile."""
    made = Trainer("dataset", num_workers=2, persistent_workers=True)
    for epoch in range(2):
        made.loader.set_epoch(epoch)
        list(made.loader)
    made.loader.load_state_dict(made.loader.state_dict())
    trainer = weakref.ref(made)
    del made
    gc.collect()
    assert trainer() is None
