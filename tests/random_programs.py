"""Random programs with a loader: a dataset, a sampler, options, epochs with breaks, states, a resume.

What the documentation says is different from torch's loader is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

MAPS = ("map", "plain map", "lists")
STREAMS = ("stream", "plain stream", "stream with state", "stream with iterator state")
SAMPLERS = (
    *("sequential", "shuffle", "random", "weighted", "subset", "list", "lazy", "lazy told", "lazy global"),
    *("with state", "batches", "batches told", "batches with state", "distributed", "sharded"),
)
LAZY = ("lazy", "lazy told", "lazy global", "batches", "batches told", "random", "weighted")


@dataclass
class Program:
    """One program. Fields with a default are options of ours, and the state it goes on from."""

    seed: int
    data: str
    inside: str
    length: int
    bad: frozenset[int]
    draws: bool
    told: str
    sampler: str
    own_generator: bool
    sampler_raises_at: int | None
    batch_size: int | None
    drop_last: bool
    collate: str
    collate_raises_at: int | None
    workers: int
    persistent: bool
    prefetch: int
    in_order: bool
    epochs: int
    breaks: dict[int, int]
    tells: bool
    main_draws: bool
    auto: bool = False
    on_error: str = "raise"
    dynamic: bool = False
    place_results: bool = True
    prefetch_epochs: bool = False
    threads: bool = False
    shard: bool = False
    asks: int = 0
    snapshot: int | None = None
    resume_at: tuple[int, int] | None = None
    resume_workers: int = 0

    @property
    def is_stream(self) -> bool:
        return self.data in STREAMS

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


def program(seed: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    chance: Callable[[float], bool] = lambda share: choose.random() < share  # noqa: E731
    is_stream = chance(0.35)
    length = choose.choice((0, 1, 3, 7, 12, 17, 24, 30))
    made = Program(
        seed=seed,
        data=choose.choice(list(STREAMS if is_stream else MAPS)),
        inside=choose.choice(("", "", "", "chain") if is_stream else ("", "", "", "subset", "concat")),
        length=length,
        bad=frozenset(choose.sample(range(length), min(length, choose.choice((0, 0, 0, 1, 2, 5))))),
        draws=chance(0.7),
        told=choose.choice(("number", "number", "order", "seed")),
        sampler="sequential" if is_stream else choose.choice(SAMPLERS),
        own_generator=chance(0.5),
        sampler_raises_at=choose.randrange(length) if length and chance(0.5) else None,
        batch_size=choose.choice((None, 1, 2, 3, 4, 5)),
        drop_last=chance(0.3),
        collate=choose.choice(("default", "default", "stacked", "listed")),
        collate_raises_at=choose.randrange(length) if length and chance(0.08) else None,
        workers=choose.randrange(4),
        persistent=chance(0.5),
        prefetch=choose.choice((1, 2, 2, 3)),
        in_order=chance(0.8),
        epochs=choose.randint(1, 4),
        breaks={epoch: choose.randrange(1, 5) for epoch in range(4) if chance(0.2)},
        tells=chance(0.5),
        main_draws=chance(0.3),
    )
    made.auto = made.workers > 0 and chance(0.2)
    made.on_error = choose.choice(("raise", "raise", "skip", "replace"))
    made.dynamic = made.workers > 0 and not is_stream and chance(0.25)
    made.place_results = chance(0.8)
    made.prefetch_epochs = made.workers > 0 and made.persistent and chance(0.3)
    made.threads = made.workers > 0 and chance(0.08)
    made.shard = is_stream and chance(0.25)
    made.asks = choose.choice((0, 0, 1, 3))
    made.snapshot = choose.choice((None, None, 0, 1, 3)) if is_stream else None
    if chance(0.4):
        made.resume_at = choose.randrange(made.epochs), choose.randrange(8)
        made.resume_workers = choose.randrange(4)
    _leave_out(made)
    return made


def _leave_out(made: Program) -> None:
    """Leave out what the documentation says is different from torch, or depends on time."""
    if made.workers == 0:
        made.persistent, made.in_order = False, True
    if made.sampler in ("batches", "batches told", "batches with state"):
        made.drop_last = False
        made.batch_size = made.batch_size or 1  # torch refuses None
    if made.batch_size is None:
        made.drop_last = False
    if made.sampler not in ("lazy", "lazy told", "batches", "batches told"):
        made.sampler_raises_at = None
    if made.dynamic or made.threads:  # samples draw other numbers (dispatch.md, threads.md)
        made.draws = False
    if made.threads:  # they share the program's dataset and global generators
        made.told = "number"
    if not made.in_order and made.workers > 1:  # which worker makes which batch depends on time
        made.draws, made.breaks, made.sampler_raises_at = False, {}, None
    if made.auto or made.dynamic:  # index batches are drawn farther ahead
        made.sampler_raises_at = None
        made.main_draws = made.main_draws and made.sampler != "lazy global"
        if made.draws or made.sampler in LAZY or made.told != "number":
            made.breaks = {}
    if made.prefetch_epochs:  # the loader alone draws from the sampler's generator (dispatch.md)
        made.draws, made.own_generator, made.sampler_raises_at = False, True, None
        if made.sampler in ("lazy global", "random", "weighted", "subset"):
            made.sampler = "shuffle"
    _leave_out_for_datasets(made)
    _leave_out_of_resuming(made)


def _leave_out_for_datasets(made: Program) -> None:
    if made.shard:  # errors of samples that are dealt out: sharding.md; seeds are drawn from `generator`
        made.bad, made.draws, made.own_generator, made.on_error = frozenset(), False, True, "raise"
        made.in_order = True
        made.breaks = {}
    if (
        made.data == "lists" or made.inside == "subset"
    ) and made.on_error != "raise":  # a list that raises is fetched again, one by one
        made.draws = made.draws and not made.bad
    if (made.data == "stream with state" or made.inside == "chain") and made.on_error != "raise":
        made.bad = frozenset()  # a generator ends with its exception


def _leave_out_of_resuming(made: Program) -> None:
    if made.sampler == "lazy global":  # refused (resume.md)
        made.resume_at, made.asks = None, 0
    if made.resume_at is None:
        return
    made.draws = False  # a new worker begins its stream of numbers again
    if made.told != "number":  # what set_epoch() draws is the program's own state
        made.told = "number"
    made.breaks = {epoch: stop for epoch, stop in made.breaks.items() if epoch < made.resume_at[0]}
    if made.is_stream and not made.shard:  # it must be divided alike; 0 is as 1
        made.resume_workers = made.workers
    if made.is_stream and made.bad:  # a generator has ended; a draw that raised is drawn again
        made.resume_workers = made.workers
    if made.sampler_raises_at is not None:  # in place of which batch depends on how many were drawn ahead
        made.resume_workers = made.workers
    if made.resume_at[1] == 0 and made.sampler.endswith("with state"):
        made.breaks = {}  # such a state is refused: the sampler is still in the epoch that was left
    if made.persistent or made.prefetch_epochs:  # a base seed is drawn once, and not for each epoch
        made.resume_workers = max(made.resume_workers, 1)
