"""Compact states of torch's generators: a state of 5,056 bytes in a few dozen characters.

A **compact state** is the seed that the generator began with and the count of 32-bit numbers drawn since, as
text. The count is found by drawing from the seed on until the generator's next numbers come. It is used only
if that many draws from the seed give the state byte for byte. Otherwise (a normal deviate is kept for the
next call, or more than 134 million numbers were drawn) the text is the whole state, compressed to 4.3 KB.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

import numpy as np
import torch

from shmloader.errors import ResumeError

_MOST_DRAWS = 1 << 27
"""Most numbers that are drawn again, to find a compact state or to set one: half a second."""

_CHUNK = 1 << 13  # few enough for one thread: torch's others would wait for work on busy cores
_NEXT = 8  # numbers that identify a state: 31 bits of each


def digest_of(state: torch.Tensor | str) -> str:
    """A short text that distinguishes states of generators; a digest is returned as it is."""
    if isinstance(state, str):
        return state
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class CompactStates:
    """Makes compact states of one generator. Remembers the last one, since the next is seldom far from it."""

    def __init__(self) -> None:
        self._state, self._text = torch.empty(0, dtype=torch.uint8, device="cpu"), ""
        self._known = -1, 0, self._state  # seed, numbers drawn, and the state then
        self._lost: int | None = None  # the seed from which a state was not found

    def of(self, state: torch.Tensor | str | None) -> str:
        """The compact state, in 6 ns per number drawn since the last; "" for None, a compact one as it is."""
        if not isinstance(state, torch.Tensor):
            return state or ""
        if not torch.equal(self._state, state):
            self._state, self._text = state, self._find(state)
        return self._text

    def _find(self, state: torch.Tensor) -> str:
        seeded = torch.Generator().get_state()
        if state.shape != seeded.shape:  # an accelerator's generator, whose state is short
            return _whole(state)
        seed = generator_at(state).initial_seed()
        seeded = torch.Generator().manual_seed(seed).get_state()
        for of_seed, drawn, known in (self._known, (seed, 0, seeded)):
            if of_seed == seed != self._lost:
                further = _draws_between(known, state, _MOST_DRAWS - drawn)
                if further is not None:
                    self._known = seed, drawn + further, state
                    return f"drawn {seed} {drawn + further}"
        self._lost = seed
        return _whole(state)


def _whole(state: torch.Tensor) -> str:
    return f"state {base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()}"


def set_to(compact_state: str, generator: torch.Generator) -> None:
    """Set a generator to a compact state; `ResumeError` if it is a whole one of another torch."""
    kind, *parts = compact_state.split()
    if kind == "drawn":
        seed, drawn = map(int, parts)
        generator.set_state(_draw(torch.Generator().manual_seed(seed), drawn).get_state())
        return
    state = zlib.decompress(base64.b64decode(parts[0]))
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except RuntimeError as error:
        raise ResumeError(f"the state has that of a generator of another torch: {error}") from error


def generator_at(state: torch.Tensor) -> torch.Generator:
    """A new generator in a state."""
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _numbers(generator: torch.Generator, count: int) -> torch.Tensor:
    """The next numbers, of 31 bits."""
    return torch.empty(count, dtype=torch.int32, device="cpu").random_(generator=generator)


def _draw(generator: torch.Generator, draws: int) -> torch.Generator:
    for begin in range(0, draws, _CHUNK):
        _numbers(generator, min(_CHUNK, draws - begin))
    return generator


def _draws_between(earlier: torch.Tensor, later: torch.Tensor, most: int) -> int | None:
    """The number of draws from one state to another; None if no more than ``most`` of them lead there."""
    following = _numbers(generator_at(later), _NEXT)
    first = int(following[0])
    generator = generator_at(earlier)
    for begin in range(0, most + 1, _CHUNK):
        state = generator.get_state()
        numbers = _numbers(generator, _CHUNK).numpy()  # whose first calls take less than torch's
        for offset in np.flatnonzero(numbers == first).tolist():
            found = _draw(generator_at(state), offset)
            if torch.equal(found.get_state(), later):
                return begin + offset if begin + offset <= most else None
            if torch.equal(_numbers(found, _NEXT), following):
                return None  # the same numbers come, but the states differ in something else
    return None
