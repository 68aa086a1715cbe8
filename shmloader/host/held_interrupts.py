"""Ctrl-C held back while it would leak a process or a descriptor."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class HeldInterrupts:
    """A context manager that holds back SIGINT's handler until its end, and then calls it.

    Outside the main thread it does nothing: Python runs handlers in the main thread only. A signal mask does
    not suffice: the system gives the signal to any thread that does not block it, such as a library's.

    Attributes:
        came: Whether an interrupt has come since the beginning.
    """

    def __init__(self) -> None:
        self.came = False
        self._handler: Any = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # not ignored, not the system's default, not one of C
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            handler, self._handler = self._handler, None
            signal.signal(signal.SIGINT, handler)
            if self.came:
                handler(signal.SIGINT, None)
