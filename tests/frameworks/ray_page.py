"""Runs the program of docs/integrations/ray.md in one cluster: with a rank killed, and then on three ranks.

    python ray_page.py FOLDER [ADDRESS]

In FOLDER each run has a folder with a file of lines for each rank and attempt, and one for each host that had
ranks. Without the address of a cluster it starts one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "ray.md"


def program(folder: str, killed_after: int | None) -> Any:
    """The page's function for Ray, which writes what it prints to a file; once, rank 1 kills itself."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    attempts: dict[str, Path] = {}

    def record(rank: int, *values: Any) -> None:
        name = f"rank {rank}"
        if name not in attempts:
            number = len(list(Path(folder).glob(f"{name},*")))
            attempts[name] = Path(folder) / f"{name}, attempt {number}"
            (Path(folder) / f"host {socket.gethostname()}").touch()
        path = attempts[name]
        with path.open("a") as file:
            file.write(" ".join(map(str, (rank, *values))) + "\n")
        lines = len(path.read_text().splitlines())
        if rank == 1 and lines == killed_after and path.name.endswith("attempt 0"):
            os.kill(os.getpid(), signal.SIGKILL)

    names: dict[str, Any] = {"__name__": "page", "print": record}
    exec(compile(found[1], str(PAGE), "exec"), names)
    return names["train"]


def fit(folder: Path, ranks: int, *, killed_after: int | None = None, start: str | None = None) -> None:
    (folder / "lines").mkdir(parents=True)
    page = program(str(folder / "lines"), killed_after)

    def train(config: dict[str, Any]) -> None:
        if start is not None:
            ray.train.get_checkpoint = lambda: Checkpoint.from_directory(start)
        page(config)

    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=ranks, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    ).fit()


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2:]:
        ray.init(address=sys.argv[2])
    else:
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    fit(folder / "killed", 2, killed_after=15)
    found = {}
    for path in (folder / "killed").glob("**/checkpoint.pt"):
        state = torch.load(path, weights_only=True)
        found[state["epoch"], state["loader"]["batches"]] = path.parent
    fit(folder / "three", 3, start=str(found[0, 12]))


if __name__ == "__main__":
    main()
