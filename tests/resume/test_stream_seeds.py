"""Seeds of an iterable-style dataset, in a resumed epoch and in later ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stream_datasets import Numbers, identity

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:to resume,")


class Draws(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return ((number, float(torch.rand(()))) for number in range(self.length))


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("taken", [0, 2])
def test_the_second_epoch_and_the_third_are_those_of_an_uninterrupted_program(
    workers: int, own_generator: bool, taken: int
) -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3) if own_generator else None
        given: dict[str, Any] = {"num_workers": workers, "collate_fn": identity, "generator": generator}
        return DataLoader(Draws(24), 3, **given)

    torch.manual_seed(1)
    loader = make()
    list(loader)
    iterator = iter(loader)
    assert len(list(itertools.islice(iterator, taken))) == taken
    state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
    expected = [list(iterator), list(loader)]
    torch.manual_seed(99)
    other = make()
    other.load_state_dict(state)
    torch.set_rng_state(drawn_so_far)
    assert [list(other), list(other)] == expected
