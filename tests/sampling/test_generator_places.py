"""Places of generators: from a state to text, and back to the same state, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.sampling import generator_places
from shmloader.sampling.generator_places import Places, go_to


def there(place: str) -> torch.Tensor:
    generator = torch.Generator()
    go_to(place, generator)
    return generator.get_state()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
    draws=st.lists(st.one_of(st.integers(0, 2000), st.integers(16_380, 16_400), st.just(70_000)), max_size=4),
)
def test_a_place_leads_to_the_same_state(seed: int, draws: list[int]) -> None:
    """With one object that finds places, epoch after epoch, and with a new one."""
    generator, places = torch.Generator().manual_seed(seed), Places()
    for number in draws:
        torch.randperm(number, generator=generator)
        state = generator.get_state()
        place = places.place_of(state)
        assert place == Places().place_of(state)
        assert place.startswith(f"drawn {seed} ")
        assert torch.equal(there(place), state)


def test_a_generator_that_goes_back_or_is_seeded_again_is_found() -> None:
    generator, places = torch.Generator().manual_seed(1), Places()
    torch.randperm(1000, generator=generator)
    early = generator.get_state()
    torch.randperm(100_000, generator=generator)
    places.place_of(generator.get_state())
    assert torch.equal(there(places.place_of(early)), early)
    other = generator.manual_seed(2).get_state()
    assert places.place_of(other) == "drawn 2 0"


def test_a_state_with_more_than_draws_is_kept_whole() -> None:
    """After an odd number of normal deviates the generator holds one back."""
    generator, places = torch.Generator().manual_seed(1), Places()
    torch.randn(3, generator=generator)
    state = generator.get_state()
    place = places.place_of(state)
    assert place.startswith("state ")
    assert len(place) < 5000
    assert torch.equal(there(place), state)
    other = generator.manual_seed(2).get_state()
    assert places.place_of(other) == "drawn 2 0"


def test_what_is_too_far_from_its_seed_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_places, "_MOST_DRAWS", 50_000)
    generator, places = torch.Generator().manual_seed(1), Places()
    found = []
    for _ in range(4):
        torch.randperm(20_000, generator=generator)
        state = generator.get_state()
        found.append(places.place_of(state))
        assert torch.equal(there(found[-1]), state)
    assert [place.partition(" ")[0] for place in found] == ["drawn", "drawn", "state", "state"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nonsense", "no place of a generator"),
        ("drawn 1 999999999999", "is not 999,999,999,999 draws from its seed"),
        ("drawn one 2", "no place of a generator"),
        ("state eJxLSQUAAoUBLA==", "does not take"),
        ("state !", "does not take"),
    ],
)
def test_what_is_no_place_is_refused(place: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        there(place)
