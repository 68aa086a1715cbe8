"""Interrupts: Ctrl-C and other exceptions that come between any two instructions.

A signal handler that raises and an exception that another thread injects are of the same kind.
`HeldInterrupts` holds signal handlers back while they would leak a process or a descriptor. `Lifecycle` knows
whether one has cut ``next()`` short: then a batch may be lost, and the iterator must not continue as if
nothing had happened.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self, TypeVar

from shmloader.errors import LoaderClosed, LoaderError, NotReady

_Error = TypeVar("_Error", bound=BaseException)

_END_S = 5.0  # longer than the interpreter takes to end
_LEAVE_S = 1.0  # how long another thread may take to leave `next()` after the loader was closed


class HeldInterrupts:
    """A context manager that holds signal handlers back until its end, and then calls those that are due.

    Outside the main thread it does nothing: Python runs handlers in the main thread only. A signal mask does
    not suffice: the system gives the signal to any thread that does not block it, such as a library's.

    Attributes:
        came: Whether SIGINT has come since the beginning.
    """

    def __init__(self) -> None:
        self.came = False
        self._handlers: dict[int, Any] = {}
        self._frames: dict[int, FrameType | None] = {}  # by signals that came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or number == signal.SIGINT
        self._frames[number] = frame

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.came = any(held.came for held in _holding)  # in one around this: nobody waits any longer
            try:
                for number in _HELD:
                    handler = signal.getsignal(number)
                    if callable(handler):  # not ignored, not the system's default, not one of C
                        self._handlers[number] = handler
                        signal.signal(number, self._note)
                if self._handlers:
                    _holding.append(self)
            except BaseException:  # of a handler that is not held yet
                self.give_back()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            try:
                self.give_back()
            finally:
                self._call_handlers()

    def give_back(self) -> None:
        """Give the signals to their handlers again, but for those to which the program gave another one."""
        try:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
            if self in _holding:
                _holding.remove(self)
        except BaseException:  # of a handler that was given its signal
            self.give_back()
            raise

    def _call_handlers(self) -> None:
        while self._frames:
            number, frame = self._frames.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self._call_handlers()


_NAMES = "SIGINT SIGTERM SIGHUP SIGQUIT SIGALRM SIGVTALRM SIGPROF SIGUSR1 SIGUSR2 SIGXCPU SIGCONT SIGTSTP"
_HELD = [vars(signal)[name] for name in _NAMES.split() if name in vars(signal)]  # Windows has two
_holding: list[HeldInterrupts] = []  # innermost last


def _give_back_in_child() -> None:
    for held in reversed(_holding[:]):
        held.give_back()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_give_back_in_child)


class Phase(enum.Enum):
    """The phases of an iterator."""

    IDLE = "idle"  # outside next(); all records are complete
    RUNNING = "running"  # inside next()
    WAITING = "waiting"  # inside next(), asleep; all records are complete
    LEAVING = "leaving"  # at the end of next(), after the lock was released
    BROKEN = "broken"  # an exception has cut next() short


IDLE, RUNNING, WAITING, LEAVING, BROKEN = Phase  # quicker to look up than attributes of the class


class Reentered(LoaderError):
    """``next()`` was called by a thread that is inside it, in a signal handler say. The outer one goes on."""


class Occupied(NotReady):
    """``try_next()`` was called while another thread is inside ``next()``."""


class Lifecycle:
    """Guards the calls of one iterator; several threads may call it, one after the other.

    Attributes:
        phase: The iterator's present phase. `Exchange` sets it to ``WAITING`` while it sleeps. The caller
            of `leave` sets it to ``IDLE`` last, by a plain assignment: then no signal handler can run between
            that and the return of the batch.
    """

    def __init__(self) -> None:
        self.phase: Phase = IDLE
        self._lock = threading.RLock()  # held by the thread inside
        self._expected: BaseException | None = None
        self._cut_short_by = "Ctrl-C?"  # if it came before `fail` could note it

    @property
    def why_broken(self) -> str:
        """The reason for which an iterator with the phase ``BROKEN`` cannot go on, for its errors."""
        return f"an exception ({self._cut_short_by}) interrupted it in the middle of its work"

    def enter(self, waits: bool = True) -> bool:
        """Begin a call, once other threads have left; False if an exception has cut an earlier one short.

        Raises:
            Reentered: If this thread is inside already.
            Occupied: If another thread is inside and the call does not wait.
        """
        if not self._lock.acquire(waits):
            raise Occupied("another thread is inside next() of this iterator, and takes its next batch", self)
        if self.phase is IDLE or self._has_last_call_ended():
            self.phase = RUNNING
            return True
        return False

    def _has_last_call_ended(self) -> bool:
        """Wait for another thread's last assignment (see `leave`); False if an exception has prevented it."""
        if self.phase in (RUNNING, WAITING):  # and this thread has got the lock
            if self._is_in_outer_call():
                raise Reentered("next() was called by this thread while it was inside next()")
            self._lock.release()  # for a call that was cut short before `fail` could do it
            self.phase = BROKEN
        deadline = time.monotonic() + _LEAVE_S
        while self.phase is LEAVING and time.monotonic() < deadline:
            time.sleep(0)
        if self.phase is not IDLE:
            self.phase = BROKEN
        return self.phase is IDLE

    def _is_in_outer_call(self) -> bool:
        """Whether this thread is in a call that has not ended: its frame is below the one of `enter`."""
        frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - of the caller of `enter`
        while (frame := frame and frame.f_back) is not None:
            is_of_iterator = frame.f_globals.get("__name__") == "shmloader.iterator"
            if is_of_iterator and frame.f_locals.get("lifecycle") is self:
                return True
        return False

    def leave(self) -> None:
        """End a call that returns a batch: let other threads in. Then assign ``IDLE`` to ``phase``."""
        self.phase = LEAVING
        self._lock.release()

    def expect(self, error: _Error) -> _Error:
        """Mark an exception that is raised on purpose, with all records complete; returns it."""
        self._expected = error
        return error

    @contextlib.contextmanager
    def expects(self, *kinds: type[BaseException]) -> Iterator[None]:
        """Mark exceptions of these classes that are raised meanwhile: see `expect`."""
        try:
            yield
        except kinds as error:
            self.expect(error)
            raise

    def is_expected(self, error: BaseException) -> bool:
        """Whether an exception is the one that was marked last."""
        return error is self._expected

    def is_from_outside(self, error: BaseException) -> bool:
        """Whether an exception comes from outside, as Ctrl-C does, while the program's code makes a batch."""
        return error is not self._expected and (not isinstance(error, Exception) or _is_of_a_handler(error))

    def fail(self, error: BaseException) -> None:
        """End a call that raises."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is inside: this one had not come in, or has left
        if not isinstance(error, Reentered | Occupied):  # of which the outer call knows nothing
            expected, self._expected = self._expected, None
            on_purpose = error is expected or self.phase is WAITING
            if self.phase is not BROKEN:
                self.phase = IDLE if on_purpose else BROKEN
                if not on_purpose:
                    self._cut_short_by = type(error).__name__
        self._lock.release()
        with contextlib.suppress(RuntimeError):  # `enter` had not taken it, or `leave` has given it back
            self._lock.release()

    def await_others(self) -> None:
        """Wait a moment until other threads have left, after the workers' wait was interrupted."""
        if self._lock.acquire(timeout=_LEAVE_S):
            self._lock.release()


