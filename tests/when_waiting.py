"""A thread that acts as soon as another one waits for a batch: no test has to guess when that is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def when_waiting(iterator: Any, act: Callable[[], object]) -> threading.Thread:
    """Start a thread that acts once another one is asleep in a call of the iterator; the caller joins it."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while iterator._lifecycle.phase.name != "WAITING":
            assert time.monotonic() < deadline, "nobody waits"
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
