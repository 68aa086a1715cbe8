"""A progress bar for builds that take long."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

_SHOWN_AFTER_S = 1.5  # builds that are over by then show nothing


class BuildProgress:
    """Counts rows, and shows them once the build has lasted a while; a context manager.

    Args:
        wanted: Whether to show a bar; None: if stderr is a terminal, or this is a notebook,
            and tqdm is installed.
        rows: How many there will be, or None where unknown.
    """

    def __init__(self, wanted: bool | None, rows: int | None) -> None:
        self._wanted = (sys.stderr.isatty() or "ipykernel" in sys.modules) if wanted is None else wanted
        self._rows = rows
        self._started_s = time.monotonic()
        self._bar: Any = None

    def show(self, rows: int) -> None:
        """Tell how many rows there are by now."""
        if self._bar is None and self._wanted and time.monotonic() - self._started_s > _SHOWN_AFTER_S:
            self._bar = _make_bar(self._rows)
            self._wanted = self._bar is not None
        if self._bar is not None:
            self._bar.update(rows - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _make_bar(rows: int | None) -> Any:
    try:
        from tqdm.auto import tqdm  # in a notebook a widget
    except ImportError:
        return None

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread: processes may be forked while it runs

    return Bar(total=rows, desc="shmloader.share", unit=" rows", unit_scale=True)
