"""The arguments of workers that are started together, pickled once for all of them.

``multiprocessing`` pickles what it gives a process anew for each, and writes it to a pipe whose reading end
it holds itself: what does not fit in the pipe's buffer (64 KiB) would be written for ever if the process died
before it has read it. So the arguments are pickled into a file without a name, which all workers map and
unpickle; only a few numbers and descriptors go through the pipe. The memory of large arrays lies in a
second file. Workers map it copy-on-write, so an array is theirs to change and exists once until they do.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen
from types import FunctionType, TracebackType
from typing import Any, Self

import torch
import torch.multiprocessing

from shmloader.codec.layout import align
from shmloader.errors import WorkerStartError
from shmloader.shared_memory import Descriptor, map_copy_on_write
from shmloader.supervisor.base import MakeArguments
from shmloader.supervisor.mapped_arrays import MappedArrayReducers
from shmloader.worker.loop import WorkerArguments

_LARGE_NBYTES = 64 << 10  # an array that is worth a place of its own
_OWNERS = frozenset({"numpy", "pyarrow"})  # whose objects take any buffer as their memory


class SpawnPayload:
    """The arguments of workers that are started together; a context manager, left when all are started.

    Runs in the main process. What was pickled is forgotten at the end: a worker that is started later, in
    another's place, is given the dataset as it is then.

    Args:
        method: The start method.
        make_arguments: Makes a worker's arguments of its number, in which nothing else may differ.
    """

    def __init__(self, method: str, make_arguments: MakeArguments) -> None:
        self._make_arguments = make_arguments
        self._method = method
        self._pickled: _Pickled | None = None

    def __enter__(self) -> Self:
        if self._method != "fork":
            self._pickle(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()

    def for_worker(self, worker_id: int) -> Any:
        """The object to start a worker's process with, for `take_arguments`."""
        if self._method == "fork":
            return self._make_arguments(worker_id)
        pickled = self._pickled
        if pickled is None or (pickled.taken and pickled.for_one):
            pickled = self._pickle(worker_id)
        pickled.taken = True
        arrays = Descriptor(pickled.arrays_fd) if pickled.arrays_fd >= 0 else None
        return _Sent(
            worker_id, Descriptor(pickled.stream_fd), pickled.stream_nbytes, arrays, list(pickled.passed)
        )

    @property
    def arrays_nbytes(self) -> int:
        """Bytes of large arrays, which the workers that are started with this share with nobody else."""
        pickled = self._pickled
        return os.fstat(pickled.arrays_fd).st_size if pickled is not None and pickled.arrays_fd >= 0 else 0

    def _pickle(self, worker_id: int) -> _Pickled:
        self._forget()
        try:
            self._pickled = _Pickled(self._make_arguments(worker_id))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC, errno.ENOMEM):
                error.add_note(
                    "What workers are given is written to a file without a name, as large as its pickle: "
                    "lift the limit on the size of files (ulimit -f), free memory, or use "
                    "multiprocessing_context='fork'."
                )
            elif not isinstance(error, WorkerStartError):
                error.add_note(
                    f"A shmloader worker could not be started with start method {self._method!r}, which "
                    "pickles the dataset, collate_fn and worker_init_fn. Use classes and functions defined "
                    "at the top of a module (no lambdas), or multiprocessing_context='fork'."
                )
            raise
        return self._pickled

    def _forget(self) -> None:
        pickled, self._pickled = self._pickled, None
        if pickled is not None:
            pickled.close()


