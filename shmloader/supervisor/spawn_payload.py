"""What workers that are started together are given: pickled once, for all of them.

``multiprocessing`` pickles what it gives a process anew for each, and writes it to a pipe whose reading end
it holds itself: what does not fit in the pipe's buffer (64 KiB) would be written for ever if the process died
before it has read it. So here the arguments are pickled into a file without a name, which all workers map
and unpickle; only a few numbers and descriptors go through the pipe. The memory of large arrays lies in a
second file. Workers map it copy-on-write, so an array is theirs to change and exists once until they do.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import pickle
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen
from types import TracebackType
from typing import Any, Self

import torch
import torch.multiprocessing

from shmloader.codec.layout import align
from shmloader.shared_memory import Descriptor, map_copy_on_write
from shmloader.supervisor import fork_server
from shmloader.supervisor.interface import MakeArguments
from shmloader.supervisor.launch import explain_start_failure
from shmloader.worker.loop import WorkerArguments

_LARGE_NBYTES = 64 << 10  # an array that is worth a place of its own
_OWNERS = frozenset({"numpy", "pyarrow"})  # whose objects take any buffer as their memory


class Parcel:
    """What workers that are started together are given; a context manager, left when all are started.

    Runs in the main process. What was pickled is forgotten at the end: a worker that is started later, in
    another's place, is given the dataset as it is then.

    Args:
        context: ``multiprocessing`` context or module.
        make_arguments: Makes a worker's arguments of its number, in which nothing else may differ.
    """

    def __init__(self, context: Any, make_arguments: MakeArguments) -> None:
        self._context = context
        self._make_arguments = make_arguments
        self._method: str = context.get_start_method()
        self._pickled: _Pickled | None = None

    def __enter__(self) -> Self:
        if self._method == "forkserver":
            arguments = self._make_arguments(0)
            fork_server.begin((arguments.dataset, arguments.rules, arguments.init_fn))
        if self._method != "fork":
            self._pickle(0)  # while the server imports
        if self._method == "forkserver":
            fork_server.wait_until_ready(self._context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()

    def for_worker(self, worker_id: int) -> Any:
        """What to start a worker's process with: its `WorkerArguments`, or what is unpickled as such."""
        if self._method == "fork":
            return self._make_arguments(worker_id)
        if self._pickled is None or (self._pickled.taken and self._pickled.for_one):
            self._pickle(worker_id)
        if self._pickled is None:
            raise AssertionError
        self._pickled.taken = True
        return _ForWorker(self._pickled, worker_id)

    @property
    def arrays_nbytes(self) -> int:
        """Bytes of large arrays, which the workers that are started with this share with nobody else."""
        pickled = self._pickled
        return os.fstat(pickled.arrays_fd).st_size if pickled is not None and pickled.arrays_fd >= 0 else 0

    def _pickle(self, worker_id: int) -> None:
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
            else:
                explain_start_failure(error, self._context)
            raise

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
            pickler = reduction.ForkingPickler(file, 5, True, goes_into_the_stream)
            self._watch_for_what_is_for_one(pickler)
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

    def _watch_for_what_is_for_one(self, pickler: reduction.ForkingPickler) -> None:
        """Torch counts, in a pickle, one receiver of an accelerator's memory or of a named file's."""
        table = pickler.dispatch_table
        sharing_strategy: Any = torch.multiprocessing.get_sharing_strategy

        def noting(reduce: Any) -> Any:
            def note_and_reduce(value: Any) -> Any:
                named = sharing_strategy() == "file_system"
                self.for_one |= named or value.device.type != "cpu"
                return reduce(value)

            return note_and_reduce

        for kind in (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage):
            if kind in table:
                table[kind] = noting(table[kind])

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


class _ForWorker:
    """Pickled for each process that is started, which unpickles `WorkerArguments`."""

    def __init__(self, pickled: _Pickled, worker_id: int) -> None:
        self._pickled = pickled
        self._worker_id = worker_id

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        pickled = self._pickled
        arrays = Descriptor(pickled.arrays_fd) if pickled.arrays_fd >= 0 else None
        passed = [reduction.DupFd(fd) for fd in pickled.passed]
        stream = Descriptor(pickled.stream_fd), pickled.stream_nbytes
        return _unpack, (self._worker_id, *stream, arrays, passed)


def _unpack(
    worker_id: int, stream: Descriptor, stream_nbytes: int, arrays: Descriptor | None, passed: list[Any]
) -> WorkerArguments:
    """In the worker: unpickle what `_Pickled` has written."""
    _received[:] = [duplicate.detach() for duplicate in passed]
    # Not read(): the workers share the file's position.
    stream_view = memoryview(mmap.mmap(stream.fd, 0, access=mmap.ACCESS_READ))
    os.close(stream.fd)
    places: list[_Place] = pickle.loads(stream_view[stream_nbytes:])
    buffers: list[memoryview] = []
    if arrays is not None:
        view = map_copy_on_write(arrays.fd, places[-1][1]).view
        os.close(arrays.fd)
        buffers = [view[begin:end] for begin, end in places]
    arguments: WorkerArguments = pickle.loads(stream_view, buffers=buffers)
    return dataclasses.replace(arguments, worker_id=worker_id)


class _Passed:
    """A descriptor among the arguments, as it travels in the pickle."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """In the worker: the descriptor, which is the caller's from now on."""
        return _received[self._number]


_received: list[int] = []  # in a worker, the descriptors that came with its arguments


class _Receiver:
    """What ``multiprocessing`` takes for the process that is being started, while the arguments are pickled.

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
