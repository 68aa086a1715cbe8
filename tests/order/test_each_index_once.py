"""Each index comes exactly once, with every option that changes the order or the number of tasks.

Growth of ``"auto"`` is forced at random moments, since its own depends on time. Between them the program is
interrupted, leaves epochs, and goes on in another loader from a state.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dispatch_datasets import SMALL
from forced_growth import grow_at
from hypothesis import given, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from torch.utils.data import BatchSampler, Dataset

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:prefetch_epochs=True has no effect:UserWarning",
    "ignore::shmloader.BadSampleWarning",
    "ignore::shmloader.SpillWarning",
)


class Uneven(Dataset[int]):
    """Sample ``i`` is ``i``; some take longer than others, and those of ``bad`` raise."""

    def __init__(self, length: int, slow: set[int], bad: set[int]) -> None:
        self.length, self.slow, self.bad = length, slow, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.slow:
            time.sleep(0.002)
        if index in self.bad:
            raise ValueError(index)
        return index


def interrupt_at(patch: pytest.MonkeyPatch, iterator: Any, waits: set[int]) -> None:
    """Let Ctrl-C come while ``next()`` waits for workers, at certain times that it does."""
    workers, numbers = iterator._all_workers, itertools.count()

    def interrupted(timeout_s: float | None) -> Any:
        if next(numbers) in waits:
            raise KeyboardInterrupt
        return type(workers).wait(workers, timeout_s)

    patch.setattr(workers, "wait", interrupted)


def begun(loader: DataLoader[Any], patch: pytest.MonkeyPatch, waits: set[int]) -> Any:
    """A new epoch, with the interrupts of `interrupt_at`; also its beginning may wait."""
    while True:
        try:
            iterator = iter(loader)
        except KeyboardInterrupt:
            continue
        interrupt_at(patch, iterator, waits)
        return iterator


def taken(iterator: Any, most: int) -> Iterator[list[int]]:
    """Up to ``most`` batches; after an interrupt the program goes on."""
    while most:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except KeyboardInterrupt:
            continue
        most -= 1
        yield torch.as_tensor(batch).reshape(-1).tolist()


numbers = st.sets(st.integers(0, 25), max_size=12)
some_indices = st.sets(st.integers(0, 69), max_size=30)
options = st.fixed_dictionaries(
    {
        "worker_type": st.sampled_from(["thread", "thread", "process"]),
        "num_workers": st.sampled_from([1, 2, 3, "auto"]),
        "prefetch_factor": st.sampled_from([1, 2, 3, "auto", "auto"]),
        "in_order": st.booleans(),
        "dispatch": st.sampled_from([None, "dynamic"]),
        "persistent_workers": st.booleans(),
        "prefetch_epochs": st.booleans(),
        "on_error": st.sampled_from(["skip", "replace"]),
        "memory_budget_nbytes": st.sampled_from([None, None, 1, 40_000]),
    }
)


def built(dataset: Uneven, batch_size: int | None, order: list[int], **given: Any) -> DataLoader[Any]:
    """A loader with such options as go together."""
    if given["num_workers"] != "auto" and given["dispatch"] is None:
        del given["dispatch"]
    given["persistent_workers"] |= given["prefetch_epochs"]
    return DataLoader(dataset, batch_size, sampler=order, **given)


@settings(max_examples=1500 if LONG else 30, **SMALL)
@given(
    data=st.data(), length=st.integers(0, 70), batch_size=st.sampled_from([None, 1, 1, 2, 5]), given=options
)
def test_each_index_comes_exactly_once(
    data: st.DataObject, length: int, batch_size: int | None, given: dict[str, Any]
) -> None:
    order = data.draw(st.permutations(range(length)))
    bad = data.draw(some_indices) & set(order)
    dataset = Uneven(length, data.draw(some_indices), bad)
    batches = [[i] for i in order] if batch_size is None else list(BatchSampler(order, batch_size, False))
    good = [[i for i in batch if i not in bad] for batch in batches]
    if given["on_error"] == "replace":
        good = [[None if i in bad else i for i in batch] for batch in batches if not bad.issuperset(batch)]
    expected = [batch for batch in good if batch]

    def check(seen: list[list[int]], wanted: list[list[Any]], in_order: bool) -> None:
        wanted = list(wanted)
        if in_order:
            assert len(seen) == len(wanted)
            assert all(map(fits, seen, wanted)), (seen, wanted)
            return
        for batch in seen:
            wanted.remove(next(one for one in wanted if fits(batch, one)))
        assert not wanted, wanted

    def fits(batch: list[int], wanted: list[Any]) -> bool:
        return len(batch) == len(wanted) and all(w in (None, b) for b, w in zip(batch, wanted, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        grow_at(patch, data.draw(numbers))
        with built(dataset, batch_size, order, **given) as loader:
            for _ in range(data.draw(st.integers(0, 2))):
                iterator = begun(loader, patch, data.draw(numbers))
                most = data.draw(st.sampled_from([1, 7, 1000]))
                seen = list(taken(iterator, most))
                if most == 1000:
                    check(seen, expected, given["in_order"])
                    state = loader.state_dict()
                    assert (state["batches"], state["batches_behind"]) == (len(batches), "")
            iterator = begun(loader, patch, data.draw(numbers))
            seen, state = list(taken(iterator, data.draw(st.integers(0, 30)))), loader.state_dict()
            del iterator
        other = given | data.draw(options) | {"on_error": given["on_error"]}
        with built(dataset, batch_size, order, **other) as loader:
            loader.load_state_dict(state)
            iterator = begun(loader, patch, data.draw(numbers))
            if state["finished"]:
                seen = []
            check(seen + list(taken(iterator, 1000)), expected, given["in_order"] and other["in_order"])
            state = loader.state_dict()
            assert (state["batches"], state["batches_behind"]) == (len(batches), "")
