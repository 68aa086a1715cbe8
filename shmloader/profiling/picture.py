"""The picture of a profile: the batches of each worker over time. Needs matplotlib (``shmloader[plots]``)."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from shmloader.profiling.report import ProfileReport

_COLOURS = {
    "step": "#b8c4bb",
    "wait": "#c1440e",
    "sampler": "#e9b44c",
    "next": "#50514f",
    "fetch": "#1f6f8b",
    "collate": "#8ab6c9",
    "write": "#7b5ea7",
}
_MOST_BATCHES = 300  # the last ones: more would be thinner than a pixel


def draw(path: str | PathLike[str], report: ProfileReport) -> None:
    """Draw the last batches of a report, at most 300."""
    last = report.returned[-_MOST_BATCHES:]
    begin_s = last[0].began_ns / 1e9 - last[0].step_s if last else 0.0
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for who, name, at_s, spent_s in report.spans():
        if at_s >= begin_s:
            bars.setdefault((who, name), []).append((at_s - begin_s, spent_s))
    rows = sorted({who for who, _ in bars}, reverse=True)
    # Figure and not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(12, 1.8 + 0.5 * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, colour in _COLOURS.items():
        for row, who in enumerate(rows):
            axes.broken_barh(bars.get((who, name), []), (row - 0.4, 0.8), color=colour, linewidth=0)
        axes.bar(0, 0, color=colour, label=name)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(f"seconds, the last {len(last)} batches")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(_COLOURS), frameon=False)
    axes.set_title(report.verdict.text, fontsize=9, loc="left", wrap=True)
    figure.savefig(path)
