"""`TokenBatchSampler`: batches within a budget of tokens, the same on any number of ranks. Main process."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch.utils.data import Sampler

from shmloader.indices.packed_indices import IntArray
from shmloader.indices.sharded_sampler import UNEVEN, GlobalOrder, Uneven, check_word, ranks_of

Layout = Literal["padded", "packed"]

_NOISE = 0.03  # of a sample's length: samples of lengths as close as that are in random order


class Plan(NamedTuple):
    """All batches of an epoch."""

    samples: IntArray  # indices of samples, batch after batch
    ends: IntArray  # where each batch ends in ``samples``

    def batch(self, number: int) -> list[int]:
        """The indices of one batch."""
        begin = int(self.ends[number - 1]) if number else 0
        indices: list[int] = self.samples[begin : int(self.ends[number])].tolist()
        return indices


class TokenBatchSampler(GlobalOrder, Sampler[list[int]]):
    """Batches of samples of various lengths, each within a budget of tokens; pass it as ``batch_sampler``.

    With ``layout="padded"`` the samples of a batch have nearly the same length, and a batch takes its longest
    length times its number of samples. With ``"packed"`` it takes the sum of its lengths: its samples are
    chosen to fill one row of ``max_tokens``, by best fit, longest first (`collate_packed` joins them).

    Each epoch has one global order of batches, drawn from ``seed + epoch`` in the main process, which takes
    about a second for a million samples. In each step the ranks take the next batches of that order, one
    each. So the global batches are the same on any number of ranks, and the number of batches that all ranks
    have taken is the whole state: an epoch can be resumed on another number of ranks.

    Call ``set_epoch()``, of the loader or of this, before each epoch, as with torch's ``DistributedSampler``.

    Args:
        lengths: Tokens of each sample, at least one: an array, a store's column, or a sequence of numbers.
        max_tokens: Most tokens of a batch, padding included.
        layout: As above.
        max_samples: Most samples of a padded batch, or None.
        shuffle: Whether samples of nearly the same length and the batches come in a random order; else the
            longest come first.
        seed: The same number on all ranks.
        num_replicas: Number of ranks; None asks ``torch.distributed``, else it is 1.
        rank: This one; None asks ``torch.distributed``, else it is 0. Needed with another ``num_replicas``.
        uneven: What to do if the batches do not divide equally among the ranks: ``"pad"`` repeats the first
            ones of the order, ``"drop"`` leaves the last ones out, ``"error"`` raises, and with ``"exact"``
            some ranks have a batch less.

    Attributes:
        epoch: Number of the epoch that the next iteration gives.

    Raises:
        ValueError: For a sample of more than ``max_tokens`` or less than one, which is named, and for any
            other wrong argument.
    """

    def __init__(
        self,
        lengths: Sequence[int] | IntArray,
        max_tokens: int,
        *,
        layout: Layout = "padded",
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        uneven: Uneven = "pad",
    ) -> None:
        check_word("layout", layout, get_args(Layout))
        check_word("uneven", uneven, UNEVEN)
        if max_samples is not None and (max_samples < 1 or layout == "packed"):
            raise ValueError(f"max_samples={max_samples} must be at least 1, and is for layout='padded' only")
        self.max_tokens = _whole_tokens(max_tokens)
        self.lengths = _checked(lengths, self.max_tokens)
        self.layout: Layout = layout
        self.max_samples = max_samples
        self.shuffle = shuffle
        self.seed = seed
        self.num_replicas, self.rank = ranks_of(num_replicas, rank)
        self.uneven: Uneven = uneven
        self.epoch = 0
        self._planned: tuple[int, Plan] | None = None  # an epoch's number, and its plan

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration gives."""
        self.epoch = epoch

    def plan(self) -> Plan:
        """All batches of the present epoch, of all ranks."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._make_plan()
        return self._planned[1]

    def __len__(self) -> int:
        """Number of batches of this rank in the present epoch; after a loaded state, those that are left."""
        return self._batches_after(self._loaded["consumed"])

    def __iter__(self) -> Iterator[list[int]]:
        plan, begin = self.plan(), self._begin_iteration()
        for number in range(self._batches_after(begin)):
            yield plan.batch((begin + number * self.num_replicas + self.rank) % len(plan.ends))

    def _batches_after(self, consumed: int) -> int:
        left = max(len(self.plan().ends) - consumed, 0)  # the last batches may be repeated ones
        return self._own_share(left, "batches")

    def state_after(
        self, batches: int, batch_size: int | None = None, begin: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The state after a number of batches of an epoch; see `ShardedSampler.state_after`.

        In each step all ranks together consume as many batches as there are ranks: their size is not used.
        """
        return {"consumed": self._consumed_after(batches, begin or self._begin, 1), "batches": batches}

    def _make_plan(self) -> Plan:
        random = np.random.default_rng((self.seed, self.epoch)) if self.shuffle else None
        if self.layout == "packed":
            plan = _best_fit(self.lengths, self.max_tokens, random)
        else:
            plan = _similar(self.lengths, self.max_tokens, self.max_samples or len(self.lengths), random)
        if random is None:
            return plan
        sizes = np.diff(plan.ends, prepend=0)
        order = random.permutation(len(sizes))
        ends = np.cumsum(sizes[order])
        # Each sample's place in the old order: its place in the new one, moved by its batch's move.
        moved = np.arange(len(plan.samples)) + np.repeat(plan.ends[order] - ends, sizes[order])
        return Plan(plan.samples[moved], ends)


