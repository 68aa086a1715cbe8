"""The demo's progress bar: tqdm's, where tqdm is installed and somebody is watching."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(steps: int, label: str) -> Iterator[Callable[[float], None]]:
    """Show the steps of a training run on standard error, if that is a terminal.

    Args:
        steps: Steps until the bar is full.
        label: Shown before the bar.

    Yields:
        A function to call after each step, with the step's loss in nats per byte.
    """
    tqdm = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm").tqdm
    if tqdm is None:
        yield lambda loss: None
        return
    # `leave=False`: the table says it all once the run is over.
    with tqdm(total=steps, desc=f"{label:>9}", unit="step", leave=False) as bar:

        def advance(loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.2f}", refresh=False)
            bar.update()

        yield advance
