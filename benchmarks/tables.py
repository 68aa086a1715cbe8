"""Tables: columns of cells, as text that is Markdown too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Columns = Sequence[tuple[str, Callable[[T], str]]]
"""For each column its heading, and a function that makes a cell from a row's figures."""


def table_of(columns: Columns[T], rows: Iterable[T], texts: int) -> str:
    """Renders a table of rows; the first `texts` columns are text, the others numbers."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return render_table([[heading for heading, _ in columns], *cells], texts)


def render_table(table: list[list[str]], texts: int) -> str:
    """Renders a table whose first row is its head; the first `texts` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rules = ["-" * w if i < texts else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = []
    for cells in [table[0], rules, *table[1:]]:
        padded = [
            cell.ljust(width) if number < texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def or_empty(value: float | None, pattern: str) -> str:
    """Formats a number; None gives an empty cell."""
    return "" if value is None else format(value, pattern)
