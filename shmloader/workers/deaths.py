"""Words about the death of a worker process, for `WorkerDied`. Main process only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmloader.memory.limits import memory_headroom, oom_kills
from shmloader.memory.process_memory import read_memory
from shmloader.store_hooks import hooks

_MOST_TOLD = 9  # processes whose memory an error names


def explain_kill(before: int | None, dataset: Any, pids: Mapping[str, int], memory: str) -> str:
    """A sentence on the kernel's out-of-memory killer, if that seems to have ended a worker, or "".

    Args:
        before: Its kills when the workers were started, by `oom_kills`.
        dataset: The workers' dataset, of which the largest shareable part is named.
        pids: Processes whose memory is named, by name.
        memory: The loader's own figures.
    """
    now, room = oom_kills(), memory_headroom()
    if now is None or before is None or now <= before:
        return ""
    sharing = hooks.advise_sharing(dataset)
    return (
        f" The kernel's out-of-memory killer has ended {now - before} process(es) since the "
        f"workers were started, so this looks like its work: {room.available_nbytes:,} of "
        f"{room.limit_nbytes:,} bytes are available in {room.source}. {sharing and sharing + ' '}"
        f"Processes now: {_memory_of(pids)}. {memory} {'Or use' if sharing else 'Use'} fewer "
        "workers, a smaller batch_size or prefetch_factor, or less memory per sample in the dataset."
    )


def _memory_of(pids: Mapping[str, int]) -> str:
    """The memory of processes that live, each with its part of what is shared."""
    known = {f"{name} (pid {pid})": read_memory(pid).get("Pss") for name, pid in pids.items()}
    told = [f"{name} {nbytes:,} bytes" for name, nbytes in known.items() if nbytes]
    more = [f"{len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
    return ", ".join(told[:_MOST_TOLD] + more)
