"""The cost and the gain of `shmloader.share`: `python benchmarks/stores.py` prints one table.

Each figure is measured in a fresh process. `--quick` uses a tenth of the rows; `--json PATH` writes the
figures too. Sizes of Python objects are growth of the process's PSS, from `smaps_rollup`.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:  # as a script, only the script's own folder is there
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.options import NOT_WRITTEN, whole_number  # noqa: E402
from benchmarks.result_files import result_file, write_json  # noqa: E402
from shmloader.memory.process_memory import read_memory  # noqa: E402

ROWS = 2_000_000
LEAST_ROWS = 10_000
"""Fewer rows take less memory than a process takes and frees by itself."""

GATHERED_ROWS = 4096


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        what: Name of the measurement.
        value: The figure, in `unit`.
        unit: Its unit.
        goal: The goal, for people.
        reached: Whether it was reached; None if there is no goal.
    """

    what: str
    value: float
    unit: str
    goal: str = ""
    reached: bool | None = None


def make_row(number: int) -> dict[str, Any]:
    """A path, a label and five numbers."""
    return {
        "path": f"train/n{number % 1000:08d}/{number:08d}.jpg",
        "label": number % 1000,
        "x": number % 640,
        "y": number % 480,
        "width": number % 97,
        "height": number % 89,
        "score": number / 7,
    }


def make_list(rows: int) -> list[dict[str, Any]]:
    return [make_row(number) for number in range(rows)]


def pss_nbytes() -> int:
    return read_memory(os.getpid())["Pss"]


class Peak:
    """Measures the peak growth of this process's memory, its own and in stores, while it is entered."""

    def __enter__(self) -> Self:
        self.before_nbytes = private_nbytes() + store_nbytes()
        self.nbytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.nbytes = max(self.nbytes, private_nbytes() + store_nbytes() - self.before_nbytes)

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def private_nbytes() -> int:
    """Bytes of this process's own: memory without a file, and so without a store."""
    return read_memory(os.getpid())["Anonymous"]


