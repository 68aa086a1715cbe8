"""The arguments of workers that are started together, pickled once for all of them.

``multiprocessing`` pickles the arguments again for each process, to a pipe whose reading end it holds itself:
if the process dies early and the pickle is larger than the pipe's buffer, that write never ends. So the
arguments are pickled once into a file without a name, which all workers map, and only a few numbers and
descriptors go through the pipe. Large arrays lie in a second file, mapped copy-on-write: each is in memory
once until it is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing

from shmloader.codec.layout import align
from shmloader.errors import LoaderError, WorkerStartError
from shmloader.memory import Descriptor
from shmloader.memory.mapping import map_copy_on_write
from shmloader.store_hooks import hooks
from shmloader.worker.loop import WorkerArguments
from shmloader.workers.base import MakeArguments

_LARGE_NBYTES = 64 << 10  # an array that is worth a place of its own
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError, WorkerStartError)  # of a lambda, say


class SpawnPayload:
    """The arguments of workers that are started together by ``spawn`` or ``forkserver``. Main process.

    They are the same but for a worker's number. It is closed when all are started: a worker that starts later
    gets the dataset as it is then.
    """

    def __init__(self, method: str, make_arguments: MakeArguments) -> None:
        # Bytes of large arrays, which only the workers started with this payload share.
        self.arrays_nbytes = 0
        self._method = method
        self._make_arguments = make_arguments
        self._stream = Descriptor(-1)  # the pickle, followed by the pickle of `_Place`s
        self.pickled_nbytes = 0
        self._stream_nbytes = 0  # where the second one begins
        self._arrays = Descriptor(-1)  # the memory of large arrays
        self._passed: list[int] = []  # descriptors among the arguments, which belong to their owners
        self._for_one = False  # whether only one process may unpickle it
        self._taken = False  # whether one was given it
        self._pickler: Any = None  # keeps objects alive that were made only to be pickled
        self._pickle()

    def __del__(self) -> None:
        # A Ctrl-C may have cut `__init__` short; at the interpreter's end this module's names may be gone.
        try:  # noqa: SIM105
            self.close()
        except (AttributeError, OSError):
            pass

    def for_worker(self, worker_id: int) -> Any:
        """The object to start a worker's process with, for `take_arguments`."""
        if self._taken and self._for_one:
            self._pickle()
        self._taken = True
        arrays = self._arrays if self._arrays.fd >= 0 else None
        passed = list(map(Descriptor, self._passed))
        return _Sent(worker_id, self._stream, self._stream_nbytes, arrays, passed)

    def _pickle(self) -> None:
        arguments = self._make_arguments(0)  # each worker puts its own number in
        kind: Any = reduction.ForkingPickler
        try:
            try:
                self._write(arguments, kind)
            except _REFUSALS:
                from shmloader.workers.unpicklable import by_value_pickler

                if (by_value := by_value_pickler(main_is_file=not _is_interactive())) is None:
                    raise
                kind = by_value
                try:
                    self._write(arguments, kind)
                except Exception as error:
                    raise error from None  # the first one may be about a lambda, which is no longer refused
        except Exception as error:
            code = error.errno if isinstance(error, OSError) else None
            if code in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):  # torch's words
                error.add_note(
                    "Each tensor of the dataset takes a descriptor while workers start: raise the limit "
                    "(ulimit -n), call torch.multiprocessing.set_sharing_strategy('file_system'), share the "
                    "dataset (share_dataset=True), or use multiprocessing_context='fork'."
                )
            elif code in (errno.EFBIG, errno.ENOSPC, errno.ENOMEM):
                error.add_note(
                    "The pickle for the workers is written to a file without a name, as large as the pickle: "
                    "lift the limit on the size of files (ulimit -f), free memory, or use "
                    "multiprocessing_context='fork'."
                )
            elif not isinstance(error, LoaderError):
                advice = self._name_refused(arguments, kind)
                error.add_note(
                    f"A shmloader worker could not be started with start method {self._method!r}, which "
                    f"pickles the dataset, collate_fn and worker_init_fn. {advice} Or pass "
                    "multiprocessing_context='fork'."
                )
            self.close()
            raise

    def _name_refused(self, arguments: WorkerArguments, kind: Any) -> str:
        """A sentence on the part of the arguments that cannot be pickled."""
        nowhere = SimpleNamespace(write=len)

        def dump(value: Any) -> None:
            self._dump(value, kind, nowhere, [], lambda _: False)

        told = ""
        with contextlib.suppress(Exception):  # looking runs the program's own methods once more
            from shmloader.workers.unpicklable import describe_refused

            told = describe_refused(arguments, dump, by_value=kind is not reduction.ForkingPickler)
        return told or "Use classes and functions defined at the top of a module (no lambdas)."

    def _write(self, arguments: WorkerArguments, kind: Any) -> None:
        self.close()
        self._stream = Descriptor(os.memfd_create("shmloader-arguments"))
        large: list[memoryview] = []
        # Whose objects take any buffer as their memory.
        owners = np.ndarray, getattr(sys.modules.get("pyarrow"), "Buffer", np.ndarray)

        def goes_into_the_stream(buffer: pickle.PickleBuffer) -> bool:
            view = memoryview(buffer)
            if view.nbytes < _LARGE_NBYTES or not isinstance(view.obj, owners):
                return True
            large.append(buffer.raw())
            return False

        with os.fdopen(self._stream.fd, "wb", closefd=False) as file:
            self._dump(arguments, kind, file, self._passed, goes_into_the_stream)
            self._stream_nbytes = self.pickled_nbytes = file.tell()
            places: list[_Place] = []
            if large:
                self._arrays = Descriptor(os.memfd_create("shmloader-arrays"))
                with os.fdopen(self._arrays.fd, "wb", closefd=False) as arrays:
                    for view in large:
                        begin = align(self.arrays_nbytes)
                        self.arrays_nbytes = begin + view.nbytes
                        arrays.seek(begin)
                        arrays.write(view)
                        places.append((begin, self.arrays_nbytes))
            pickle.dump(places, file)

    def _dump(self, value: Any, kind: Any, file: Any, passed: list[int], callback: Any) -> None:
        """Pickle to a file; ``callback`` is told of buffers, ``passed`` gets the descriptors of handles."""
        if kind is reduction.ForkingPickler and _is_interactive():
            kind = _InteractivePickler
        self._pickler = kind(file, 5, True, callback)
        table = self._pickler.dispatch_table
        for type_ in (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage):
            if type_ in table:
                table[type_] = functools.partial(self._reduce_as_torch, table[type_])
        table[np.ndarray] = table[np.memmap] = functools.partial(_reduce_array, hooks.make_array_reducer())
        # For objects that can only be pickled to a process that is being started, and for their descriptors.
        receiver: Any = _Receiver(passed)
        set_spawning_popen(receiver)
        try:
            self._pickler.dump(value)
        finally:
            set_spawning_popen(None)

    def _reduce_as_torch(self, reduce: Callable[[Any], Any], value: Any) -> Any:
        """Reduce as torch does; notes memory that torch counts for one receiver, as an accelerator's."""
        named = torch.multiprocessing.get_sharing_strategy() == "file_system"  # type: ignore[no-untyped-call]
        self._for_one |= named or value.device.type != "cpu"
        return reduce(value)

    def close(self) -> None:
        """Close the files, once the processes have been given them."""
        self._stream.close()
        self._arrays.close()
        self._passed.clear()
        self._for_one = self._taken = False
        self.arrays_nbytes = 0
        self._pickler = None


