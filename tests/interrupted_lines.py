"""Ctrl-C before any line of a method."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any


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
        call(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
