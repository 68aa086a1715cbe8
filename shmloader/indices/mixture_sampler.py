"""`MixtureSampler`: indices of a `Mixture` by weights, the same on any number of ranks. Main process."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from shmloader.indices.mixture import Mixture
from shmloader.indices.mixture_order import FloatArray, MixtureOrder, Segment
from shmloader.indices.mixture_weights import Lengths, Schedule, SourceWeights, Weights
from shmloader.indices.packed_indices import IntArray
from shmloader.indices.sharded_sampler import (
    UNEVEN,
    WHOLE_EPOCH,
    GlobalOrder,
    Uneven,
    check_runs,
    check_word,
    ranks_of,
)

StoppingStrategy = Literal["first_exhausted", "all_exhausted", "never"]

_BLOCK = 256  # samples with the same weights, of which each source has its share
_PIECE = 128  # samples of a rank that are given out before it is looked whether the weights were changed


class Place(NamedTuple):
    """A place in the global order: the epoch, and how many of its samples come before."""

    epoch: int
    position: int


class MixtureSampler(GlobalOrder, DistributedSampler[int]):
    """Indices of a `Mixture`, each from a source that is chosen by weights; pass it as ``sampler``.

    There is one global order, a function of ``seed``, the epoch, the place in it, and the changes of the
    weights. Number and changes are the whole state: another number of ranks, or another batch size, can
    continue from it. From the rest of the order, rank ``r`` of ``R`` takes every ``R``-th draw. Of each 256
    samples of the order a source has its share, rounded up or down.

    No sample of a source comes again before all its samples have come. Then the source begins anew, in
    another order. In memory is only the present order of each source, 8 bytes for each of its samples.

    Call ``set_epoch()``, of the loader or of this, before each epoch, as with ``DistributedSampler``.

    Args:
        mixture: The sources.
        weights: How many samples come from each source, by name, relative to each other. Or a function of
            the epoch and of the position, the samples of the epoch's global order that come before; it is
            called for each 256 samples. None: in proportion to the sizes of the sources.
        temperature: The weights are raised to ``1 / temperature``; more than 1 makes them more equal.
        lengths: Tokens of each sample, by source. The weights, also those by size, are then of tokens.
        stopping_strategy: When an epoch ends: with the last sample of the source that is exhausted first
            (``"first_exhausted"``) or last (``"all_exhausted"``), as Hugging Face's ``interleave_datasets``
            has it; or ``"never"``.
        epoch_size: With ``"never"``, samples of an epoch on all ranks together. The next epoch continues
            where it ends, also in each source. None: the epoch has no end.
        run_length: Samples in a row from one source. With that of the batch, a batch has one source. Batch
            sizes must be multiples of it.
        shuffle: Whether each source has a random order, another one each time; else its own.
        seed: The same number on all ranks, at least 0.
        num_replicas: Number of ranks; None asks ``torch.distributed``, else it is 1.
        rank: This one; None asks ``torch.distributed``, else it is 0. Needed with another ``num_replicas``.
        uneven: What to do if the draws of an epoch do not divide equally among the ranks: ``"pad"`` adds the
            next ones of the order, ``"drop"`` leaves the last ones out, ``"error"`` raises, and with
            ``"exact"`` some ranks have a draw less.

    Attributes:
        epoch: Number of the epoch that the next iteration gives.
        mixture: The names, sizes and weights of the sources, as text; a state must have the same.

    Raises:
        ValueError: For weights that are negative, all 0, not finite, or of other names than the sources', and
            for any other wrong argument.
    """

    def __init__(
        self,
        mixture: Mixture,
        weights: Weights | Schedule | None = None,
        *,
        temperature: float = 1.0,
        lengths: Lengths | None = None,
        stopping_strategy: StoppingStrategy = "first_exhausted",
        epoch_size: int | None = None,
        run_length: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        uneven: Uneven = "pad",
    ) -> None:
        if not isinstance(mixture, Mixture):
            raise TypeError(
                f"a MixtureSampler draws from a Mixture, not from a {type(mixture).__name__}: pass "
                "shmloader.Mixture({name: dataset, ...})"
            )
        check_word("stopping_strategy", stopping_strategy, get_args(StoppingStrategy))
        check_word("uneven", uneven, UNEVEN)
        if run_length < 1 or seed < 0:
            raise ValueError(f"run_length={run_length} must be at least 1, and seed={seed} at least 0")
        if epoch_size is not None:
            if stopping_strategy != "never":
                raise ValueError(
                    f"epoch_size={epoch_size} needs stopping_strategy='never', and not {stopping_strategy!r}"
                )
            if epoch_size < 1 or epoch_size % run_length:
                raise ValueError(f"epoch_size={epoch_size} must be a multiple of run_length={run_length}")
        ranks, this_one = ranks_of(num_replicas, rank)
        super().__init__(mixture, ranks, this_one, shuffle, seed, uneven == "drop")
        del self.num_samples, self.total_size  # of samplers that give each sample of the dataset once
        self.stopping_strategy: StoppingStrategy = stopping_strategy
        self.epoch_size, self.run_length, self.uneven = epoch_size, run_length, uneven
        self._sizes = np.array(mixture.sizes)
        never_zero = stopping_strategy == "all_exhausted" and not callable(weights)
        self._weights = SourceWeights(mixture, temperature, lengths, never_zero=never_zero)
        self._first: FloatArray | Schedule
        if callable(weights):
            self._first, texts = weights, ["by a function"] * len(mixture.names)
        else:
            self._first = self._weights.by_size() if weights is None else self._weights.shares(weights)
            texts = [f"{share:.6g}" for share in self._first]
        sources = zip(mixture.names, mixture.sizes, texts, strict=True)
        self.mixture = "; ".join(f"{name}, {size:,} samples, {text}" for name, size, text in sources)
        self._changes: dict[Place, Weights] = {}
        self._next: Weights | None = None  # of the next iteration's beginning
        self._version = 0  # of the changes
        self._end_of: tuple[tuple[int, int], int] | None = None  # epoch and version; its draws
        self._drawn, self._ended = Place(-1, 0), True  # by the latest iteration, and whether it has ended

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as in torch. One that was drawn before its number was set has been drawn early."""
        self._ended &= epoch == self.epoch
        super().set_epoch(epoch)

    def set_weights(self, weights: Weights, *, position: int | None = None) -> None:
        """Change the weights, whether they were numbers or a function. All ranks must make the same call.

        The change is in the state.

        Args:
            weights: By name.
            position: Samples of the global order of the sampler's present epoch before the change: steps
                times batch size times ranks. It has to be ahead of what was drawn in advance. None: they hold
                from the beginning of the next iteration, which may be in the middle of a resumed epoch.

        Raises:
            ValueError: If this rank has drawn further, with the numbers; and for wrong weights.
        """
        self._weights.shares(weights)
        # A state has them as JSON, and an array that they come from may be used for others.
        weights, drawn = {name: float(weight) for name, weight in weights.items()}, self._drawn
        if position is None:
            if drawn.epoch > self.epoch or (drawn.epoch == self.epoch and not self._ended):
                raise ValueError(
                    f"epoch {drawn.epoch} was begun already, so the weights would be those of a later one. "
                    "Call set_epoch() with the epoch that they are for; if that was begun early, leave out "
                    "prefetch_epochs, or pass a position"
                )
            self._next = weights
            return
        place = Place(int(self.epoch), operator.index(position))
        if position < 0 or place < drawn:
            raise ValueError(
                f"position={position:,} in epoch {self.epoch} is too early: this rank has drawn the first "
                f"{drawn.position:,} samples of epoch {drawn.epoch}, some of them in advance. Pass a later "
                "position, the same on all ranks"
            )
        self._changes[place] = weights
        self._version += 1

    # --- the order

    def _order_of(self, epoch: int) -> tuple[MixtureOrder, tuple[int, ...], int]:
        """The order that an epoch is part of, the key of its random numbers, the epoch's first draw."""
        size, run_length = self.epoch_size, self.run_length
        key = (self.seed, epoch) if size is None else (self.seed,)
        segments = [Segment(0, self._scheduled(epoch) if callable(self._first) else self._first)]
        for place, weights in sorted(self._changes.items()):
            draw = -(-place.position // run_length)
            if size is not None:
                draw += place.epoch * size // run_length
            elif place.epoch != epoch:
                draw = 0
            if size is not None or place.epoch <= epoch:
                if draw <= segments[-1].begin:
                    segments.pop()
                segments.append(Segment(draw, self._weights.shares(weights)))
        order = MixtureOrder(key, len(self._sizes), segments, max(1, _BLOCK // run_length))
        return order, key, 0 if size is None else epoch * size // run_length

    def _scheduled(self, epoch: int) -> Any:
        """The shares by the program's function, for `Segment`."""

        def shares(draw: int) -> FloatArray:
            position = draw * self.run_length
            place = (epoch, position) if self.epoch_size is None else divmod(position, self.epoch_size)
            return self._weights.shares(self._first(*place))  # type: ignore[operator]

        return shares

    def _draws_in(self, epoch: int) -> int | None:
        """Draws of an epoch on all ranks; None without an end."""
        if self.stopping_strategy == "never":
            return None if self.epoch_size is None else self.epoch_size // self.run_length
        if self._end_of is None or self._end_of[0] != (epoch, self._version):
            reached = np.any if self.stopping_strategy == "first_exhausted" else np.all
            order, _, _ = self._order_of(epoch)
            draws = order.first_with(-(-self._sizes // self.run_length), reached)
            if not draws:
                raise ValueError(
                    f"epoch {epoch} has no end: with stopping_strategy={self.stopping_strategy!r} it goes on "
                    f"after 1,000 times as many samples as the sources have ({self.mixture}). Give larger "
                    "weights to those that are to be exhausted"
                )
            self._end_of = (epoch, self._version), draws
        return self._end_of[1]

    def _own_draws(self, epoch: int, consumed: int) -> int | None:
        """Draws of this rank in an epoch, after samples that all ranks have consumed."""
        if (draws := self._draws_in(epoch)) is None:
            return None
        return self._own_share(max(draws - consumed // self.run_length, 0), "draws")

    def __len__(self) -> int:
        """Number of samples of this rank in the present epoch; after a loaded state, those that are left.

        Raises:
            TypeError: If it has no end.
        """
        draws = self._own_draws(self.epoch, self._loaded["consumed"])
        if draws is None:
            raise TypeError("a MixtureSampler with stopping_strategy='never' and no epoch_size has no length")
        return draws * self.run_length

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._pieces())  # nothing happens before the first index

    def _pieces(self) -> Iterator[list[int]]:
        epoch, consumed = int(self.epoch), self._begin_iteration()
        if self._next is not None:
            self._changes = self._changes | {Place(epoch, consumed): self._next}
            self._next, self._version = None, self._version + 1
        self._ended = False
        source_orders = _SourceOrders(self._sizes.tolist(), shuffle=self.shuffle)
        begin, given = consumed // self.run_length + self.rank, 0
        while True:
            version, total = self._version, self._own_draws(epoch, consumed)
            for piece in self._runs(epoch, begin + given * self.num_replicas, source_orders):
                if version != self._version or given == total:
                    break
                runs = piece[: None if total is None else total - given]
                given += len(runs)
                position = (begin + (given - 1) * self.num_replicas + 1) * self.run_length
                self._drawn = Place(epoch, position)
                yield runs.ravel().tolist()
            if given == total:
                self._ended = True
                return

    def _runs(self, epoch: int, draw: int, source_orders: _SourceOrders) -> Iterator[IntArray]:
        """This rank's indices from a draw of an epoch on, in pieces of shape ``(draws, run_length)``."""
        order, key, first = self._order_of(epoch)
        counts, ranks = order.counts(first + draw), self.num_replicas
        piece = max(1, _PIECE // self.run_length)
        smallest = np.min_scalar_type(len(counts))  # of small numbers the order is found most quickly
        for at, drawn in order.chunks(first + draw):
            skipped = (first + draw - at) % ranks  # draws of other ranks before the first own one
            indices = np.empty((len(range(skipped, len(drawn), ranks)), self.run_length), np.int64)
            ends = np.bincount(drawn, minlength=len(counts)).cumsum()[:-1]
            for source, of_it in enumerate(np.split(drawn.astype(smallest).argsort(kind="stable"), ends)):
                numbers = np.arange(counts[source], counts[source] + len(of_it))
                counts[source] += len(of_it)
                own = (of_it - skipped) % ranks == 0
                places = (of_it[own] - skipped) // ranks
                samples = numbers[own, None] * self.run_length + np.arange(self.run_length)
                indices[places] = source_orders.indices(key, source, samples.ravel()).reshape(samples.shape)
            yield from (indices[begin : begin + piece] for begin in range(0, len(indices), piece))

    # --- states

    def state_after(
        self, batches: int, batch_size: int, begin: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state after a number of batches of an epoch; see `ShardedSampler.state_after`.

        Raises:
            ResumeError: If the batch size is no multiple of ``run_length``.
        """
        begin = begin or self._begin
        if batches not in (0, begin["batches"]):
            check_runs(batch_size, self.run_length)
        consumed = self._consumed_after(batches, begin, batch_size)
        changes = [[*place, weights] for place, weights in sorted(self._changes.items())]
        return {"consumed": consumed, "batches": batches, "changes": changes, "next": self._next}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue in its epoch; see `ShardedSampler.load_state_dict`.

        Changes of the weights that the program has set for later places stay.

        Raises:
            ValueError: If the state has weights of other sources.
        """
        consumed, _ = [int(state_dict[name]) for name in WHOLE_EPOCH]  # a damaged state changes nothing
        begin = Place(self.epoch, consumed)
        changes = {Place(int(epoch), int(at)): dict(weights) for epoch, at, weights in state_dict["changes"]}
        following = state_dict["next"] if self._next is None else self._next
        for weights in (*changes.values(), *([] if following is None else [following])):
            self._weights.shares(weights)
        later = {place: weights for place, weights in self._changes.items() if place >= begin}
        self._changes, self._next, self._version = changes | later, following, self._version + 1
        self.go_back(consumed)
        super().load_state_dict(state_dict)

    def go_back(self, consumed: int) -> None:
        """Note that the next iteration begins in the present epoch, after so many samples of the order."""
        self._drawn, self._ended = Place(int(self.epoch), consumed), True

    def at(self, epoch: int, batches: int, batch_size: int, begin: Mapping[str, Any]) -> Self:
        """A copy that begins after a number of batches of an epoch, with the changes so far.

        ``begin`` is the state that the epoch began with. Changes for the next iteration are of an epoch that
        was not begun, or that a loaded state continues.
        """
        other = copy.copy(self)
        other._begin_at(epoch, batches, batch_size, begin)  # noqa: SLF001 - of this class
        return other

    def _begin_at(self, epoch: int, batches: int, batch_size: int, begin: Mapping[str, Any]) -> None:
        if self._next is not None:
            following = max(self.epoch, self._drawn.epoch + 1)
            is_loaded, consumed = any(self._loaded.values()), self._loaded["consumed"]
            place = Place(self.epoch if is_loaded else following, consumed)
            self._changes, self._next = self._changes | {place: self._next}, None
            self._version += 1
        self.epoch = epoch
        self.load_state_dict(self.state_after(batches, batch_size, begin))


class _SourceOrders:
    """The order of each source's samples, of which one at a time is kept."""

    def __init__(self, sizes: list[int], *, shuffle: bool) -> None:
        self._sizes, self._shuffle = sizes, shuffle
        self._begins: list[int] = np.cumsum([0, *sizes]).tolist()
        self._orders: dict[int, tuple[tuple[int, ...], IntArray]] = {}

    def indices(self, key: tuple[int, ...], source: int, numbers: IntArray) -> IntArray:
        """Indices of the mixture for samples of a source, by their ascending numbers since its beginning."""
        size = self._sizes[source]
        if not self._shuffle or not len(numbers):
            return numbers % size + self._begins[source]
        times, places = np.divmod(numbers, size)
        found: IntArray = np.empty_like(numbers)
        ends = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
        for begin, end in itertools.pairwise(ends):
            order = self._order(source, (*key, source, int(times[begin])))
            found[begin:end] = order[places[begin:end]]
        found += self._begins[source]
        return found

    def _order(self, source: int, drawn_from: tuple[int, ...]) -> IntArray:
        known, order = self._orders.get(source, ((), np.empty(0, np.int64)))
        if known != drawn_from:
            self._orders.pop(source, None)  # one at a time
            order = np.random.default_rng((*drawn_from, 1)).permutation(self._sizes[source])
            self._orders[source] = drawn_from, order
        return order
