"""Files of shmloader that a plain batch and ``iter()`` enter: ``python tests/project/traced_files.py``.

Traced in the main process and in a forked worker, once all imports are done: a file counts when a function in
it is called. In the main process it counts if most batches enter it: what forked workers copy is looked at
every 0.2 seconds, whatever the number of batches. The calls of the package's functions in a batch are counted
too; in the main process, which waits for each batch here, the median.
"""

import collections
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import shmloader

PACKAGE = Path(shmloader.__file__).parent
BATCH_SIZE, BATCHES, FIRST, LAST = 4, 40, 15, 25  # traced are the batches from FIRST to LAST
SLOW_S = 0.002  # a worker's batch takes so long that the main process has to wait for it


class Traced(NamedTuple):
    """The files entered, by their names in the package, and the calls in a batch."""

    batch_in_main: set[str]
    batch_in_worker: set[str]
    by_iter: set[str]
    calls_in_main: float
    calls_in_worker: float


class _Files:
    """The files entered in this thread while it is switched on, and the calls of functions in them."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            self.calls[frame.f_code.co_filename] += 1

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def in_package(self) -> dict[str, int]:
        counts = self.calls.items()
        return {
            str(Path(name).relative_to(PACKAGE)): n for name, n in counts if name.startswith(str(PACKAGE))
        }


class _Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples whose one worker notes what it enters from one batch to a later one."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.files = _Files()
        self.fetched = 0

    def __len__(self) -> int:
        return BATCH_SIZE * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fetched == FIRST * BATCH_SIZE:
            sys.setprofile(self.files._note)
        elif self.fetched == LAST * BATCH_SIZE:
            sys.setprofile(None)
            self.notes.write_text(json.dumps(self.files.in_package()), encoding="utf-8")
        self.fetched += 1
        time.sleep(SLOW_S / BATCH_SIZE)
        return torch.full((16,), float(index))


def trace() -> Traced:
    """Trace the first epoch of a loader. Another loader was used before, for what is imported late."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = _Samples(Path(folder) / "worker")
        list(_loader(dataset))
        loader = _loader(dataset)
        by_iter, by_batch = _Files(), [_Files() for _ in range(LAST - FIRST)]
        with by_iter.traced():
            batches = iter(loader)
        for number, _ in enumerate(batches):
            if FIRST <= number < LAST:
                sys.setprofile(by_batch[number - FIRST]._note)
            elif number == LAST:
                sys.setprofile(None)
        worker = json.loads(dataset.notes.read_text(encoding="utf-8"))
        counts = collections.Counter(name for files in by_batch for name in files.in_package())
        in_main = {name for name, count in counts.items() if count > len(by_batch) / 2}
        calls = statistics.median(sum(files.in_package().values()) for files in by_batch)
        calls_in_worker = sum(worker.values()) / len(by_batch)
        return Traced(in_main, set(worker), set(by_iter.in_package()), calls, calls_in_worker)


def _loader(dataset: _Samples) -> Any:
    return shmloader.DataLoader(
        dataset, BATCH_SIZE, shuffle=True, num_workers=1, multiprocessing_context="fork"
    )


if __name__ == "__main__":
    *files, calls_in_main, calls_in_worker = trace()
    for what, names in zip(Traced._fields, files, strict=False):
        sys.stdout.write("\n    ".join([f"{what}: {len(names)} files", *sorted(names)]) + "\n")
    sys.stdout.write(f"{len(files[0] | files[1])} files on both sides of a batch\n")
    sys.stdout.write(
        f"calls in a batch: {calls_in_main:g} in the main process, {calls_in_worker:g} in a worker\n"
    )