def _is_of_a_handler(error: BaseException) -> bool:
    """Whether a Python function that handles signals has raised an exception, or code that it called."""
    handlers = [handler for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)]
    handlers += [getattr(handler, "func", type(handler).__call__) for handler in handlers]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def is_led_to_by_close(error: BaseException, interrupted: bool) -> bool:
    """Whether only ``close()`` elsewhere led to an exception: it ``interrupted`` the wait for workers."""
    if isinstance(error, LoaderClosed):
        return _is_cut_off()
    kinds = (LoaderError, OSError, ValueError, LookupError, AssertionError)
    # The end of an epoch stops workers too: whoever asks meanwhile, in another thread, may ask again.
    return interrupted and isinstance(error, kinds) and not isinstance(error, Occupied)


def cannot_go_on(because: str) -> LoaderClosed:
    """The exception for a call of an iterator that was closed before."""
    return LoaderClosed(f"this iterator cannot go on: {because}. Call iter(loader) for a new one.")


def closed_meanwhile(because: str) -> BaseException:
    """The exception for a call whose iterator was closed meanwhile; ends a thread that is cut off."""
    if _is_cut_off():
        time.sleep(_END_S)  # cut off while a tensor is freed, it would abort the program
        return SystemExit()
    return LoaderClosed(f"this iterator was closed: {because}")


def _is_cut_off() -> bool:
    """Whether this is a daemon thread and the interpreter ends, which stops such threads at any point."""
    return threading.current_thread().daemon and not threading.main_thread().is_alive()
