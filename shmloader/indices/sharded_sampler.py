"""`ShardedSampler`: one global order per epoch, divided among ranks. Main process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from shmloader.distributed import rank_and_ranks
from shmloader.errors import ResumeError
from shmloader.indices.packed_indices import IntArray

Uneven = Literal["pad", "drop", "error", "exact"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)

WHOLE_EPOCH: Mapping[str, int] = {"consumed": 0, "batches": 0}
"""The state with which a whole epoch begins: what all ranks have consumed of its order, in how many batches
of each rank."""


def ranks_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The number of ranks and this one, those of the run where they are None."""
    now, ranks = rank_and_ranks()
    if rank is None and num_replicas not in (None, ranks):
        raise ValueError(
            f"num_replicas={num_replicas} without a rank: this process is rank {now} of {ranks}, which does "
            "not tell which of them it is. Pass rank too, or neither"
        )
    ranks, now = ranks if num_replicas is None else num_replicas, now if rank is None else rank
    if not 0 <= now < ranks:
        raise ValueError(f"rank={now} is not a rank of num_replicas={ranks}")
    return ranks, now


def check_word(name: str, word: str, words: Iterable[str]) -> None:
    """Refuse an argument that is none of some words."""
    if word not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, not {word!r}")


def check_runs(batch_size: int, run_length: int) -> None:
    """Refuse a state after batches that do not consist of whole runs."""
    if batch_size % run_length:
        raise ResumeError(
            f"with batch_size={batch_size} and run_length={run_length} a batch ends in the middle of a run, "
            "and no state can tell of that: let the batch size be a multiple"
        )


class GlobalOrder:
    """The base of samplers that divide the items of one order among ranks, and go on from a place in it.

    Items are samples, draws, or whole batches.
    """

    num_replicas: int
    rank: int
    uneven: Uneven
    _begin = _loaded = WHOLE_EPOCH  # the states that this iteration and the next one begin with

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue in its epoch from a state of any rank.

        Args:
            state_dict: As `state_after` has returned it: how many items of the global order were consumed, in
                how many batches of each rank.
        """
        self._begin = self._loaded = {name: int(state_dict[name]) for name in WHOLE_EPOCH}

    def _begin_iteration(self) -> int:
        """Begin an iteration; returns the number of items that were consumed before it."""
        self._begin, self._loaded = self._loaded, WHOLE_EPOCH
        return self._begin["consumed"]

    def _consumed_after(self, batches: int, begin: Mapping[str, int], each: int) -> int:
        """The number of items that all ranks have consumed after some batches of each, of ``each`` items.

        ``begin`` is the state that the epoch began with; before its batches it counts as a whole epoch.
        """
        begun = begin if batches >= begin["batches"] else WHOLE_EPOCH
        return begun["consumed"] + (batches - begun["batches"]) * each * self.num_replicas

    def _own_share(self, left: int, items: str) -> int:
        """The number of items that this rank gets of those that are left.

        Raises:
            ValueError: If they cannot be divided equally, with ``uneven="error"``.
        """
        ranks = self.num_replicas
        if self.uneven == "error" and left % ranks:
            raise ValueError(
                f"{left:,} {items} cannot be divided equally among {ranks} ranks, and uneven='error': change "
                "the number of ranks, or pass uneven='pad', 'drop' or 'exact'"
            )
        if self.uneven == "exact":
            return len(range(self.rank, left, ranks))
        return left // ranks + (self.uneven == "pad" and left % ranks > 0)


class ShardedSampler(GlobalOrder, DistributedSampler[int]):
    """A ``DistributedSampler`` whose epoch another number of ranks, or another batch size, can resume.

    Each epoch has one global order, drawn from ``seed + epoch``. From the rest of the order, rank ``r`` of
    ``R`` takes every ``R``-th index, beginning with the ``r``-th. So when all ranks have taken equally many
    batches, a prefix of the order is consumed, and its length is the whole state: `shmloader.DataLoader` has
    it in its state, and the rest can be divided among any number of ranks. The indices of a whole epoch are
    those of torch's ``DistributedSampler`` with the same arguments.

    As with torch's, call ``set_epoch()`` (of the loader, or of this) before each epoch.

    Args:
        dataset: A dataset with a length.
        num_replicas: Number of ranks; None asks ``torch.distributed``.
        rank: This one; None asks ``torch.distributed``.
        shuffle: Whether to draw a new order for each epoch; else the order is that of the dataset.
        seed: The same number on all ranks.
        drop_last: Torch's name for ``uneven="drop"``.
        uneven: What to do if the samples do not divide equally among the ranks: ``"pad"`` repeats the first
            ones of the order, fewer than there are ranks; ``"drop"`` leaves the last ones out; ``"error"``
            raises; with ``"exact"`` some ranks have a sample less, for evaluation that counts each sample
            once. None is ``"drop"`` with ``drop_last``, else ``"pad"``.

    Attributes:
        uneven: The rule that holds.
        run_length: Samples that follow each other in the order and go to the same rank: 1.

    Raises:
        ValueError: For any other ``uneven``, or one that contradicts ``drop_last``; with ``"error"``, for a
            dataset that cannot be divided equally; and for arguments that torch's sampler refuses.
    """

    run_length = 1

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        uneven: Uneven | None = None,
    ) -> None:
        self.uneven: Uneven = ("drop" if drop_last else "pad") if uneven is None else uneven
        check_word("uneven", self.uneven, UNEVEN)
        if drop_last and self.uneven != "drop":
            raise ValueError(f"drop_last=True contradicts uneven={uneven!r}: leave one of them out")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, self.uneven == "drop")
        self.num_samples = self._own_share(len(dataset), "samples")
        if self.uneven == "exact":
            self.total_size = len(dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(self.begin_epoch().tolist())

    def begin_epoch(self) -> IntArray:
        """The indices that an iteration gives, which begins with this call."""
        consumed = self._begin_iteration()
        order, ranks = self.epoch_order(), self.num_replicas
        rest = order[consumed:]
        self._own_share(len(rest), "samples")
        if self.run_length == 1:
            return self._share(rest, order)
        # Whole runs go round the ranks, and single samples of what is left.
        whole = len(rest) - len(rest) % (ranks * self.run_length)
        runs = rest[:whole].reshape(-1, ranks, self.run_length)
        return np.concatenate([runs[:, self.rank].ravel(), self._share(rest[whole:], order)])

    def state_after(
        self, batches: int, batch_size: int, begin: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The state after a number of batches of an epoch, in constant time.

        Args:
            batches: Batches that each rank has had, those before a resumed state included.
            batch_size: Samples in each of them since then.
            begin: The state that the epoch began with; None for the latest iteration's, which may be one of
                the next epoch that was begun early.
        """
        consumed = self._consumed_after(batches, begin or self._begin, batch_size)
        return {"consumed": min(consumed, len(self.dataset)), "batches": batches}  # type: ignore[arg-type]

    def epoch_order(self) -> IntArray:
        """The global order of the present epoch, of all ranks; the loader asks once, as the epoch begins."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return np.arange(length, dtype=np.int64)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(length, generator=generator, device="cpu").numpy()

    def _share(self, rest: IntArray, order: IntArray) -> IntArray:
        """This rank's samples of the rest of an order."""
        ranks = self.num_replicas
        if self.uneven == "drop":
            rest = rest[: len(rest) // ranks * ranks]
        elif len(rest) % ranks and self.uneven != "exact":
            rest = np.concatenate([rest, np.resize(order, -len(rest) % ranks)])
        return rest[self.rank :: ranks]
