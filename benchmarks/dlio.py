"""DLIO, the engine of MLPerf Storage, with torch's loader and with this one, in turns.

``python -m benchmarks.dlio --folder FOLDER`` writes samples of unet3d's shape to a folder once, and trains on
them with DLIO's own PyTorch reader: unchanged, and after ``shmloader.install()``. It prints samples per
second of every epoch but the first. It needs ``dlio_benchmark`` and what that imports (MPI, TensorFlow) in an
environment of its own: ``pip install dlio_benchmark``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.options import whole_number
from benchmarks.tables import render_table

LOADERS = {"torch": "", "shmloader": "import shmloader; shmloader.install(); "}
PROGRAM = "from dlio_benchmark.main import main; main()"
MB = 1_000_000


def dlio(before: str, output: Path, arguments: argparse.Namespace, **workflow: bool) -> None:
    """Run DLIO, after a line of Python."""
    options = [
        "workload=unet3d_a100",
        *(f"++workload.workflow.{name}={value}" for name, value in workflow.items()),
        "++workload.workflow.checkpoint=False",
        f"++workload.dataset.data_folder={arguments.folder}",
        f"++workload.dataset.num_files_train={arguments.files}",
        f"++workload.dataset.record_length={arguments.file_mb * MB}",
        "++workload.dataset.record_length_stdev=0",
        f"++workload.reader.read_threads={arguments.workers}",
        "++workload.reader.batch_size=7",
        "++workload.reader.multiprocessing_context=fork",
        "++workload.train.computation_time=0.0",
        f"++workload.train.epochs={arguments.epochs}",
        f"hydra.run.dir={output}",
    ]
    environment = os.environ | {"DFTRACER_ENABLE": "0", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", before + PROGRAM, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-3000:])


def rates(output: Path) -> list[float]:
    """Samples per second of each epoch but the first, from DLIO's own summary."""
    found: list[float] = json.loads((output / "summary.json").read_text())["metric"][
        "train_throughput_samples_per_second"
    ]
    return found[1:]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the samples are, or are written")
    parser.add_argument("--files", type=whole_number(7), default=56)
    parser.add_argument("--file-mb", type=whole_number(1), default=15)
    parser.add_argument("--workers", type=whole_number(1), default=2)
    parser.add_argument("--epochs", type=whole_number(2), default=4)
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    arguments = parser.parse_args()
    measured: dict[str, list[float]] = {name: [] for name in LOADERS}
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.folder.exists():
            dlio("", Path(folder, "written"), arguments, generate_data=True, train=False)
        for turn in range(arguments.repeats):
            for name, before in LOADERS.items():
                output = Path(folder, f"{name}{turn}")
                dlio(before, output, arguments, generate_data=False, train=True)
                measured[name].append(median(rates(output)))
    table = [["loader", "samples/s, median of turns", "least", "most"]]
    for name, each in measured.items():
        table.append([name, *(f"{how(each):.1f}" for how in (median, min, max))])
    print(render_table(table, texts=1))
    ratios = [ours / torchs for torchs, ours in zip(measured["torch"], measured["shmloader"], strict=True)]
    print(f"times torch, turn by turn: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
