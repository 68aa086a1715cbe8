"""Row groups of Parquet files on any file system, read as a whole, several at the same time."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from torch.utils.data import get_worker_info

from shmloader.file_systems import FileSystem, file_system_of
from shmloader.memory.limits import cores
from shmloader.store.columns.records import Keys
from shmloader.store.files import checked_rows, files_of, naming
from shmloader.store.handles import Fingerprint
from shmloader.store.saving import PARQUET

_MOST_AT_ONCE = 8  # parts, or footers, that are read at the same time
_MOST_FOOTERS = 64  # that a process keeps

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def located(path: str, given: FileSystem | None) -> tuple[FileSystem, list[str]]:
    """The file system of a path or URL, and the files that it means there: one, a folder's or a pattern's."""
    filesystem, path = file_system_of(path, given)
    if filesystem.is_local:
        return filesystem, [str(Path(one).resolve()) for one in files_of(path)]
    kind = filesystem.opened.get_file_info(path).type  # first: a name or query may look like a pattern
    if kind == pa.fs.FileType.Directory:
        folder, name = path.rstrip("/"), "*"
    elif kind == pa.fs.FileType.File or not glob.has_magic(path):
        return filesystem, [path]
    else:
        folder, _, name = path.rpartition("/")
        if glob.has_magic(folder):
            raise ValueError(f"{path}: only the last part of a path that is not local may be a pattern")
    listed = filesystem.opened.get_file_info(pa.fs.FileSelector(folder))
    found = sorted(one.path for one in listed if one.is_file and fnmatch.fnmatchcase(one.base_name, name))
    found = [one for one in found if name != "*" or one.endswith(PARQUET)]
    if not found:
        raise FileNotFoundError(f"{path} matches no Parquet file")
    return filesystem, found


class RowGroups:
    """The row groups of some Parquet files, in the order of the files.

    Pickled by paths and counts. Footers are read again by each process.

    Attributes:
        schema: The fields that are read, as the first file has them.
        form: See `form_of`.
        starts: The first row of each row group, and the number of rows.
        nbytes: Of each row group, as its footer has it: before compression, of all columns.
    """

    def __init__(
        self, paths: list[str], filesystem: FileSystem, columns: Sequence[str] | None, allow_pickle: bool
    ) -> None:
        self._paths, self._filesystem, self._columns = paths, filesystem, columns
        self._footers: dict[int, Any] = {}
        self._identities: dict[int, Fingerprint] = {}
        schemas: dict[str, Any] = {}
        groups: list[list[tuple[int, int]]] = []
        for path, (schema, found) in zip(paths, _at_once(self._looked_at, range(len(paths))), strict=True):
            schemas[path] = schema
            groups.append(found)
        self.form = checked_rows(paths, schemas.__getitem__, columns, allow_pickle=allow_pickle)
        names = None if columns is None else {*columns, Keys.NAME}
        fields = [field for field in schemas[paths[0]] if names is None or field.name in names]
        self.schema = pa.schema(fields, schemas[paths[0]].metadata)
        self._firsts = [0, *accumulate(map(len, groups))]
        self.starts = [0, *accumulate(rows for rows, _ in chain.from_iterable(groups))]
        self.nbytes = [nbytes for _, nbytes in chain.from_iterable(groups)]

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling, without footers."""
        return vars(self) | {"_footers": {}}

    def rows(self, group: int) -> range:
        """The rows of a row group."""
        return range(self.starts[group], self.starts[group + 1])

    def name(self, groups: Sequence[int]) -> str:
        """The file that some row groups are in, and their numbers there."""
        file = self._file_of(groups[0])
        numbers = ", ".join(str(group - self._firsts[file]) for group in groups)
        return f"{self._paths[file]}, row group{'s' * (len(groups) > 1)} {numbers}"

    def read(self, groups: Sequence[int]) -> list[tuple[list[int], list[Any]]]:
        """Read some row groups, which ascend: those that were read with one call, and their batches, checked.

        ValueError if a file is damaged, with the row group; LoaderError if it was changed.
        """
        parts = self._parts(groups)
        return list(zip(parts, _at_once(self._batches, parts), strict=True))

    def _parts(self, groups: Sequence[int]) -> list[list[int]]:
        """Row groups of one file each, in about as many parts as are to be read at the same time.

        From a local disk these are as many as this worker has cores: what takes time there is the decoding,
        which is quicker in one go.
        """
        at_once = min(_MOST_AT_ONCE, len(groups))
        if at_once > 1 and self._filesystem.is_local:
            worker = get_worker_info()
            at_once = min(at_once, max(1, cores().usable // (worker.num_workers if worker else 1)))
        most = -(-len(groups) // at_once)
        by_file = [list(some) for _, some in groupby(groups, self._file_of)]
        return [some[at : at + most] for some in by_file for at in range(0, len(some), most)]

    def _file_of(self, group: int) -> int:
        return bisect_right(self._firsts, group) - 1

    def _batches(self, groups: list[int]) -> list[Any]:
        file = self._file_of(groups[0])
        chosen = None if self._columns is None else [*self._columns, Keys.NAME]
        try:
            with self._open(file, self.name(groups)) as source:
                # Buffered before: all columns in a few large requests at the same time.
                parquet = pq.ParquetFile(source, metadata=self._footers.get(file), pre_buffer=True)
                self._keep_footer(file, parquet.metadata)
                numbers = [group - self._firsts[file] for group in groups]
                table = parquet.read_row_groups(numbers, columns=chosen, use_threads=False)
                rows = sum(len(self.rows(group)) for group in groups)
                if len(table) != rows:
                    raise ValueError(f"it has {len(table):,} rows, and {rows:,} by the footer")
                batches: list[Any] = table.to_batches()
                for batch in batches:
                    batch.validate(full=True)
        except (ValueError, OSError):
            for group in groups if len(groups) > 1 else ():
                self._batches([group])  # the damaged one raises an error that names it
            raise
        return batches

    def _looked_at(self, file: int) -> tuple[Any, list[tuple[int, int]]]:
        """The schema of a file, and rows and bytes of its row groups."""
        with self._open(file, self._paths[file]) as source:
            parquet = pq.ParquetFile(source)
            footer = parquet.metadata
            self._keep_footer(file, footer)
            groups = map(footer.row_group, range(footer.num_row_groups))
            found = [(group.num_rows, group.total_byte_size) for group in groups]
            if found and min(min(one) for one in found) < 0:
                raise ValueError("its footer has row groups with less than no rows, or bytes")
            return parquet.schema_arrow, found

    def _keep_footer(self, file: int, footer: Any) -> None:
        if file not in self._footers and len(self._footers) >= _MOST_FOOTERS:
            self._footers = {}  # also while another thread reads: none may expect to find its own
        self._footers[file] = footer

    @contextlib.contextmanager
    def _open(self, file: int, name: str) -> Iterator[Any]:
        """A file that is open meanwhile; errors name it, or what is read of it."""
        path, is_local = self._paths[file], self._filesystem.is_local
        with naming(name, is_remote=not is_local), self._filesystem.opened.open_input_file(path) as source:
            now = Fingerprint.of(path) if is_local else Fingerprint(source.size(), 0, 0)
            self._identities.setdefault(file, now).check(now, path)
            yield source


def _at_once(function: Callable[[_Item], _Found], items: Sequence[_Item]) -> list[_Found]:
    """A function of some items, by threads that end with the call: none is there when a process is forked."""
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(items))) as threads:
        return list(threads.map(function, items))
