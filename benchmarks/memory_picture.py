"""The pictures of `benchmarks.memory`: memory over time, and over the number of workers by start method.

``python -m benchmarks.memory_picture PNG JSON...`` draws the latter from files of ``--part shapes --json``.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory_samples import MemorySample

MIB, MB = 2**20, 1e6


def draw(path: Path, lines: Mapping[str, Sequence[MemorySample]], title: str) -> None:
    """Draws the summed PSS of main process and workers over time, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, samples in lines.items():
        start_s = samples[0].time_s
        sizes = [sample.pss_nbytes / MIB for sample in samples]
        times = [sample.time_s - start_s for sample in samples]
        axes.plot(times, sizes, linewidth=1.8, label=f"{name}: peak {max(sizes):,.0f} MiB")
    axes.set_xlabel("time since the start of the process (s)")
    axes.set_ylabel("PSS, summed over main process and workers (MiB)")
    axes.set_title(title, fontsize=10, color="0.35")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def draw_shapes(path: Path, measured: Sequence[Mapping[str, Any]]) -> None:
    """Draws the summed PSS over the number of workers: a panel per shape and start method, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes: dict[tuple[str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    methods = list(dict.fromkeys(one["method"] for one in measured if one["workers"]))
    for one in measured:  # without workers there is no start method
        for method in [one["method"]] if one["workers"] else methods:
            sizes[one["shape"], method][one["contestant"]][one["workers"]] = one["pss_nbytes"] / MB
    panels = {panel: lines for panel, lines in sizes.items() if max(map(len, lines.values())) > 1}
    figure = Figure(figsize=(max(7.0, 4 * len(panels)), 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(one["contestant"] for one in measured))
    all_axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for axes, ((shape, method), lines) in zip(all_axes, panels.items(), strict=False):
        for number, name in enumerate(names):
            points = sorted(lines[name].items()) if name in lines else []
            style = {"linewidth": 2.6} if name.startswith("shmloader") else {"linewidth": 1.3}
            axes.plot(*zip(*points, strict=True) if points else ((), ()), "o-", color=f"C{number}", **style)
        axes.set_title(f"{shape}, {method}", fontsize=10, color="0.35")
        axes.set_xlabel("workers")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("PSS of all processes (MB)")
    figure.legend(all_axes[0].get_lines(), names, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png")


def main() -> None:
    """Draws what was measured in several runs."""
    picture, *files = map(Path, sys.argv[1:])
    draw_shapes(picture, [one for file in files for one in json.loads(file.read_text())["shapes"]])


if __name__ == "__main__":
    main()
