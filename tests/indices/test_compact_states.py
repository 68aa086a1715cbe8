"""Compact states of generators: from a state to text, and back to the same state, byte for byte."""

import base64
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from robustness.processes import LONG

from shmloader import ResumeError
from shmloader.indices import compact_states
from shmloader.indices.compact_states import CompactStates, set_to


def there(text: str) -> torch.Tensor:
    generator = torch.Generator()
    set_to(text, generator)
    return generator.get_state()


@settings(max_examples=40 if LONG else 15, deadline=None)
@given(
    seed=st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
    draws=st.lists(st.one_of(st.integers(0, 2000), st.integers(16_380, 16_400), st.just(70_000)), max_size=4),
)
def test_a_compact_state_leads_to_the_same_state(seed: int, draws: list[int]) -> None:
    """One object makes them epoch after epoch, and a new one makes the same."""
    generator, compact = torch.Generator().manual_seed(seed), CompactStates()
    for number in draws:
        torch.randperm(number, generator=generator)
        state = generator.get_state()
        text = compact.of(state)
        assert text == CompactStates().of(state)
        assert text.startswith(f"drawn {seed} ")
        assert torch.equal(there(text), state)


def test_a_generator_that_goes_back_or_is_seeded_again_is_found() -> None:
    generator, compact = torch.Generator().manual_seed(1), CompactStates()
    torch.randperm(1000, generator=generator)
    early = generator.get_state()
    torch.randperm(100_000, generator=generator)
    compact.of(generator.get_state())
    assert torch.equal(there(compact.of(early)), early)
    other = generator.manual_seed(2).get_state()
    assert compact.of(other) == "drawn 2 0"


def test_a_state_with_more_than_draws_is_kept_whole() -> None:
    """The generator holds one normal deviate back after an odd number of draws."""
    generator, compact = torch.Generator().manual_seed(1), CompactStates()
    torch.randn(3, generator=generator)
    state = generator.get_state()
    text = compact.of(state)
    assert text.startswith("state ")
    assert len(text) < 5000
    assert torch.equal(there(text), state)
    other = generator.manual_seed(2).get_state()
    assert compact.of(other) == "drawn 2 0"


def test_what_is_too_far_from_its_seed_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_states, "_MOST_DRAWS", 50_000)
    generator, compact = torch.Generator().manual_seed(1), CompactStates()
    found = []
    for _ in range(4):
        torch.randperm(20_000, generator=generator)
        state = generator.get_state()
        found.append(compact.of(state))
        assert torch.equal(there(found[-1]), state)
    assert [text.partition(" ")[0] for text in found] == ["drawn", "drawn", "state", "state"]


def test_a_state_of_another_torch_is_refused() -> None:
    with pytest.raises(ResumeError, match="of a generator of another torch"):
        there(f"state {base64.b64encode(zlib.compress(b'another')).decode()}")


def test_the_short_state_of_an_accelerators_generator_is_kept_whole() -> None:
    """CUDA's has 16 bytes: the seed and an offset."""
    state = torch.tensor([3, 400]).view(torch.uint8)
    kind, text = CompactStates().of(state).split()
    assert kind == "state"
    assert zlib.decompress(base64.b64decode(text)) == state.numpy().tobytes()