def _reduce_array(reduce_by_handle: Callable[[Any], Any], array: Any) -> Any:
    """Reduce an array: one in shared memory or a mapped file is sent by handle.

    Else it arrives as with torch, by pickle's default protocol: before protocol 5 writable, of this machine's
    byte order, and contiguous.
    """
    as_before = pickle.DEFAULT_PROTOCOL < 5
    swapped = as_before and array.dtype.byteorder not in "=|"
    reduced = None if swapped else reduce_by_handle(array)
    if reduced is not None:
        return reduced
    if type(array) is np.memmap:  # its own pickle would hold the contents once for each worker
        return np.ndarray.view, (np.asarray(array), np.memmap)
    if as_before and not array.dtype.hasobject:
        order: Any = "F" if array.flags.fnc else "C"
        if not array.flags.writeable:
            seen = array.__array_interface__
            seen = seen | {"data": (seen["data"][0], False)}
            array = np.asarray(SimpleNamespace(array=array, __array_interface__=seen)).view(array.dtype)
        array = np.asarray(array, array.dtype.newbyteorder("=") if swapped else None, order)
    return array.__reduce_ex__(5)


_Place = tuple[int, int]
"""Begin and end of an array's memory, in bytes. The pickle knows whether the array is read-only."""


def _is_interactive() -> bool:
    """Whether the program's ``__main__`` is no file, which workers could import."""
    main: Any = sys.modules.get("__main__")
    return bool(main) and getattr(main, "__spec__", None) is None and not hasattr(main, "__file__")


