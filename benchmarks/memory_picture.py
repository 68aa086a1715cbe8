"""The picture: memory over time, one line per way to keep the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.memory_samples import MemorySample

MIB = 2**20


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
