"""Files of shmloader that a plain batch and ``iter()`` enter: ``python tests/project/traced_files.py``.

Traced in the main process and in a forked worker, once all imports are done: a file counts when a function in
it is called. In the main process it counts if most batches enter it: what forked workers copy is looked at
every 0.2 seconds, whatever the number of batches.
"""

import collections
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
    """The files entered, by their names in the package."""

    batch_in_main: set[str]
    batch_in_worker: set[str]
    by_iter: set[str]


class _Files:
    """The files entered in this thread while it is switched on."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            self.names.add(frame.f_code.co_filename)

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def in_package(self) -> set[str]:
        return {str(Path(name).relative_to(PACKAGE)) for name in self.names if name.startswith(str(PACKAGE))}


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
            self.notes.write_text("\n".join(self.files.in_package()), encoding="utf-8")
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
        worker = set(dataset.notes.read_text(encoding="utf-8").split("\n"))
        counts = collections.Counter(name for files in by_batch for name in files.in_package())
        in_main = {name for name, count in counts.items() if count > len(by_batch) / 2}
        return Traced(in_main, worker, by_iter.in_package())


def _loader(dataset: _Samples) -> Any:
    return shmloader.DataLoader(
        dataset, BATCH_SIZE, shuffle=True, num_workers=1, multiprocessing_context="fork"
    )


if __name__ == "__main__":
    found = trace()
    sides = found._asdict() | {"batch_on_both_sides": found.batch_in_main | found.batch_in_worker}
    for what, names in sides.items():
        sys.stdout.write("\n    ".join([f"{what}: {len(names)} files", *sorted(names)]) + "\n")
