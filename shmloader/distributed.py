"""Ranks of a distributed run: the number of this one, and the check that all have equally many batches."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from shmloader.errors import LoaderError
from shmloader.torch_private import default_store

_WAIT_S = 300.0  # for the other ranks at the end of an epoch, if the loader has no timeout
_LOOK_AGAIN_S = 0.02
_ADVICE = (
    "Let the dataset give each shard equally many samples, or leave it undivided: then shard='auto' deals "
    "its samples out."
)
_ends = itertools.count()


def rank_and_ranks() -> tuple[int, int]:
    """This rank and the number of ranks: of ``torch.distributed``, else of valid environment variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or ranks is None:
        return 0, 1
    if not (rank.isdigit() and ranks.isdigit() and int(rank) < int(ranks)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={ranks!r} in the environment are not a rank of a run")
    return int(rank), int(ranks)


def local_rank_and_ranks() -> tuple[int, int]:
    """This rank among those of its host, and their number, of the environment; 0 and 1 outside a run.

    Raises:
        ValueError: If ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, which torchrun sets, are missing in a run.
    """
    rank, ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if rank is None and ranks is None and rank_and_ranks()[1] == 1:
        return 0, 1
    if not (rank and rank.isdigit() and ranks and ranks.isdigit() and int(rank) < int(ranks)):
        raise ValueError(
            "shared_by='host' needs this rank's number on its host and how many there are, as torchrun sets "
            f"them in the environment: LOCAL_RANK is {rank!r} and LOCAL_WORLD_SIZE is {ranks!r}"
        )
    return int(rank), int(ranks)


def check_equal_ends(batches: int, timeout_s: float) -> None:
    """Compare how many batches the ranks have had, at the end of an epoch whose stream they divided.

    A rank that has more batches than others would wait for them in its next collective operation. So each
    rank publishes its number at its end, and waits for the others' for ``timeout_s``, or five minutes if that
    is 0. All ranks have to come to the ends of such epochs in the same order.
    Raises `LoaderError` if another has had more or fewer, or has not come to its end in time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
    end = next(_ends)
    keys = {other: f"shmloader/end {end}/rank {other}" for other in range(ranks)}
    store.set(keys[rank], str(batches))
    wait_s = timeout_s or _WAIT_S
    deadline = time.monotonic() + wait_s
    while missing := [other for other, key in keys.items() if not store.check([key])]:
        if time.monotonic() > deadline:
            raise LoaderError(
                f"rank {rank} came to the end of its epoch after {batches:,} batches, and rank "
                f"{' and '.join(map(str, missing))} did not within {wait_s:g} s. A rank that has more "
                f"batches than rank {rank} now waits for rank {rank} in a collective operation. {_ADVICE} If "
                f"the others are only slower, give the loader a timeout of more than {wait_s:g} s."
            )
        time.sleep(_LOOK_AGAIN_S)
    counts = {other: int(store.get(key)) for other, key in keys.items()}
    fewest = min(counts, key=lambda other: counts[other])
    if max(counts.values()) > counts[fewest]:
        others = ", ".join(f"rank {other}: {count:,}" for other, count in counts.items() if other != fewest)
        raise LoaderError(
            f"rank {fewest} ran out after {counts[fewest]:,} batches, before others ({others}). {_ADVICE}"
        )


@contextlib.contextmanager
def refused_collectives() -> Iterator[None]:
    """Make collectives of the default process group raise; rank and world size stay.

    A forked worker process inherits the group without its threads: a collective there would hang.
    """
    world: Any = dist.group.WORLD if dist.is_available() else None
    if world is not None:
        without_backends: Any = dist.ProcessGroup
        dist.group.WORLD = without_backends(world.rank(), world.size())
    try:
        yield
    finally:
        if world is not None:
            dist.group.WORLD = world