def store_nbytes() -> int:
    """Bytes of the memory files that are open here: stores, also while they are built."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:shmloader-store" in str(link.readlink()):
                total += link.stat().st_blocks * 512
        except OSError:
            continue
    return total


def nanoseconds_per_call(call: Callable[[Any], Any], arguments: list[Any]) -> float:
    """Median over single calls, minus the time of the clock itself."""
    clock = time.perf_counter_ns
    times, empty = [], []
    for argument in arguments:
        begin = clock()
        call(argument)
        times.append(clock() - begin)
        begin = clock()
        empty.append(clock() - begin)
    return statistics.median(times) - statistics.median(empty)


class PickledBytes:
    """A common way: a pickle per record, in one buffer."""

    def __init__(self, rows: int) -> None:
        import numpy as np

        pickled = [pickle.dumps(make_row(number), 5) for number in range(rows)]
        self.ends = np.cumsum([0, *map(len, pickled)]).data  # quicker to index than the array
        self.data = memoryview(b"".join(pickled))

    def __getitem__(self, index: int) -> Any:
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]])


def measure_list(rows: int) -> list[Figure]:
    before = pss_nbytes()
    data = make_list(rows)
    nbytes = pss_nbytes() - before
    return [Figure(f"list of {len(data):,} dicts: memory", nbytes, "bytes")]


def measure_store(rows: int) -> list[Figure]:
    import shmloader

    shmloader.share([make_row(0)])  # loads what the first call needs
    data = make_list(rows)
    build_s = []
    for _ in range(3):
        store: Any = None
        begin_s = time.process_time()
        store = shmloader.share(data)
        build_s.append(time.process_time() - begin_s)
    rate = rows / min(build_s)
    del data
    what = store.describe()
    chosen = random.Random(0).choices(range(rows), k=200_000)
    pickled = [pickle.dumps(make_row(number), 5) for number in chosen]
    assert all(store[number] == make_row(number) for number in chosen)
    read_ns = nanoseconds_per_call(store.__getitem__, chosen)
    loads_ns = nanoseconds_per_call(pickle.loads, pickled)
    trick_ns = nanoseconds_per_call(PickledBytes(rows).__getitem__, chosen)
    batch = chosen[:256]
    batches_s = []
    for _ in range(200):
        begin_s = time.perf_counter()
        store.__getitems__(batch)
        batches_s.append(time.perf_counter() - begin_s)
    return [
        Figure("the store: shared memory", what.nbytes, "bytes"),
        Figure("the store: list, by its own estimate", what.python_nbytes, "bytes"),
        Figure(
            "build from the list, processor time (best of 3)", rate / 1e6, "M records/s", ">= 1", rate >= 1e6
        ),
        Figure("store[i], random rows, median", read_ns / 1000, "us", "<= 2", read_ns <= 2000),
        Figure("pickle.loads of one record, median", loads_ns / 1000, "us"),
        Figure("pickles in one buffer with offsets: [i], median", trick_ns / 1000, "us"),
        Figure("store.__getitems__, 256 rows: per row", statistics.median(batches_s) / 256 * 1e6, "us"),
    ]


def measure_stream(rows: int) -> list[Figure]:
    import shmloader

    shmloader.share(iter([make_row(0)]))
    begin_s = time.perf_counter()
    store = shmloader.share(make_row(number) for number in range(rows))
    rate = rows / (time.perf_counter() - begin_s)
    assert len(store) == rows
    return [Figure("build from a generator, its own time included", rate / 1e6, "M records/s")]


def measure_peak(rows: int) -> list[Figure]:
    import shmloader

    shmloader.share(iter([make_row(0)]))
    with Peak() as peak:
        store = shmloader.share(make_row(number) for number in range(rows))
    ratio = peak.nbytes / store.nbytes
    return [Figure("peak of that build, of the store's size", ratio, "times", "<= 1.3", ratio <= 1.3)]


def measure_take(rows: int) -> list[Figure]:
    import torch

    import shmloader

    torch.set_num_threads(1)  # as in a worker
    source = torch.rand(max(rows // 4, GATHERED_ROWS), 64)
    row_store = shmloader.share(list(source))
    shared = shmloader.share(source)
    out, out_rows = torch.empty(GATHERED_ROWS, 64), torch.empty(GATHERED_ROWS, 64)
    calls: list[Callable[[Any], Any]] = [
        lambda index: torch.index_select(source, 0, index, out=out),
        lambda index: torch.index_select(shared, 0, index, out=out),
        lambda index: row_store.take(index, out_rows),
    ]
    times: list[list[float]] = [[] for _ in calls]
    turns = list(range(len(calls)))
    for _ in range(1000):
        # In turns, so that other load of the machine hits all alike; each with rows of its own, since
        # those that another call has just read are in the processor's cache.
        random.shuffle(turns)
        for number in turns:
            index = torch.randint(len(source), (GATHERED_ROWS,))
            begin_s = time.perf_counter()
            calls[number](index)
            times[number].append(time.perf_counter() - begin_s)
    select_s, shared_s, take_s = map(statistics.median, times)
    shared_share, take_share = select_s / shared_s, select_s / take_s
    return [
        Figure("torch.index_select(out=), 4096 x 64 float32", select_s * 1e6, "us"),
        Figure(
            "index_select of share(tensor), of it", shared_share * 100, "%", ">= 95", shared_share >= 0.95
        ),
        Figure(
            "store.take(out=) of a list of tensors, of it", take_share * 100, "%", ">= 95", take_share >= 0.95
        ),
    ]


def measure_mapping(rows: int) -> list[Figure]:
    import shmloader

    rows //= 4
    data = {f"key{number:09d}": number for number in range(rows)}
    store = shmloader.share(data)
    keys = random.Random(0).choices(list(data), k=50_000)
    read_ns = nanoseconds_per_call(store.__getitem__, keys)
    return [
        Figure(f"mapping of {rows:,} str to int: shared memory per item", store.nbytes / rows, "bytes"),
        Figure("mapping[key], random keys, median", read_ns / 1000, "us"),
    ]


def measure_shapes(rows: int) -> list[Figure]:
    from benchmarks import store_shapes

    return [Figure(*line) for line in store_shapes.measure(max(rows // 40, 1000))]


MEASURES: dict[str, Callable[[int], list[Figure]]] = {
    "list": measure_list,
    "store": measure_store,
    "stream": measure_stream,
    "peak": measure_peak,
    "take": measure_take,
    "mapping": measure_mapping,
    "shapes": measure_shapes,
}


def in_a_fresh_process(name: str, rows: int) -> Iterator[Figure]:
    command = [sys.executable, __file__, "--measure", name, "--rows", str(rows)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"error: measuring {name} with {rows:,} rows ended with {done.returncode}")
    for figure in json.loads(done.stdout.splitlines()[-1]):
        yield Figure(**figure)


def ratio(figures: list[Figure]) -> Figure:
    """The list's size over the store's."""
    sizes = {figure.what: figure.value for figure in figures}
    of_list = next(value for what, value in sizes.items() if what.startswith("list of"))
    times = of_list / sizes["the store: shared memory"]
    return Figure("the list is larger than the store by", times, "times", ">= 8", times >= 8)


def print_table(figures: list[Figure]) -> None:
    print(f"{'':<52}{'figure':>15}  {'unit':<12}{'goal':<8}")
    for figure in figures:
        value = (
            f"{figure.value:,.0f}"
            if figure.unit == "bytes" and figure.value > 1000
            else f"{figure.value:,.2f}"
        )
        verdict = {None: "", True: "reached", False: "MISSED"}[figure.reached]
        print(f"{figure.what:<52}{value:>15}  {figure.unit:<12}{figure.goal:<8}{verdict}")


def main() -> int:
    """Measures everything; 3 if the JSON could not be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"a tenth of the rows, or {LEAST_ROWS:,}")
    parser.add_argument("--json", type=result_file, help="write the figures to this file")
    parser.add_argument("--rows", type=whole_number(LEAST_ROWS), default=ROWS)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps([asdict(figure) for figure in MEASURES[options.measure](options.rows)]))
        return 0
    rows = max(options.rows // 10, LEAST_ROWS) if options.quick else options.rows
    figures: list[Figure] = []
    for name in MEASURES:
        figures += in_a_fresh_process(name, rows)
    figures.insert(2, ratio(figures))
    print_table(figures)
    if options.json and not write_json(options.json, [asdict(figure) for figure in figures]):
        return NOT_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
