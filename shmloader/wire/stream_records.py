"""Streams of iterable-style datasets: the rules for dividing them among workers, and places in them."""

from __future__ import annotations

from typing import NamedTuple

OWN, SHARD, STRIDE = "own", "shard", "stride"
"""The ways to divide a stream: by the dataset itself or not at all; by its own shards; sample by sample."""


class Cursor(NamedTuple):
    """A place in a part of a stream: the samples that were drawn before it."""

    drawn: int = 0  # samples that were drawn from it; draws that raised count
    state: bytes = b""  # states of the dataset and its iterator, pickled by the worker, or empty
    state_drawn: int = 0  # samples that had been drawn when the states were taken
    ended: bool = False  # whether the stream is known to have ended; states of datasets need not include that
    raised: int = 0
    state_raised: int = 0  # draws that had raised when the states were taken


class StreamRules(NamedTuple):
    """The rules by which workers divide a stream and continue in it."""

    rank: int = 0
    ranks: int = 1
    batch_size: int = 1  # samples of a batch, 1 without batches
    # Batches of a worker from one state of the dataset to the next, once states are wanted.
    snapshot_every: int = 1
    layout: str = OWN  # how the stream is divided in this epoch: `OWN`, `SHARD` or `STRIDE`
    later_layout: str = OWN  # how it is divided in epochs that are not resumed
    # Places to continue from, none in an epoch that is not resumed; with `STRIDE` it is one place in the
    # whole stream, which all workers draw; else there is one for each part.
    cursors: tuple[Cursor, ...] = ()

    def from_the_beginning(self) -> StreamRules:
        """The same rules for an epoch that is not resumed."""
        return self._replace(layout=self.later_layout, cursors=())

    @property
    def of_a_batch(self) -> int:
        """Samples that a batch takes from the stream or the part of it that the worker draws."""
        return self.batch_size * (self.ranks if self.layout == STRIDE else 1)

    def parts(self, num_workers: int) -> int:
        """A rank's parts: one for each worker; in a resumed epoch, one for each worker that began it.

        With `STRIDE` a part is what a worker takes of the whole stream, so it is always one for each.
        """
        return len(self.cursors) if self.cursors and self.layout != STRIDE else num_workers

    def cursor_of(self, part: int) -> Cursor:
        """The place that a part begins at; with `STRIDE` it is the same for all."""
        if not self.cursors:
            return Cursor()
        return self.cursors[0 if self.layout == STRIDE else part]


class StreamReport(NamedTuple):
    """A report that comes with a batch of a stream, so that the stream can be resumed after it."""

    part: int  # the part that the batch is of
    cursor: Cursor  # the place after the batch; its state is empty if none was taken


NOTHING_DRAWN = StreamReport(-1, Cursor())
"""The report of a failure before anything was drawn: places in the stream stay where they are."""
