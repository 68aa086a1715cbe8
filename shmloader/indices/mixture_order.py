"""The order of a mixture: which source each draw takes, as a function of seed and place. Main process.

Draws are made in blocks. Within a block each source has its share, rounded up or down at random so that its
expectation is exact, in a random order. The shares of a block depend on one random number, which has a place
in a stream of its own: so the draws of any prefix are counted without making them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shmloader.indices.packed_indices import IntArray

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

_BLOCKS = 64  # of a chunk, which is made at once
_COUNTED = 4096  # blocks that are counted at once
_MOST_PASSES = 1000  # over all sources together, within which an epoch has to end


class Segment(NamedTuple):
    """Draws with the same weights."""

    begin: int  # the first of them
    # The part of the draws that each source has, in sum 1; or a function of a block's first draw.
    shares: FloatArray | Callable[[int], FloatArray]


class MixtureOrder:
    """An endless order of draws from several sources, in segments from draw 0 on."""

    def __init__(self, key: tuple[int, ...], sources: int, segments: list[Segment], block: int) -> None:
        self._key = key  # that the random numbers are drawn from
        self._sources = sources  # their number
        self._block = block  # draws of a block
        self._segments = segments
        self._ends: list[int | None] = [*(segment.begin for segment in segments[1:]), None]

    def counts(self, draws: int) -> IntArray:
        """Numbers of the first draws that each source has, shape ``(sources,)``."""
        found = np.zeros(self._sources, np.int64)
        for segment, end in zip(self._segments, self._ends, strict=True):
            if segment.begin >= draws:
                break
            wanted = (draws if end is None else min(end, draws)) - segment.begin
            for _, counts in self._counted(segment, wanted // self._block):
                found += counts.sum(0)
            if rest := wanted % self._block:
                chunk, begin = divmod(wanted - rest, self._block * _BLOCKS)
                drawn = self._chunk(segment, chunk)[begin : begin + rest]
                found += np.bincount(drawn, minlength=self._sources)
        return found

    def chunks(self, begin: int) -> Iterator[tuple[int, IntArray]]:
        """The sources of all draws from one on, in pieces: the first draw of each, and the sources."""
        size = self._block * _BLOCKS
        for segment, end in zip(self._segments, self._ends, strict=True):
            while end is None or begin < end:
                chunk, place = divmod(begin - segment.begin, size)
                stop = None if end is None else end - segment.begin - chunk * size
                drawn = self._chunk(segment, chunk)[place:stop]
                yield begin, drawn
                begin += len(drawn)

    def first_with(self, wanted: IntArray, reached: Callable[..., Any]) -> int:
        """The least number of draws with which sources have what is wanted of them; 0 if far more are needed.

        Args:
            wanted: Draws of each source, at least 1.
            reached: `numpy.any` or `numpy.all`: whether of one source, or of all.
        """
        found, most = np.zeros(self._sources, np.int64), _MOST_PASSES * (int(wanted.sum()) + self._block)
        for segment, end in zip(self._segments, self._ends, strict=True):
            length = (most if end is None else end) - segment.begin
            for first, counts in self._counted(segment, length // self._block):
                totals = found + counts.cumsum(0)
                done = reached(totals >= wanted, axis=1)
                if done.any():
                    place = int(done.argmax())
                    begin = segment.begin + (first + place) * self._block
                    return self._first_in(begin, self._block, totals[place] - counts[place], wanted, reached)
                found = totals[-1]
            if rest := length % self._block:
                begin = segment.begin + length - rest
                if first_one := self._first_in(begin, rest, found, wanted, reached):
                    return first_one
                found = self.counts(begin + rest)
        return 0

    def _first_in(
        self, begin: int, length: int, found: IntArray, wanted: IntArray, reached: Callable[..., Any]
    ) -> int:
        """As `first_with`, within a block, before which sources have had ``found``; 0 for not in it."""
        drawn = next(self.chunks(begin))[1][:length]
        totals = found + np.cumsum(drawn[:, None] == np.arange(self._sources), 0)
        done = reached(totals >= wanted, axis=1)
        return begin + int(done.argmax()) + 1 if done.any() else 0

    def _counted(self, segment: Segment, blocks: int) -> Iterator[tuple[int, IntArray]]:
        """Draws of each source in blocks, shape ``(some blocks, sources)``, and the first of these blocks."""
        stream = np.random.Generator(np.random.PCG64((*self._key, segment.begin)))
        for first in range(0, blocks, _COUNTED):
            count = min(_COUNTED, blocks - first)
            yield first, self._of_blocks(segment, first, stream.random(count))

    def _of_blocks(self, segment: Segment, first: int, chances: FloatArray) -> IntArray:
        """Draws of each source in some blocks: of even points, moved by chance, those within its share."""
        shares = segment.shares
        if callable(shares):
            begins = segment.begin + self._block * np.arange(first, first + len(chances))
            shares = np.stack([shares(begin) for begin in begins.tolist()])
        ends = np.atleast_2d(shares).cumsum(-1)
        ends /= ends[:, -1:]  # so that the last ones are 1, and a source without a share has no point
        below = np.ceil(self._block * ends - chances[:, None]).astype(np.int64).clip(0)
        return np.diff(below, axis=1, prepend=0)

    def _chunk(self, segment: Segment, number: int) -> IntArray:
        key = (*self._key, segment.begin)
        chances = np.random.PCG64(key)
        chances.advance(number * _BLOCKS)
        counts = self._of_blocks(segment, number * _BLOCKS, np.random.Generator(chances).random(_BLOCKS))
        drawn = np.repeat(np.tile(np.arange(self._sources), _BLOCKS), counts.ravel())
        shuffled = np.random.default_rng((*key, number)).permuted(drawn.reshape(_BLOCKS, -1), axis=1)
        return shuffled.ravel()