def _whole_tokens(max_tokens: Any) -> int:
    try:
        return operator.index(max_tokens)
    except TypeError:
        raise ValueError(
            f"max_tokens must be a whole number, such as 4096, not {max_tokens!r:.100}"
        ) from None


def _checked(lengths: Any, max_tokens: int) -> IntArray:
    array = np.asarray(lengths)
    if array.shape == (0,):
        raise ValueError("lengths must be those of at least one sample, and there are none")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths must be whole numbers, one for each sample, and not of shape {array.shape} and type "
            f"{array.dtype}"
        )
    many, few = array > max_tokens, array < 1
    if many.any() or few.any():
        first = int((many | few).argmax())
        raise ValueError(
            f"sample {first} has {array[first]:,} tokens, and a sample must have 1 to max_tokens="
            f"{max_tokens:,}. There are {int((many | few).sum()):,} such samples among {len(array):,}: cut "
            "them, or leave them out with torch.utils.data.Subset"
        )
    return array.astype(np.int64)


def _similar(
    lengths: IntArray, max_tokens: int, max_samples: int, random: np.random.Generator | None
) -> Plan:
    """Batches of samples of nearly the same length, longest first."""
    keys = lengths if random is None else lengths * (1 + _NOISE * random.random(len(lengths)))
    samples = np.argsort(-keys, kind="stable")
    # The longest of a batch is near its beginning: the rest are longer by the noise at most.
    ordered = lengths[samples]
    ends, begin = [], 0
    reach = np.maximum.accumulate(ordered[::-1])[::-1].tolist()  # the longest from a place on
    while begin < len(samples):
        begin = min(begin + min(max_tokens // reach[begin], max_samples), len(samples))
        ends.append(begin)
    return Plan(samples, np.array(ends))


def _best_fit(lengths: IntArray, max_tokens: int, random: np.random.Generator | None) -> Plan:
    """Rows filled by best fit, longest first: each sample goes to the fullest row that has room for it.

    Samples of the same length are placed together: the fullest row with room takes as many as it can, then
    the next one.
    """
    shuffled = np.arange(len(lengths)) if random is None else random.permutation(len(lengths))
    samples = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows, rooms = [], _Rooms(max_tokens)
    for length, count in zip(*np.unique(-lengths, return_counts=True), strict=True):
        rows += rooms.place(-int(length), int(count))
    row = np.concatenate(rows)
    return Plan(samples[np.argsort(row, kind="stable")], np.cumsum(np.bincount(row)))


class _Rooms:
    """Rows by the tokens that they have left."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._rows: dict[int, list[IntArray]] = {}
        self._some = 0  # a bit for each number of tokens that some row has left
        self._opened = 0

    def place(self, length: int, count: int) -> list[IntArray]:
        """Place samples of one length; returns the row of each."""
        placed: list[IntArray] = []
        while count:
            left, rows = self._fullest_with_room(length, count)
            each = left // length
            filled, rest = divmod(min(count, len(rows) * each), each)
            begun = filled + (rest > 0)
            placed += [np.repeat(rows[:filled], each), np.repeat(rows[filled:begun], rest)]
            count -= filled * each + rest
            self._keep(rows[:filled], left - each * length)
            self._keep(rows[filled:begun], left - rest * length)
            self._keep(rows[begun:], left)
        return placed

    def _fullest_with_room(self, length: int, count: int) -> tuple[int, IntArray]:
        """The least tokens that rows with room have left, and those rows; or as many new rows as needed."""
        fitting = self._some >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            self._some ^= 1 << left
            return left, np.concatenate(self._rows.pop(left))
        first = self._opened
        self._opened += -(-count // (self._max_tokens // length))
        return self._max_tokens, np.arange(first, self._opened)

    def _keep(self, rows: IntArray, left: int) -> None:
        if len(rows) and left:
            self._rows.setdefault(left, []).append(rows)
            self._some |= 1 << left
