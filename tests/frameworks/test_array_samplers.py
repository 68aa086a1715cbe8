"""Samplers of frameworks are drawn from as arrays: the same indices, draws and epochs as by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler

from shmloader.indices.array_samplers import index_arrays

DATA: Any = range(200)


def seedable(**options: Any) -> Any:
    data_loader = pytest.importorskip("accelerate.data_loader")
    return data_loader.SeedableRandomSampler(DATA, **options)


def unrepeated(**options: Any) -> Any:
    distributed = pytest.importorskip("lightning.pytorch.overrides.distributed")
    return distributed.UnrepeatedDistributedSampler(DATA, num_replicas=3, **options)


SAMPLERS = {
    "seedable": lambda: seedable(data_seed=7),
    "seedable, of the global seed": seedable,
    "seedable, more than all": lambda: seedable(num_samples=450, generator=torch.Generator()),
    "unrepeated": lambda: unrepeated(rank=1, shuffle=False),
    "unrepeated, shuffled": lambda: unrepeated(rank=2, seed=4),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_index_batches_draws_and_epochs_are_the_samplers_own(name: str, drop_last: bool) -> None:
    def play(iterate: Any) -> list[Any]:
        torch.manual_seed(2)
        sampler = SAMPLERS[name]()
        seen: list[Any] = []
        for epoch in (None, None, 5):
            if epoch is not None:
                sampler.set_epoch(epoch)
            batches = iterate(BatchSampler(sampler, 40, drop_last))
            assert batches is not None
            for batch in batches:
                own = getattr(sampler, "generator", None)
                states = [
                    one.get_state().tolist() for one in (torch.default_generator, own) if one is not None
                ]
                seen.append((list(batch), sampler.epoch, states))
            seen.append(sampler.epoch)
        return seen

    assert play(index_arrays) == play(iter)


@pytest.mark.parametrize("name", ["seedable", "unrepeated"])
def test_subclasses_and_changed_classes_are_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SAMPLERS[name]()
    assert index_arrays(BatchSampler(sampler, 40, False)) is not None
    for base in type(sampler).__mro__[:2]:
        with monkeypatch.context() as patch:
            patch.setattr(base, "__iter__", lambda self: iter([7] * 50))
            assert index_arrays(BatchSampler(sampler, 40, False)) is None
    sampler.__class__ = type("Own", (type(sampler),), {"__module__": type(sampler).__module__})
    assert index_arrays(BatchSampler(sampler, 40, False)) is None
