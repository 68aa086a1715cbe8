"""How a worker's process is started, and what can be wrong with what it is given."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

from shmloader.errors import WorkerDied, WorkerStartError
from shmloader.wire.channel import Pipes
from shmloader.worker.loop import run
from shmloader.worker.watch import EarlyName

_DESCRIPTORS = 4  # pairs that starting a process may take for a moment
_DEPTH = 4  # how deep to look into what workers are given, ...
_FEW = 8  # ... and how many items of a list


def start_process(context: Any, worker_id: int, given: Any, pipes: Pipes) -> Any:
    """Start a worker's process.

    Args:
        context: ``multiprocessing`` context or module.
        worker_id: The worker's number.
        given: Its `WorkerArguments`, or what is unpickled as such.
        pipes: Its ends of its pipes.

    Returns:
        The process object.

    Raises:
        WorkerDied: If it ended before it was started wholly.
    """
    _check_descriptors()
    process = context.Process(target=run, args=(given, pipes), daemon=True)
    process.name = EarlyName(process.name, os.getpid())
    try:
        with _without_interrupts(context):
            process.start()
    except (BrokenPipeError, ConnectionError, EOFError) as error:
        raise WorkerDied(
            f"shmloader worker {worker_id} ended while it was being started (start method "
            f"{context.get_start_method()!r}), before it had read what it is given: {error!r}. Its own error "
            "output, above, says why if it could; a SIGKILL leaves none (is memory short?).",
            worker_id=worker_id,
        ) from error
    return process


def _check_descriptors() -> None:
    """Fail before a process is begun that there are no descriptors for: multiprocessing would lose some."""
    spare: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            spare.extend(os.pipe())
    except OSError as error:
        error.add_note(
            "A worker takes 5 descriptors of the main process, and up to 13 while it is being started: raise "
            "the limit (ulimit -n)."
        )
        raise
    finally:
        for fd in spare:
            os.close(fd)


@contextlib.contextmanager
def _without_interrupts(context: Any) -> Iterator[None]:
    """Hold back Ctrl-C while a process is started, in this one and, until it has a handler, in the new one.

    A fork server's processes begin with the server's mask: there the process name has to do.
    """
    if not hasattr(signal, "pthread_sigmask") or context.get_start_method() == "forkserver":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def explain_start_failure(error: BaseException, context: Any) -> None:
    """Note with an error of pickling how what workers are given reaches them, which is not by fork."""
    method = context.get_start_method()
    error.add_note(
        f"A shmloader worker could not be started with start method {method!r}, which pickles the dataset, "
        "collate_fn and worker_init_fn. Use classes and functions defined at the top of a module (no "
        "lambdas), or multiprocessing_context='fork'."
    )


def check_importable(context: Any, objects: dict[str, object]) -> None:
    """Refuse objects that a spawned worker cannot import, before a process is started for nothing.

    Args:
        context: ``multiprocessing`` context or module.
        objects: What workers are given, by argument name.

    Raises:
        WorkerStartError: If the start method is not fork and a class or function is defined in an
            interactive ``__main__`` (a notebook, the REPL, ``python -c``).
    """
    main = sys.modules.get("__main__")
    if context.get_start_method() == "fork" or main is None:
        return
    if getattr(main, "__spec__", None) is not None or hasattr(main, "__file__"):
        return
    for argument, value in objects.items():
        name = _defined_in_main(value)
        if name is not None:
            raise WorkerStartError(
                f"{argument} uses {name!r}, which is defined in an interactive session (__main__): worker "
                f"processes started with {context.get_start_method()!r} cannot import it. Put it in a "
                "module file and import it from there, or pass multiprocessing_context='fork'."
            )


def _defined_in_main(value: object) -> str | None:
    """Name of the first class or function of ``__main__`` that pickling ``value`` would refer to."""
    for part in named_parts(value):
        if getattr(part, "__module__", None) == "__main__":
            return str(getattr(part, "__qualname__", part))
    return None


def named_parts(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """The classes and functions that pickling ``value`` would refer to by name, as far as a look shows.

    Looks into attributes, and into the first items of lists, tuples and dicts.

    Args:
        value: The object.
        depth: How deep to look.
    """
    if value is None or depth == 0:
        return
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    yield named
    inner: list[object] = list(getattr(value, "__dict__", {}).values()) if named is not value else []
    if isinstance(value, list | tuple):
        inner = list(value[:_FEW])
    elif isinstance(value, dict):
        inner = list(itertools.islice(value.values(), _FEW))
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args[:_FEW], *itertools.islice(value.keywords.values(), _FEW)]
    elif isinstance(value, MethodType):
        inner = [value.__self__]
    for item in inner:
        yield from named_parts(item, depth - 1)
