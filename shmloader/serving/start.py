"""`serve`, which takes a loader and a name, and serves until all is over."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from shmloader.memory.mapping import check_memory
from shmloader.serving import meeting
from shmloader.serving.connection import Connection
from shmloader.serving.roster import Policy, Roster
from shmloader.serving.server import MOST_WINDOW, WINDOW, Server
from shmloader.serving.source import Source

_log = logging.getLogger(__name__)


def serve(
    loader: Any,
    name: str,
    *,
    readers: int | None = None,
    window: int = WINDOW,
    policy: Policy = "wait",
    epochs: int | None = None,
    job: str | None = None,
) -> None:
    """Serve the batches of a loader to other processes of this host, which `attach` to the name.

    Each batch is made once, lies in shared memory once, and goes to every reader that is in the epoch; its
    memory is used again when the last of them has let it go. This call iterates over the loader in this
    process, as a training program does, and returns when it is over: see ``readers`` and ``epochs``. Ctrl-C
    ends it like any program; readers then get an error that says so, and after SIGTERM and SIGKILL one that
    names the process. Nothing is left behind however it ends. See docs/serving.md.

    An epoch begins when all readers that took part in the last one ask for it, by ``iter()``.

    Args:
        loader: A `DataLoader`, any loader of torch's class, or what wraps one; without ``pin_memory`` and
            ``device``, which are arguments of `attach`.
        name: Up to 64 bytes. Processes of the same user find the loader by it.
        readers: The number of readers, which go in step: the first epoch waits for all of them, and each gets
            each batch. Further ones are refused. The call returns when all have come and left. None: any
            number, which may come and go at any time; the call returns after ``epochs``.
        window: Most batches, 1 to 32, that are made for a reader beyond the one that it has.
        policy: What happens when the fastest reader waits for one that has not taken so many: ``"wait"``, it
            goes on waiting; ``"drop"``, the slow one is let go with a `LoaderClosed`. So is one for which
            others wait at an epoch's end, once nothing has happened for 60 s.
        epochs: Most epochs to serve; None for any number. The call returns when readers have left after that.
        job: A text that stands for the run, if processes of different runs are to read one loader. Without
            it, ranks of another run than this one are refused.

    Raises:
        LoaderError: If another process serves that name, or this platform has no abstract sockets.
        TypeError: If it is no loader.
        ValueError: For wrong arguments.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(
            f"serve takes a loader, and not a {type(loader).__name__}: pass a shmloader.DataLoader"
        )
    if getattr(loader, "pin_memory", False) or str(getattr(loader, "device", None)) not in ("None", "cpu"):
        raise ValueError(
            "a loader that is served has neither pin_memory nor device, since another process reads its "
            "batches: pass them to attach"
        )
    if not 1 <= window <= MOST_WINDOW:
        raise ValueError(f"window is 1 to {MOST_WINDOW} batches, and got {window}")
    if policy not in ("wait", "drop"):
        raise ValueError(f'policy is "wait" or "drop", and got {policy!r}')
    if readers is not None and readers < 1:
        raise ValueError(f"readers is 1 or more, or None, and got {readers}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is 1 or more, or None, and got {epochs}")
    run_server(loader, name, Roster(readers, window, policy), meeting.introduction(job), epochs)


def run_server(
    loader: Any, name: str, roster: Roster[Connection], about: dict[str, Any], epochs: int | None = None
) -> None:
    """Serve, and end: `serve` with checked arguments, and an introduction of this process."""
    check_memory("a loader cannot be served", "Make one in each process")
    listener = meeting.listen(name)
    why = f"process {os.getpid()}, which served {name!r}, has ended"
    with listener:
        server = Server(Source(loader), name, roster, about, listener)
        _log.info("serve %r: readers can attach now", name)
        try:
            server.run(epochs)
        except BaseException as error:
            why += f": {type(error).__name__}"
            raise
        finally:
            server.close(why)
