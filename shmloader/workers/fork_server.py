"""The fork server of start method ``forkserver``, started with torch and this package imported.

A module that the server has imported stays the same in all later workers of the program, even if its file was
edited since. So the server imports torch, shmloader and the modules that the program chose, and no module of
a dataset.
"""

from __future__ import annotations

from multiprocessing import forkserver

_PRELOADED = ["torch", "shmloader"]
_DEFAULT = ["__main__"]  # multiprocessing's, which imports the program's script and with it its modules


def begin() -> None:
    """Start the fork server, unless it runs already. Returns at once, while the server imports.

    A server that the program has started before is left as it is, and one that is to import nothing
    (``multiprocessing.set_forkserver_preload([])``) imports nothing.
    """
    chosen = _chosen_by_program()
    if not chosen:
        return
    forkserver.set_forkserver_preload([*(chosen if chosen != _DEFAULT else []), *_PRELOADED])
    try:
        forkserver.ensure_running()
    finally:
        forkserver.set_forkserver_preload(chosen)


def _chosen_by_program() -> list[str] | None:
    """The list of ``set_forkserver_preload``, which has no getter; None if this Python has it elsewhere."""
    server = getattr(forkserver.set_forkserver_preload, "__self__", None)
    chosen = getattr(server, "_preload_modules", None)
    return None if chosen is None else list(chosen)
