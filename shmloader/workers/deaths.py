"""The error for a worker process that has died: `WorkerDied`, in words. Main process only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from shmloader.errors import WorkerDied
from shmloader.failures.stacks import StackFile
from shmloader.memory.limits import memory_headroom, oom_kills
from shmloader.memory.process_memory import read_memory
from shmloader.messages import ending_of, page
from shmloader.store_hooks import hooks
from shmloader.workers.base import describe_held

_DEATH_S = 1.0  # how long to wait for the exit code of a worker whose pipe is closed
_SEE_OUTPUT = " It had made no batch yet. Its own error output, above, says why if it could."
_MOST_TOLD = 9  # processes whose memory an error names


def error_of(
    dead: Any, indices: tuple[object, ...], why: str, explain: Callable[[], str], stacks: StackFile
) -> WorkerDied:
    """The error for a dead `ProcessWorker` that held these index batches, and ``why`` it was not restarted.

    ``explain`` is called if it was killed; ``stacks`` has the traceback of one that an exception has ended.
    """
    dead.process.join(_DEATH_S)
    code, pid = dead.process.exitcode, dead.pid
    # First torch's words (torch/csrc/DataLoader.cpp, _try_get_data), which people and scripts search for.
    if code is not None and code < 0:
        torchs = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
    else:
        torchs = f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
    hint = why and f" {why}"
    if code == -signal.SIGKILL:
        hint += explain()
    elif error := stacks.error_of(pid):
        hint += f" This has ended it:\n{error}\n"
    elif not dead.heard:
        hint += _SEE_OUTPUT
    return WorkerDied(
        f"{torchs}. shmloader worker {dead.worker_id} ({dead.place}) {ending_of(code)}.{hint}"
        f"{describe_held(indices)} (causes and cures: {page('docs/messages.md')})",
        worker_id=dead.worker_id,
        pid=pid,
        exit_code=code,
        indices=indices,
    )


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
