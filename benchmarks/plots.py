"""The pictures of a comparison: one per workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.loaders import LOADERS
from benchmarks.report import Outcome, figures_of

OWN, OTHER, LIMIT = "#1f6f8b", "#b0a8a0", "#404040"


def draw_all(folder: Path, described: dict[str, Any], outcomes: Sequence[Outcome]) -> Iterator[Path]:
    """Draws each workload as a PNG named after it, and yields the files.

    Raises:
        OSError: Some could not be written; all others have been by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for outcome in outcomes:
        path = folder / f"{outcome.workload.name}.png"
        try:
            draw(path, described, outcome)
        except OSError as error:
            failures.append(f"{path.name} ({error.strerror or error})")
        else:
            yield path
    if failures:
        raise OSError(f"{len(failures)} of {len(outcomes)} pictures failed: {', '.join(failures)}")


def draw(path: Path, described: dict[str, Any], outcome: Outcome) -> None:
    """Draws the figures of all contestants beside the processor time that they cost."""
    label, names, turns = figures_of(outcome)
    # Figure and not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    _bars(left, names, turns)
    left.set_xlabel(label)
    cpu_ms = [[1e3 * one.cpu_s / max(1, one.batches) for one in outcome.runs[name]] for name in names]
    _bars(right, names, cpu_ms)
    right.set_xlabel("processor time of all processes, ms per batch")
    figure.suptitle(f"{outcome.workload.name}: {outcome.workload.about}", fontsize=12)
    machine = (
        f"{described['cpu_model']}, {described['usable_cores']} cores, torch {described['versions']['torch']}"
    )
    left.set_title(f"{machine}; median, least and most", fontsize=8, color="0.35", loc="left")
    figure.savefig(path, format="png")


def _bars(axes: Axes, names: Sequence[str], turns: Sequence[Sequence[float]]) -> None:
    middles = [median(values) for values in turns]
    errors = [
        [middle - min(values) for middle, values in zip(middles, turns, strict=True)],
        [max(values) - middle for middle, values in zip(middles, turns, strict=True)],
    ]
    axes.barh(list(names), middles, xerr=errors, color=[_colour(name) for name in names], ecolor="0.3")
    axes.invert_yaxis() if not axes.yaxis_inverted() else None
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    if name not in LOADERS:
        return LIMIT
    return OWN if LOADERS[name].is_own else OTHER
