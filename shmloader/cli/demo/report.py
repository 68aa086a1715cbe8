"""The demo's table: the figures of all loaders, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shmloader.cli.demo.run import RunResult

_LABEL_WIDTH = 42
_COLUMN_WIDTH = 13


def format_table(results: Mapping[str, RunResult]) -> str:
    """Lay the measurements out, one column per loader.

    Args:
        results: Results by the loader's name.
    """
    rule = "-" * (_LABEL_WIDTH + _COLUMN_WIDTH * len(results))
    rows = [("", list(results)), *((label, list(map(cell, results.values()))) for label, cell in _ROWS)]
    lines = [
        f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in row)
        for label, row in rows
    ]
    return "\n".join([lines[0], rule, *lines[1:], rule])


_ROWS: tuple[tuple[str, Callable[[RunResult], str]], ...] = (
    ("time to first batch, s", lambda result: f"{result.first_batch_s:.3f}"),
    ("training: samples/s", lambda result: f"{result.training_rate:,.0f}"),
    ("training: waited for data, s in total", lambda result: f"{result.waited_s:.3f}"),
    ("held-out loss before, nats/byte", lambda result: f"{result.loss_before:.6f}"),
    ("held-out loss after, nats/byte", lambda result: f"{result.loss_after:.6f}"),
    ("loader alone, no model: samples/s", lambda result: f"{result.loader_alone_rate:,.0f}"),
    (
        "peak memory of all processes, MiB (PSS)",
        lambda result: f"{result.peak_nbytes / 2**20:,.0f}" if result.peak_nbytes else "not available",
    ),
)