class _InteractivePickler(reduction.ForkingPickler):
    """Refuses what a worker cannot import: classes and functions of an interactive ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise WorkerStartError(
                f"the dataset, collate_fn or worker_init_fn uses {value.__qualname__!r}, which is defined "
                "in an interactive session (__main__): worker processes started with 'spawn' or 'forkserver' "
                "cannot import it. Put it in a module file and import it from there, install cloudpickle "
                "(which sends it by value), or pass multiprocessing_context='fork'."
            )
        return NotImplemented


class _Sent(NamedTuple):
    """The part of a worker's arguments that goes through its pipe while it is started."""

    worker_id: int
    stream: Descriptor
    stream_nbytes: int
    arrays: Descriptor | None
    passed: list[Descriptor]


def take_arguments(given: Any) -> WorkerArguments:
    """Unpickle a worker's arguments, in the worker: this imports the dataset's modules."""
    if isinstance(given, WorkerArguments):  # forked, with all its arguments
        return given
    _received[:] = [descriptor.fd for descriptor in given.passed]
    # Not read(): the workers share the file's position.
    stream_view = memoryview(mmap.mmap(given.stream.fd, 0, access=mmap.ACCESS_READ))
    os.close(given.stream.fd)
    places: list[_Place] = pickle.loads(stream_view[given.stream_nbytes :])
    buffers: list[memoryview] = []
    if given.arrays is not None:
        view = map_copy_on_write(given.arrays.fd, places[-1][1]).view
        os.close(given.arrays.fd)
        buffers = [view[begin:end] for begin, end in places]
    arguments: WorkerArguments = pickle.loads(stream_view, buffers=buffers)
    return dataclasses.replace(arguments, worker_id=given.worker_id)


class _Passed(NamedTuple):
    """A descriptor among the arguments, as it travels in the pickle: its place in the list of them."""

    place: int

    def detach(self) -> int:
        """The descriptor, in the worker; from now on the caller owns it."""
        return _received[self.place]


_received: list[int] = []  # in a worker, the descriptors that came with its arguments


class _Receiver:
    """Stands for the process being started: ``multiprocessing.reduction.DupFd`` passes descriptors to it.

    A descriptor gets its number in a process when that is started; in the pickle it is a place in a list.
    """

    DupFd = _Passed

    def __init__(self, passed: list[int]) -> None:
        self._passed = passed

    def duplicate_for_child(self, fd: Any) -> int:
        """Note a descriptor, or an object with one, and return its place."""
        self._passed.append(fd if isinstance(fd, int) else fd.fileno())
        return len(self._passed) - 1
