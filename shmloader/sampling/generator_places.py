"""Places of torch's generators: a generator's state in a few dozen characters.

The state of a generator is 5,056 bytes. A **place** is the seed that the generator began with and how many
numbers of 32 bits it has drawn since, as text. The number is found by drawing from the seed on until the
generator's next numbers come, and the place is used only if drawing from the seed that far gives the state
byte for byte. Where it does not (a normal deviate is kept for the next call, a million epochs were drawn),
the place is the whole state, compressed, of 4.3 KB.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

import numpy as np
import numpy.typing as npt
import torch

_MOST_DRAWS = 1 << 27
"""Numbers that are drawn again at most, to find a place or to go to it: half a second."""

_CHUNK = 1 << 14  # few enough for one thread: torch's others would wait for work on busy cores
_NEXT = 8  # numbers that tell a place: 31 bits of each
_DRAWN, _WHOLE, _SEED = "drawn", "state", "seed"


def digest_of(state: torch.Tensor) -> str:
    """A short text that tells states of generators apart."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class Places:
    """Finds places. Remembers the last one, from which the next one is usually not far."""

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None  # the last one that was asked for, and ...
        self._place = ""
        self._known: tuple[int, torch.Tensor] | None = None  # numbers drawn, and the state then
        self._step = 0  # how many it was further than the one before: most epochs draw alike
        self._lost: int | None = None  # the seed from which a place was not found

    def place_of(self, state: torch.Tensor) -> str:
        """The place of a state, as ``Generator.get_state()`` gives it; about 4 ns per number drawn."""
        if self._state is None or not torch.equal(self._state, state):
            self._place, self._state = self._find(state), state
        return self._place

    def _find(self, state: torch.Tensor) -> str:
        seed = _with_state(state).initial_seed()
        begin = 0, torch.Generator().manual_seed(seed).get_state()
        starts = [begin]
        if self._known is not None and _with_state(self._known[1]).initial_seed() == seed:
            starts.insert(0, self._known)
        for drawn, known in [] if seed == self._lost else starts:
            further = _draws_between(known, state, _MOST_DRAWS - drawn, self._step)
            if further is not None:
                self._step = further
                self._known = drawn + further, state
                return f"{_DRAWN} {seed} {drawn + further}"
        self._lost = seed
        return f"{_WHOLE} {base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()}"


def seed_place(seed: int) -> str:
    """The place of a generator that is to begin with a seed."""
    return f"{_SEED} {seed}"


def seed_of(place: str) -> int | None:
    """The seed of a `seed_place`; None for other places."""
    kind, _, rest = place.partition(" ")
    return int(rest) if kind == _SEED else None


def go_to(place: str, generator: torch.Generator) -> None:
    """Set a generator to a place.

    Raises:
        ValueError: If the text is no place, or one of another version of torch.
    """
    kind, _, rest = place.partition(" ")
    if kind == _DRAWN and all(map(str.isdigit, numbers := rest.split())) and len(numbers) == 2:
        seed, drawn = map(int, numbers)
        if drawn > _MOST_DRAWS:
            raise ValueError(f"a generator's place is not {drawn:,} draws from its seed: {place!r}")
        generator.set_state(_draw(torch.Generator().manual_seed(seed), drawn).get_state())
    elif kind == _WHOLE:
        try:
            state = zlib.decompress(base64.b64decode(rest))
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        except (RuntimeError, ValueError, zlib.error) as error:
            raise ValueError(f"this torch does not take the generator's state: {error}") from error
    else:
        raise ValueError(f"no place of a generator: {place!r:.100}")


def _with_state(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _numbers(generator: torch.Generator, count: int) -> npt.NDArray[np.int32]:
    """The next numbers, of 31 bits."""
    numbers: npt.NDArray[np.int32] = (
        torch.empty(count, dtype=torch.int32).random_(generator=generator).numpy()
    )
    return numbers


def _draw(generator: torch.Generator, draws: int) -> torch.Generator:
    for begin in range(0, draws, _CHUNK):
        _numbers(generator, min(_CHUNK, draws - begin))
    return generator


def _draws_between(earlier: torch.Tensor, later: torch.Tensor, most: int, guess: int) -> int | None:
    """The number of draws from one state to another; None if draws do not lead there.

    Args:
        earlier: The one state.
        later: The other.
        most: Numbers to draw at most.
        guess: What to try first.
    """
    if guess <= most and torch.equal(_draw(_with_state(earlier), guess).get_state(), later):
        return guess
    following = _numbers(_with_state(later), _NEXT)
    generator = _with_state(earlier)
    window = _numbers(generator, _NEXT)
    for begin in range(0, most + 1, _CHUNK):
        window = np.concatenate([window, _numbers(generator, _CHUNK)])
        for place in np.flatnonzero(window[:_CHUNK] == following[0]).tolist():
            if np.array_equal(window[place : place + _NEXT], following):
                draws = begin + place
                same = torch.equal(_draw(_with_state(earlier), draws).get_state(), later)
                return draws if same and draws <= most else None
        window = window[_CHUNK:]
    return None
