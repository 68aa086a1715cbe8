"""`BlockSampler`: blocks in random order, and samples shuffled among several blocks. Main process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmloader.indices.packed_indices import IntArray
from shmloader.indices.sharded_sampler import ShardedSampler, Uneven, check_runs


class Layout(NamedTuple):
    """The numbers that an order is made by, beside the seed; see `BlockSampler`."""

    window: int
    lanes: int
    run_length: int


class BlockSampler(ShardedSampler):
    """A `ShardedSampler` whose neighbours in the order lie near each other, for data that is read in blocks.

    The blocks of a dataset (the row groups of Parquet files) are put in random order and dealt out to
    ``lanes``, equally many samples to each. A lane goes through its blocks in windows of ``window`` blocks,
    and the samples of a window are shuffled. The global order takes ``run_length`` samples of each lane in
    turn. So whoever reads one lane needs the blocks of one window at a time.

    With ``run_length`` the batch size, and as many lanes as workers of all ranks (or a multiple of that),
    each worker reads lanes of its own, and each block is read once, but for a few at the ends of lanes. Other
    numbers cost more reading, and nothing else: the state is that of a `ShardedSampler`, and any number of
    ranks and workers can resume it. A resumed epoch keeps the order that it was begun with.

    Args:
        dataset: A dataset with a length.
        num_replicas: Number of ranks; None asks ``torch.distributed``.
        rank: This one; None asks ``torch.distributed``.
        shuffle: Whether blocks and samples are shuffled; else the order of each lane is that of the dataset.
        seed: The same number on all ranks.
        blocks: The first sample of each block, ascending from 0. None asks ``dataset.blocks``, which a lazily
            opened store has.
        window: The number of blocks whose samples are shuffled together.
        lanes: The number of lanes.
        run_length: Samples of one lane that follow each other and go to the same rank.
        uneven: See `ShardedSampler`.

    Attributes:
        run_length: That of the present epoch.

    Raises:
        ValueError: For numbers below 1, blocks that do not ascend from 0, and as of a `ShardedSampler`.
        TypeError: If neither the dataset nor the caller says what the blocks are.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        blocks: Sequence[int] | IntArray | None = None,
        window: int = 8,
        lanes: int = 1,
        run_length: int = 1,
        uneven: Uneven | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, uneven=uneven)
        self._own = self._begun = Layout(window, lanes, run_length)
        self._continued: Layout | None = None  # that of a loaded state, until it is iterated
        if min(self._own) < 1:
            raise ValueError(f"window={window}, lanes={lanes} and run_length={run_length} must be at least 1")
        given = getattr(dataset, "blocks", None) if blocks is None else blocks
        if given is None:
            name = type(dataset).__name__
            raise TypeError(f"a {name} has no blocks: pass blocks=[0, ...], their first samples")
        self._starts = np.append(np.asarray(given, np.int64), len(dataset))
        if self._starts[0] or ((np.diff(self._starts) <= 0).any() and len(dataset)):
            raise ValueError(
                f"blocks are the first samples of each, ascending from 0 to below {len(dataset):,}: not "
                f"{self._starts[:-1]}"
            )

    @property
    def run_length(self) -> int:  # type: ignore[override]
        """Samples of one lane that follow each other, in the present epoch."""
        return self._begun.run_length

    def epoch_order(self) -> IntArray:
        """The order of an epoch; see `ShardedSampler.epoch_order`."""
        self._begun, self._continued = self._continued or self._own, None
        _, lanes, run_length = self._begun
        # NumPy's, in place: torch's permutation waits for threads that find no core free beside the workers.
        random = np.random.default_rng((self.seed + self.epoch) % (1 << 64))
        blocks = np.arange(len(self._starts) - 1)
        if self.shuffle:
            random.shuffle(blocks)
        sizes = np.diff(self._starts)[blocks]
        ends = sizes.cumsum()
        # Sample n of the blocks in their order is this much further on in the dataset.
        order = np.arange(len(self.dataset), dtype=np.int64)  # type: ignore[arg-type]
        order += np.repeat(self._starts[blocks] - (ends - sizes), sizes)
        per_lane = len(order) // (lanes * run_length) * run_length
        for begin, end in self._windows(ends, per_lane) if self.shuffle else ():
            random.shuffle(order[begin:end])
        whole = lanes * per_lane
        order[:whole] = order[:whole].reshape(lanes, -1, run_length).swapaxes(0, 1).ravel()
        return order

    def _windows(self, ends: IntArray, per_lane: int) -> list[tuple[int, int]]:
        """The beginning and end of each window of each lane, for blocks in their order with these ends.

        A run lies in one window: so a block at the edge of two may have samples in both.
        """
        window, lanes, run_length = self._begun
        total = int(ends[-1]) if len(ends) else 0
        edges = [*range(0, lanes * per_lane, per_lane or 1), lanes * per_lane, total]
        found: list[tuple[int, int]] = []
        for begin, end in itertools.pairwise(edges):
            first, last = ends.searchsorted([begin, end], "right")
            inner = ends[first + window - 1 : last : window] - begin
            cuts = [begin, *(begin + inner - inner % run_length).tolist(), end]
            found += [(a, b) for a, b in itertools.pairwise(cuts) if b - a > 1]
        return found

    def state_after(
        self, batches: int, batch_size: int, begin: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state after a number of batches of an epoch; see `ShardedSampler.state_after`.

        Raises:
            ResumeError: If the batch size is no multiple of ``run_length``.
        """
        layout = self._begun if begin is None else Layout(*begin.get("layout", self._own))
        if batches:
            check_runs(batch_size, layout.run_length)
        return super().state_after(batches, batch_size, begin) | {"layout": list(layout)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue in its epoch; see `ShardedSampler.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._begun = self._continued = Layout(*map(int, state_dict.get("layout", self._own)))
