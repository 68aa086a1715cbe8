"""DLIO, the engine of MLPerf Storage, with torch's loader and this one: unet3d's samples, npz files.

``python -m benchmarks.dlio`` writes the files with DLIO, and runs it with both loaders in turn, each in a
fresh process. DLIO itself counts the samples. Needs these packages of PyPI, installed with the versions of
constraints.txt: dlio-benchmark (with pip's --no-deps, since its requirement DALI is for what this does not
use), h5py, hydra-core, mpi4py, mpich, pandas, pillow, pydftracer 1.0.2 and tensorflow-cpu.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.fresh_process import ROOT
from benchmarks.options import NOT_MEASURED, whole_number
from benchmarks.tables import render_table

_OURS = "benchmarks.dlio_loader.Loader"
_LOADERS = {
    "torch": [],
    "shmloader": [f"reader.data_loader_classname={_OURS}", "reader.data_loader_sampler=index"],
}


def run(folder: Path, *settings: str) -> None:
    """Run DLIO on unet3d's workload, with some settings changed."""
    changed = [f"++workload.{setting}" for setting in (*settings, f"output.folder={folder}")]
    words = ["workload=unet3d_h100", *changed, f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "dlio_benchmark.main", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"DLIO ended with status {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=whole_number(14), default=84, help="(%(default)s)")
    parser.add_argument("--nbytes", type=whole_number(1), default=4 << 20, help="of a file (%(default)s)")
    parser.add_argument("--workers", type=whole_number(1), default=2, help="(%(default)s)")
    parser.add_argument("--turns", type=whole_number(1), default=5, help="(%(default)s)")
    given = parser.parse_args()
    if importlib.util.find_spec("dlio_benchmark") is None:
        print(f"DLIO is not installed:\n{__doc__}", file=sys.stderr)
        return NOT_MEASURED
    rates: dict[str, list[float]] = {name: [] for name in _LOADERS}
    with tempfile.TemporaryDirectory(prefix="shmloader-bench-") as place:
        folder = Path(place)
        common = [
            f"dataset.data_folder={folder}/data",
            f"dataset.num_files_train={given.files}",
            f"dataset.record_length={given.nbytes}",
            f"dataset.record_length_stdev={given.nbytes // 4}",
            "workflow.checkpoint=False",
        ]
        run(folder, *common, "workflow.generate_data=True", "workflow.train=False")
        common += [f"reader.read_threads={given.workers}", "train.computation_time=0", "train.epochs=3"]
        for _ in range(given.turns):
            for name, settings in _LOADERS.items():
                run(folder, *common, *settings)
                summary = json.loads((folder / "summary.json").read_text())
                rates[name].append(summary["metric"]["train_throughput_mean_samples_per_second"])
    table = [["loader", "samples/s, median", "beside torch, in its turn"]]
    for name, found in rates.items():
        ratio = statistics.median(ours / torchs for ours, torchs in zip(found, rates["torch"], strict=True))
        table.append([name, f"{statistics.median(found):,.1f}", f"{ratio:.2f}"])
    print(render_table(table, texts=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
