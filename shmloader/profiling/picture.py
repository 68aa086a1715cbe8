"""The picture of a profile: the batches of each worker over time. Needs matplotlib (``shmloader[plots]``)."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLOURS = {
    "step": "#b8c4bb",
    "wait": "#c1440e",
    "sampler": "#e9b44c",
    "next": "#50514f",
    "fetch": "#1f6f8b",
    "collate": "#8ab6c9",
    "write": "#7b5ea7",
}

Span = tuple[str, str, float, float]
"""Who, the part of the time, when it began, and for how many seconds."""


def draw(path: str | PathLike[str], title: str, spans: Sequence[Span]) -> None:
    """Draw spans of time, a row for each who. The form (PNG, SVG, PDF) is that of the name's ending."""
    begin_s = min((at_s for _, _, at_s, _ in spans), default=0.0)
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for who, name, at_s, spent_s in spans:
        bars.setdefault((who, name), []).append((at_s - begin_s, spent_s))
    rows = sorted({who for who, _ in bars}, reverse=True)
    # Figure and not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(12, 1.8 + 0.5 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, colour in _COLOURS.items():
        for row, who in enumerate(rows):
            axes.broken_barh(bars.get((who, name), []), (row - 0.4, 0.8), color=colour, linewidth=0)
        axes.bar(0, 0, width=0, color=colour, label=name)
    axes.set_xlim(0, max((at_s + spent_s for _, _, at_s, spent_s in spans), default=1.0) - begin_s)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(_COLOURS), frameon=False)
    axes.set_title(title, fontsize=9, loc="left", wrap=True)
    figure.savefig(path)
