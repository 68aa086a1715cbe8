"""Draws a program's memory over time."""

from __future__ import annotations

import textwrap
from pathlib import Path

from shmloader.monitor.monitor import Monitor

_MOST_PROCESSES = 8  # drawn apart; the others are one area


def draw(monitor: Monitor, path: Path) -> None:
    """Draw the private memory of each process, all shared memory, and their sum, as a PNG.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    readings = monitor.readings
    times = [reading.time_s for reading in readings]
    names = monitor.names()
    most: dict[int, int] = {}
    private = [{one.pid: one.private_nbytes / 1e6 for one in reading.processes} for reading in readings]
    for reading in readings:
        for process in reading.processes:
            names.setdefault(process.pid, process.name)
            most[process.pid] = max(most.get(process.pid, 0), process.private_nbytes)
    largest = sorted(most, key=lambda pid: most[pid], reverse=True)
    shown, rest = largest[:_MOST_PROCESSES], set(largest[_MOST_PROCESSES:])
    areas = [[one.get(pid, 0.0) for one in private] for pid in shown]
    labels = [f"{names[pid]} ({pid})" for pid in shown]
    if rest:
        areas.append([sum(one.get(pid, 0.0) for pid in rest) for one in private])
        labels.append(f"{len(rest)} more processes")
    # Figure and not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if readings:
        axes.stackplot(times, areas, labels=labels, alpha=0.75)
        total = [reading.pss_nbytes / 1e6 for reading in readings]
        axes.plot(times, total, color="0.15", linewidth=1.6, label="all, with what is shared (PSS)")
        limit = readings[-1].room.limit_nbytes / 1e6
        if limit < 4 * max(total):
            axes.axhline(limit, color="firebrick", linestyle="--", label=f"limit: {limit:,.0f} MB")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("private memory of each process (MB)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    said = "\n".join(line for one in monitor.findings()[:2] for line in textwrap.wrap(one.text, 110))
    axes.set_title(said, fontsize=8, color="0.25", loc="left")
    figure.savefig(path, format="png")