class _Pickled:
    """Arguments in files of the main process.

    Attributes:
        stream_fd: The pickle, and behind it that of `_Place`s.
        stream_nbytes: Where that one begins.
        arrays_fd: The memory of large arrays, or -1.
        passed: Descriptors that are part of the arguments. They are their owners', which live until `close`.
        for_one: Whether only one process may unpickle it.
        taken: Whether one was given it.
    """

    def __init__(self, arguments: WorkerArguments) -> None:
        self.stream_nbytes = 0
        self.arrays_fd = self.stream_fd = -1
        self.passed: list[int] = []
        self.for_one = self.taken = False
        self._alive: Any = None
        try:
            self.stream_fd = os.memfd_create("shmloader-arguments")
            self._write(arguments)
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        # A Ctrl-C may have cut its making short; at the interpreter's end this module's names may be gone.
        try:  # noqa: SIM105
            self.close()
        except (AttributeError, OSError):
            pass

    def _write(self, arguments: WorkerArguments) -> None:
        large: list[memoryview] = []

        def goes_into_the_stream(buffer: pickle.PickleBuffer) -> bool:
            view = memoryview(buffer)
            owner = type(view.obj).__module__.partition(".")[0]
            if view.nbytes < _LARGE_NBYTES or owner not in _OWNERS:
                return True
            large.append(buffer.raw())
            return False

        with os.fdopen(self.stream_fd, "wb", closefd=False) as file:
            kind = _InteractivePickler if _main_is_interactive() else reduction.ForkingPickler
            pickler = kind(file, 5, True, goes_into_the_stream)
            table = pickler.dispatch_table
            table.update(self._noting_what_is_for_one(table))
            table.update(MappedArrayReducers().table())
            # For what is only pickled to a process that is being started, and for its descriptors.
            receiver: Any = _Receiver(self.passed)
            set_spawning_popen(receiver)
            try:
                pickler.dump(arguments)
            finally:
                set_spawning_popen(None)
            self.stream_nbytes = file.tell()
            pickle.dump(self._write_arrays(large), file)
        self._alive = pickler  # and with it what was made only to be pickled

    def _noting_what_is_for_one(self, table: Any) -> dict[type, Callable[[Any], Any]]:
        """Torch's reducers. It counts one receiver for an accelerator's memory, and for a named file's."""

        def noting(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def note_and_reduce(value: Any) -> Any:
                named = torch.multiprocessing.get_sharing_strategy() == "file_system"  # type: ignore[no-untyped-call]
                self.for_one |= named or value.device.type != "cpu"
                return reduce(value)

            return note_and_reduce

        kinds = (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage)
        return {kind: noting(table[kind]) for kind in kinds if kind in table}

    def _write_arrays(self, views: list[memoryview]) -> list[_Place]:
        if not views:
            return []
        places: list[_Place] = []
        end = 0
        self.arrays_fd = os.memfd_create("shmloader-arrays")
        with os.fdopen(self.arrays_fd, "wb", closefd=False) as file:
            for view in views:
                begin = align(end)
                end = begin + view.nbytes
                file.seek(begin)
                file.write(view)
                places.append((begin, end))
        return places

    def close(self) -> None:
        """Close the files, once the processes have been given them."""
        for fd in (self.stream_fd, self.arrays_fd):
            if fd >= 0:
                os.close(fd)
        self.stream_fd = self.arrays_fd = -1
        self._alive = None


_Place = tuple[int, int]
"""Where the memory of an array begins and ends, in bytes. Whether it is read-only, the pickle knows."""


def _main_is_interactive() -> bool:
    main = sys.modules.get("__main__")
    return main is not None and getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")


class _InteractivePickler(reduction.ForkingPickler):
    """Refuses what a worker cannot import: classes and functions of an interactive ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise WorkerStartError(
                f"the dataset, collate_fn or worker_init_fn uses {value.__qualname__!r}, which is defined "
                "in an interactive session (__main__): worker processes started with 'spawn' or 'forkserver' "
                "cannot import it. Put it in a module file and import it from there, or pass "
                "multiprocessing_context='fork'."
            )
        return NotImplemented


@dataclasses.dataclass
class _Sent:
    """The part of a worker's arguments that goes through its pipe while it is started; see `_Pickled`."""

    worker_id: int
    stream: Descriptor
    stream_nbytes: int
    arrays: Descriptor | None
    passed: list[Any]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"passed": [reduction.DupFd(fd) for fd in self.passed]}


def take_arguments(given: Any) -> WorkerArguments:
    """In the worker: its arguments, unpickled if they were pickled, which imports the dataset's modules.

    Args:
        given: What `SpawnPayload.for_worker` returned, as it has arrived.
    """
    if not isinstance(given, _Sent):
        arguments: WorkerArguments = given
        return arguments
    _received[:] = [duplicate.detach() for duplicate in given.passed]
    # Not read(): the workers share the file's position.
    stream_view = memoryview(mmap.mmap(given.stream.fd, 0, access=mmap.ACCESS_READ))
    os.close(given.stream.fd)
    places: list[_Place] = pickle.loads(stream_view[given.stream_nbytes :])
    buffers: list[memoryview] = []
    if given.arrays is not None:
        view = map_copy_on_write(given.arrays.fd, places[-1][1]).view
        os.close(given.arrays.fd)
        buffers = [view[begin:end] for begin, end in places]
    arguments = pickle.loads(stream_view, buffers=buffers)
    return dataclasses.replace(arguments, worker_id=given.worker_id)


class _Passed:
    """A descriptor among the arguments, as it travels in the pickle."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """In the worker: the descriptor, which is the caller's from now on."""
        return _received[self._number]


_received: list[int] = []  # in a worker, the descriptors that came with its arguments


class _Receiver:
    """Stands for the process being started, while the arguments are pickled.

    ``multiprocessing.reduction.DupFd`` asks it to pass a descriptor. Which number that has in a process is
    known when that one is started. In the pickle, which is for all, it is a place in a list.
    """

    DupFd = _Passed

    def __init__(self, passed: list[int]) -> None:
        self._passed = passed

    def duplicate_for_child(self, fd: Any) -> int:
        """Note a descriptor, or what has one; gives its place."""
        self._passed.append(fd if isinstance(fd, int) else fd.fileno())
        return len(self._passed) - 1
