"""Runs of random programs with torch's loader and with ours.

What torch's loader gives is right: the batches in their order, the types of exceptions in the places of
others, and where the global generators end.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from parity.compare import differences as batch_differences
from random_parts import (
    Batches,
    Collate,
    Lazy,
    LazyTold,
    LeftOut,
    Lists,
    Samples,
    SamplesTold,
    Stream,
    StreamTold,
    StreamWithIteratorState,
    StreamWithState,
    WithState,
    listed,
    stacked,
)
from random_programs import Program, program
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader, ShardedSampler

MAPS = {"map": SamplesTold, "plain map": Samples, "lists": Lists}
STREAMS = {
    "stream": StreamTold,
    "plain stream": Stream,
    "stream with state": StreamWithState,
    "stream with iterator state": StreamWithIteratorState,
}
MOST_ERRORS = 200  # of an epoch, which would not end


class Run:
    """One run of a program with one of both loaders.

    Args:
        made: The program.
        ours: Whether with our loader.
    """

    def __init__(self, made: Program, *, ours: bool) -> None:
        self.made, self.ours = made, ours
        self.log: list[Any] = []
        self.epoch_logs: list[list[Any]] = []
        torch.manual_seed(made.seed)
        np.random.seed(made.seed)
        random.seed(made.seed)
        self.build(made.workers)

    def build(self, workers: int) -> None:
        """A loader, as a new process of the program would build it."""
        made = self.made
        self.generator = torch.Generator().manual_seed(made.seed + 1) if made.own_generator else None
        self.sets: list[Any] = []
        dataset = self._dataset()
        options: dict[str, Any] = {"num_workers": workers, "generator": self.generator}
        options |= self._order(dataset)
        join = {"default": None, "stacked": stacked, "listed": listed}[made.collate]
        marks = self._marks()
        if marks or made.collate_raises_at is not None:
            whole = default_collate if made.batch_size else torch.utils.data.default_convert
            join = Collate(join or whole, made.on_error == "replace", made.collate_raises_at)
        options["collate_fn"] = join
        if workers:
            options |= {
                "persistent_workers": made.persistent,
                "prefetch_factor": "auto" if self.ours and made.auto else made.prefetch,
                "in_order": made.in_order,
                "multiprocessing_context": "fork",
            }
        self.loader: Any
        if self.ours:
            options |= self._own_options(workers)
            self.loader = DataLoader(dataset, **options)
        else:
            if made.shard:
                for name in ("persistent_workers", "prefetch_factor", "in_order", "multiprocessing_context"):
                    options.pop(name, None)
                options["num_workers"] = 0
            self.loader = TorchLoader(dataset, **options)

    def _marks(self) -> bool:
        return not self.ours and self.made.on_error != "raise"

    def _own_options(self, workers: int) -> dict[str, Any]:
        made = self.made
        options: dict[str, Any] = {"on_error": made.on_error, "place_results": made.place_results}
        options["snapshot_every_n_steps"] = made.snapshot
        if made.shard:
            options["shard"] = "auto"
        if workers:
            options["prefetch_epochs"] = made.prefetch_epochs
            options["dispatch"] = "dynamic" if made.dynamic else "static"
            if made.threads:
                options["worker_type"] = "thread"
                options["multiprocessing_context"] = None
        return options

    def _one(self, length: int) -> Any:
        made = self.made
        kind: Any = (MAPS | STREAMS)[made.data]
        one = kind(length, made.bad, made.draws, made.told, not self.ours, self._marks())
        if made.is_stream:
            one.divides = not made.shard
            one.passes_over_bad = made.on_error == "replace"
        self.sets.append(one)
        return one

    def _dataset(self) -> Any:
        made = self.made
        if made.inside == "subset":
            return Subset(self._one(made.length + 3), range(1, made.length + 1))
        if made.inside in ("concat", "chain"):
            parts = [self._one(made.length - made.length // 3), self._one(made.length // 3)]
            return ConcatDataset(parts) if made.inside == "concat" else ChainDataset(parts)
        return self._one(made.length)

    def _order(self, dataset: Any) -> dict[str, Any]:
        made = self.made
        size = {"batch_size": made.batch_size, "drop_last": made.drop_last}
        if made.is_stream or made.sampler == "sequential":
            return size
        if made.sampler == "shuffle":
            return size | {"shuffle": True} if made.length else size
        generator = torch.Generator().manual_seed(made.seed + 2) if made.own_generator else None
        if made.prefetch_epochs or made.seed % 2:
            generator = self.generator
        kinds: dict[str, Callable[[], Any]] = {
            "random": lambda: RandomSampler(range(made.length), True, made.length + 3, generator),
            "weighted": lambda: WeightedRandomSampler(
                [1.0 + i for i in range(made.length)], 40, generator=generator
            ),
            "subset": lambda: SubsetRandomSampler(range(0, made.length, 2), generator),
            "list": lambda: [(3 * place) % made.length for place in range(2 * made.length)],
            "lazy": lambda: Lazy(
                made.length, generator or torch.Generator().manual_seed(3), made.sampler_raises_at
            ),
            "lazy told": lambda: LazyTold(
                made.length, generator or torch.Generator().manual_seed(3), made.sampler_raises_at
            ),
            "lazy global": lambda: Lazy(made.length, None),
            "with state": lambda: WithState(made.length),
            "distributed": lambda: DistributedSampler(dataset, 2, made.seed % 2, bool(made.seed % 3), 5),
            "sharded": lambda: (ShardedSampler if self.ours else DistributedSampler)(
                dataset, 2, made.seed % 2, bool(made.seed % 3), 5
            ),
        }
        if not made.length and made.sampler in ("random", "weighted", "subset", "distributed", "sharded"):
            return size
        if not made.sampler.startswith("batches"):
            return size | {"sampler": kinds[made.sampler]()}
        inner = kinds["with state" if made.sampler == "batches with state" else "lazy told"]()
        return {"batch_sampler": Batches(inner, made.length, made.sampler == "batches told")}

    def tell(self, epoch: int) -> None:
        """Tell the epoch to sampler and dataset."""
        if self.ours:
            self.loader.set_epoch(epoch)
            return
        sampler = self.loader._index_sampler
        for one in (sampler, getattr(sampler, "sampler", None)):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
                break
        for one in self.sets:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def run(self) -> list[Any]:
        """All outcomes, epoch by epoch."""
        epoch, made = 0, self.made
        while epoch < made.epochs:
            epoch += self._epoch(epoch)
        self.loader.close() if self.ours else _stop(self.loader._iterator)
        self.loader = None
        return self.epoch_logs

    def _epoch(self, epoch: int, taken: int = 0) -> int:
        """One epoch; 1 if the next one follows."""
        made = self.made
        if made.tells and not (taken and made.sampler == "lazy told"):
            self.tell(epoch)
        log = self.log
        errors, failed = 0, False
        stop_for_state = (
            made.resume_at[1] if self.ours and made.resume_at and made.resume_at[0] == epoch else None
        )
        try:
            iterator = iter(self.loader)
        except Exception as error:
            log.append(error.with_traceback(None))
            iterator, failed = iter(()), True
        while taken != made.breaks.get(epoch, -1) and errors < MOST_ERRORS:
            # A sampler that raised is asked again after a resume, and raises again (resume.md).
            asked_again = (failed or errors) and made.sampler_raises_at is not None
            if taken == stop_for_state and not self.resumed and not asked_again:
                return self._go_on(epoch, taken)
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                log.append(error.with_traceback(None))  # whose frames hold the iterator
                errors += 1
            else:
                if type(batch) is LeftOut:
                    continue
                log.append(batch)
            taken += 1
            if made.main_draws:
                log.append(torch.rand(1))
            if self.ours and made.asks and taken % made.asks == 0:
                self.loader.state_dict()
        if not self.ours and not made.persistent:
            _stop(iterator)
        self._end_of_epoch()
        return 1

    resumed = False

    def _go_on(self, epoch: int, taken: int) -> int:
        """Another loader goes on from a state."""
        self.resumed = True
        state = self.loader.state_dict()
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self.loader.close()
        self.build(self.made.resume_workers)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        self.loader.load_state_dict(state)
        return self._epoch(epoch, taken)

    def _end_of_epoch(self) -> None:
        made = self.made
        if not made.in_order and max(made.workers, made.resume_workers) > 1:
            self.log.sort(key=repr)
        ends = [torch.get_rng_state(), np.random.get_state()[1], random.getstate()]
        if self.generator is not None and not made.prefetch_epochs and not made.shard:
            ends.append(self.generator.get_state())
        self.epoch_logs.append([*self.log, ("ends", ends)])
        self.log = []


def _stop(iterator: Any) -> None:
    """Stop the workers of torch's iterator now: its destructor may take seconds after further forks."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def differences(seed: int) -> str:
    """How our loader differs from torch's in the program of a seed; empty if it does not."""
    made = program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = Run(made, ours=False).run()
        try:
            got = Run(made, ours=True).run()
        except Exception as error:
            error.add_note(f"program {made}")
            raise
    for epoch, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if found := _epoch_differences(mine, theirs):
            return f"epoch {epoch} of program {made}:\n{found}\n{_short(mine)}\n{_short(theirs)}"
    return ""


def _epoch_differences(mine: list[Any], theirs: list[Any]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} outcomes for {len(theirs)}"
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(one, Exception) or isinstance(other, Exception):
            # torch's worker sends a KeyError as a class of its own
            if not (
                isinstance(one, Exception) and isinstance(other, Exception) and isinstance(other, type(one))
            ):
                return f"outcome {place}: {one!r} for {other!r}"
        elif found := batch_differences(one, other):
            return f"outcome {place}: {found[:3]}"
    return ""


def _short(outcomes: list[Any]) -> str:
    return "; ".join(
        repr(outcome)[:150].replace("\n", " ") for outcome in outcomes if type(outcome) is not tuple
    )[:2500]
