"""The demo's picture: memory over time, both loaders in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shmloader.cli.demo.report import MIB, Run, describe_work

_COLOURS = {"torch": "#c2571a", "shmloader": "#1f6f8b"}


def draw_memory(path: Path, runs: Sequence[Run]) -> None:
    """Draw the summed PSS of each loader's processes over time, as a PNG.

    Args:
        path: The file to write.
        runs: The runs, all with their memory known.
    """
    # Figure and not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        _draw_run(axes, run)
    axes.plot([], [], "s", color="0.35", markersize=6, label="loader alone, no model, from here on")
    axes.axvline(0, color="0.35", linewidth=0.8, linestyle=":")
    axes.set_xlabel("time since the start of training (s); before it, imports and reading the data")
    axes.set_ylabel("PSS, summed over main process and workers (MiB)")
    figure.suptitle("Memory of a training run with each loader", fontsize=13)
    axes.set_title(describe_work(runs[0].spec), fontsize=9, color="0.35")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, format="png")


def _draw_run(axes: Axes, run: Run) -> None:
    """Draw one loader's line and the place where its model stops."""
    start_s = run.result.phases["training"]
    times_s = [sample.time_s - start_s for sample in run.memory]
    sizes_mib = [sample.pss_nbytes / MIB for sample in run.memory]
    colour = _COLOURS[run.spec.loader]
    label = f"{run.spec.loader}: peak {max(sizes_mib):,.0f} MiB"
    axes.plot(times_s, sizes_mib, color=colour, linewidth=1.8, label=label)
    alone_s = run.result.phases["loader alone"] - start_s
    nearest = min(range(len(times_s)), key=lambda index: abs(times_s[index] - alone_s))
    axes.plot(times_s[nearest], sizes_mib[nearest], "s", color=colour, markersize=6)
