"""How a worker's process is started, and what can be wrong with what it is given."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from shmloader.errors import WorkerDied, WorkerStartError
from shmloader.links import Pipes
from shmloader.segment import Descriptor, open_anonymous_file
from shmloader.watch import EarlyName
from shmloader.worker import WorkerArguments, run

_DESCRIPTORS = 4  # pairs that starting a process may take for a moment


def start_process(context: Any, arguments: WorkerArguments, pipes: Pipes) -> Any:
    """Start a worker's process.

    Args:
        context: ``multiprocessing`` context or module.
        arguments: What it is given.
        pipes: Its ends of its pipes.

    Returns:
        The process object.

    Raises:
        WorkerDied: If it ended before it was started wholly.
    """
    _check_descriptors()
    packed = None if context.get_start_method() == "fork" else _Packed(arguments)
    process = context.Process(target=run, args=(packed or arguments, pipes), daemon=True)
    process.name = EarlyName(process.name, arguments.main_pid)
    try:
        with _without_interrupts(context):
            process.start()
    except (BrokenPipeError, ConnectionError, EOFError) as error:
        raise WorkerDied(
            f"shmloader worker {arguments.worker_id} ended while it was being started (start method "
            f"{context.get_start_method()!r}), before it had read what it is given: {error!r}. Its own error "
            "output, above, says why if it could; a SIGKILL leaves none (is memory short?).",
            worker_id=arguments.worker_id,
        ) from error
    except Exception as error:
        _explain_start_failure(error, context)
        raise
    finally:
        if packed is not None:
            packed.close()
    return process


def _check_descriptors() -> None:
    """Fail before a process is begun that there are no descriptors for: multiprocessing would lose some."""
    spare: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            spare.extend(os.pipe())
    except OSError as error:
        error.add_note("A worker takes about 6 descriptors in the main process: raise the limit (ulimit -n).")
        raise
    finally:
        for fd in spare:
            os.close(fd)


@contextlib.contextmanager
def _without_interrupts(context: Any) -> Iterator[None]:
    """Hold back Ctrl-C while a process is started, in this one and, until it has a handler, in the new one.

    A fork server would hold it back for ever, in all that it starts: there the process name has to do.
    """
    if not hasattr(signal, "pthread_sigmask") or context.get_start_method() == "forkserver":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Packed:
    """A worker's arguments whose pickle lies in a file that has no name, and not in the pipe.

    ``multiprocessing`` writes what it pickles to a pipe whose reading end it holds itself. What does not
    fit in the pipe's buffer (64 KiB) would be written for ever if the process died before it has read it.
    """

    def __init__(self, arguments: WorkerArguments) -> None:
        self._arguments = arguments
        self._fd = -1

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Now, and for each worker again: the descriptors in it are those of the process being started.
        self._fd = open_anonymous_file("shmloader-arguments")
        with os.fdopen(self._fd, "wb", closefd=False) as file:
            ForkingPickler(file, 5).dump(self._arguments)
        return _unpack, (Descriptor(self._fd),)

    def close(self) -> None:
        """Close the file, once the process has been given it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unpack(descriptor: Descriptor) -> WorkerArguments:
    with os.fdopen(descriptor.fd, "rb") as file:
        file.seek(0)
        arguments: WorkerArguments = pickle.load(file)
        return arguments


def _explain_start_failure(error: BaseException, context: Any) -> None:
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
        name = _defined_in_main(value, depth=4)
        if name is not None:
            raise WorkerStartError(
                f"{argument} uses {name!r}, which is defined in an interactive session (__main__): worker "
                f"processes started with {context.get_start_method()!r} cannot import it. Put it in a "
                "module file and import it from there, or pass multiprocessing_context='fork'."
            )


def _defined_in_main(value: object, depth: int) -> str | None:
    """Name of the first class or function of ``__main__`` that pickling ``value`` would refer to."""
    if value is None or depth == 0:
        return None
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    if getattr(named, "__module__", None) == "__main__":
        return str(getattr(named, "__qualname__", named))
    inner = list(getattr(value, "__dict__", {}).values()) if named is not value else []
    if isinstance(value, list | tuple):
        inner = list(value[:8])
    for item in inner:
        found = _defined_in_main(item, depth - 1)
        if found is not None:
            return found
    return None
