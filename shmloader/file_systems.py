"""File systems of Arrow's and fsspec's, by URLs, made anew in each process."""

from __future__ import annotations

import os
import pickle
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs


class FileSystem:
    """A file system of Arrow's or fsspec's, made anew in each process: its threads do not outlive a fork.

    Attributes:
        is_local: Whether it is that of the host.
    """

    def __init__(self, given: Any = None) -> None:
        """Wrap a file system; None for the local one."""
        local = pa.fs.LocalFileSystem()
        given = local if given is None else given
        if not isinstance(given, pa.fs.FileSystem):
            given = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(given))
        self.is_local = isinstance(given, pa.fs.LocalFileSystem)
        self._pickled = pickle.dumps(given)
        self._opened: tuple[int, Any] = os.getpid(), given

    @property
    def opened(self) -> Any:
        """Arrow's file system, of this process."""
        pid, opened = self._opened
        if pid != os.getpid():
            opened = pickle.loads(self._pickled)
            self._opened = os.getpid(), opened
        return opened


def file_system_of(path: str, filesystem: FileSystem | None) -> tuple[FileSystem, str]:
    """The file system of a path or URL, and the path there; with a given file system the path as it is."""
    if filesystem is None and "://" in path:
        url, _, name = path.rpartition("/")  # which may be a pattern, and a URL none
        if url.rstrip("/").endswith(":"):  # there is a scheme before it, and no folder
            url, name = path, ""
        try:
            opened, folder = pa.fs.FileSystem.from_uri(url)
            name = unquote(name)  # as Arrow has done with the folder
        except pa.ArrowInvalid:  # a scheme that Arrow does not know
            import fsspec

            opened, folder = fsspec.core.url_to_fs(url)
        return FileSystem(opened), folder if url == path else f"{folder.rstrip('/')}/{name}"
    return filesystem or FileSystem(), path
