"""Signals at a chosen moment: Ctrl-C before any line of a method, an alarm inside of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call in which a trace function may raise at any line, and return what it returns.

    CPython takes what is raised so inside a ``with`` for still handled, as the context of all exceptions that
    come later in this thread. A generator keeps that to itself.
    """

    def make() -> Iterator[Any]:
        yield call(*arguments)

    return next(make())


def interrupted_at(line: int, call: Any, *arguments: Any) -> bool:
    """Make a call, and interrupt it before its n-th line; whether it had so many."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not call.__func__.__code__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        alone(call, *arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@contextmanager
def once_inside(method: Any, action: Callable[[], object]) -> Iterator[None]:
    """Have a signal handler call a function, once, while a method runs that is called in the block."""

    def handler(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is method.__code__:
            signal.setitimer(signal.ITIMER_REAL, 0)
            action()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
