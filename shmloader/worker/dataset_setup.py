"""A dataset's ``worker_setup(info)`` and ``worker_teardown()``: files and clients opened where they are used.

Called in each worker process or thread; without workers, in the program's own process around each pass.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from shmloader import torch_private
from shmloader.failures.exceptions import add_note, drop_notes
from shmloader.indices.samplers import attribute_of
from shmloader.worker.epoch_settings import owners_in

_SETUP, _TEARDOWN = "worker_setup", "worker_teardown"
_logger = logging.getLogger(__name__)


class _Holders:
    """Counts of the `DatasetSetup` of this process that hold each object that is set up."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by the object's identity; whoever holds it keeps it alive
        # Taken while an object is set up, so that others wait until it is. A garbage collection in the
        # program's method may end another pass.
        self._lock = threading.RLock()

    def take(self, owner: Any, info: Any) -> None:
        with self._lock:
            self._counts[id(owner)] = count = self._counts.get(id(owner), 0) + 1
            if count == 1:
                try:
                    _call(owner, _SETUP, info)
                except BaseException:
                    del self._counts[id(owner)]
                    raise

    def leave(self, owner: Any) -> None:
        with self._lock:
            self._counts[id(owner)] -= 1
            if not self._counts[id(owner)]:
                del self._counts[id(owner)]
                _call(owner, _TEARDOWN)

    def begin_anew(self) -> None:
        """Forget all, in a forked process: what its parent has set up is not set up here."""
        self._counts.clear()
        self._lock = threading.RLock()  # a thread of the parent may have held the other one


_holders = _Holders()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_holders.begin_anew)


class DatasetSetup:
    """The objects that one worker, or one pass without workers, has set up: the outermost with the methods.

    Threads, and passes in one process, may share an object: the first sets it up, the last tears it down.
    """

    def __init__(self) -> None:
        self._owners: list[Any] = []  # in the order in which they were set up
        self._pid = os.getpid()
        self._begun = False

    def begin(self, info: Any) -> None:
        """Call ``worker_setup(info)`` unless that is done; if one raises, the others are torn down."""
        if self._begun:
            return
        try:
            for owner in owners_in(info.dataset, _has_methods):
                _holders.take(owner, info)
                self._owners.append(owner)
            self._begun = True
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Call ``worker_teardown()`` where nobody else holds the object; an exception of it is logged.

        In a process that was forked meanwhile nothing is called: its copies are of the parent's objects.
        """
        owners, self._owners, self._begun = self._owners, [], False
        if os.getpid() != self._pid:
            return
        for owner in reversed(owners):
            try:
                _holders.leave(owner)
            except Exception:
                where = f"process {self._pid}, {threading.current_thread().name}"
                _logger.exception("%s.%s() failed in %s", type(owner).__qualname__, _TEARDOWN, where)


def setup_methods_of(dataset: Any) -> list[str]:
    """The names of those of the methods that a dataset has."""
    owners = owners_in(dataset, _has_methods)
    names = [name for name in (_SETUP, _TEARDOWN) if any(callable(attribute_of(one, name)) for one in owners)]
    return [f"the dataset's {name}()" for name in names]


def info_without_workers(dataset: Any) -> Any:
    """The argument of ``worker_setup`` without workers: the info of worker 0 of 1."""
    return torch_private.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=dataset)


@contextlib.contextmanager
def set_up(dataset: Any) -> Iterator[None]:
    """Set a dataset up in this process meanwhile."""
    setup = DatasetSetup()
    setup.begin(info_without_workers(dataset))
    try:
        yield
    finally:
        setup.end()


def _has_methods(one: Any) -> bool:
    return any(callable(attribute_of(one, name)) for name in (_SETUP, _TEARDOWN))


def _call(owner: Any, name: str, *arguments: Any) -> None:
    method = attribute_of(owner, name)
    if not callable(method):
        return
    began_ns = time.perf_counter_ns()
    try:
        method(*arguments)
    except Exception as error:
        drop_notes(error, began_ns)
        add_note(error, f"raised by {type(owner).__qualname__}.{name}()")
        raise
