"""`open_store`: files as stores. What it takes to read them is imported when the first one is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def open_store(path: str | os.PathLike[str]) -> Any:
    """Open a file as a store, read-only.

    * Arrow IPC (``.arrow``, ``.feather``; file and stream format): mapped. Nothing is read until it is
      needed, all processes of the host share the pages that were, and the kernel may drop them again: the
      file may be larger than memory. If its buffers are compressed, they are unpacked into shared memory.
    * What ``store.save(path)`` wrote: the same, and the store equals the one that was saved, for every kind
      of store. Kinds that Arrow has no types for are unpickled: open such files only from sources that you
      trust, as with ``torch.load``.
    * Parquet: decoded into shared memory, piece by piece.

    Runs in the calling process. Stores over mapped files reach workers by path, under every start method;
    the file must not be changed in place meanwhile (write a new one and rename it, as ``save`` does).

    Args:
        path: The file. Its contents decide, not its name.

    Returns:
        The store. The rows of a table are dicts.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is neither Arrow IPC nor Parquet.
        SharedMemoryExhausted: If what must be unpacked is larger than the host's memory.
    """
    from shmloader.store.mapped_files import open_file

    return open_file(str(Path(path).resolve()))
