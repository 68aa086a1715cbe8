"""What a store is to reach, figure by figure: `python -m benchmarks.store_goals` prints one table.

Uses public names only, so an older checkout is measured with ``PYTHONPATH=../before python
benchmarks/store_goals.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import shmloader
from benchmarks.store_shapes import coco

Line = tuple[str, float, str, float | None]
"""What was measured, the figure, its unit, and what it must not exceed."""


def mixed(number: int) -> dict[str, Any]:
    """A row of a wide table."""
    kinds: list[Callable[[int], Any]] = [int, float, lambda n: f"text {n}", lambda n: n % 3 == 0]
    return {f"field {place}": kinds[place % 4](number + place) for place in range(40)}


SHAPES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "path and label": (lambda n: {"path": f"train/{n:08}.jpg", "label": n % 1000}, 200_000),
    "COCO": (coco, 50_000),
    "20 texts": (lambda n: {f"text {place}": f"{n} and {place}" for place in range(20)}, 20_000),
    "40 mixed": (mixed, 20_000),
}


def best_us(call: Callable[[Any], Any], arguments: list[Any], times: int = 7) -> float:
    """The least mean time of a call over several rounds, in microseconds."""
    least = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        for argument in arguments:
            call(argument)
        least = min(least, time.perf_counter() - begin)
    return least / len(arguments) * 1e6


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """The time of one call, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def rows() -> Iterator[Line]:
    """Time of each row of several shapes."""
    for name, (make, count) in SHAPES.items():
        store = shmloader.share([make(number) for number in range(count)])
        some = random.Random(0).choices(range(count), k=5000)
        yield f"a row of {name}", best_us(store.__getitem__, some), "us", 10


def first_rows() -> Iterator[Line]:
    """The first rows of wide records, which make their readers."""
    draw = random.Random(0)
    keys = [f"key {n}" for n in range(200)]
    records = [{key: n for key in keys if draw.random() < 0.5} for n in range(70)]
    store = shmloader.share(records)
    yield "first 70 rows of 200 optional keys", seconds(lambda: list(store))[0] * 1e3, "ms", 20
    equal = shmloader.share([{f"key {place}": n for place in range(1000)} for n in range(70)])
    yield "first 70 rows of 1,000 equal fields", seconds(lambda: list(equal))[0] * 1e3, "ms", 100


def gathered() -> Iterator[Line]:
    """`take` of each type of numbers, beside that of float64."""
    count, draw = 100_000, random.Random(0)
    numbers = draw.choices(range(count), k=4096)
    columns: dict[str, list[Any]] = {
        "float64": [n / 7 for n in range(count)],
        "int8": [n % 100 for n in range(count)],
        "int32": [n * 1000 for n in range(count)],
        "int64": [n << 33 for n in range(count)],
        "bool": [n % 3 == 0 for n in range(count)],
        "float64 with nulls": [n / 7 if n % 5 else None for n in range(count)],
        "int32 with nulls": [n * 1000 if n % 5 else None for n in range(count)],
        "bool with nulls": [n % 3 == 0 if n % 5 else None for n in range(count)],
        "lists of 2": [[n / 7, 1.5] for n in range(count)],
    }
    columns |= {f"NumPy's {code}": list(np.arange(count).astype(code)) for code in ("f4", "u1", "u8", "i2")}
    plain_us = 0.0
    for name, values in columns.items():
        store = shmloader.share(values)
        store.take(numbers)
        taken = best_us(store.take, [numbers] * 10)
        plain_us = plain_us or taken
        yield f"take of 4,096 {name}", taken, "us", 3 * plain_us if name != "float64" else None


def _window_of(data: Any) -> Callable[[int], Any]:
    return lambda n: torch.tensor(data[n : n + 64])


def windows() -> Iterator[Line]:
    """Windows of lists of floats as tensors, in samples per second, of those of a plain list."""
    plain = [[n / 3 + place for place in range(8)] for n in range(100_000)]
    flat = [n / 3 for n in range(100_000)]
    begins = random.Random(0).choices(range(99_000), k=500)
    for name, values in (("floats", flat), ("lists of 8 floats", plain)):
        store = shmloader.share(values)
        theirs, ours = (best_us(_window_of(data), begins) for data in (values, store))
        yield f"torch.tensor of 64 {name}, of a list's time", ours / theirs, "times", 2


def building() -> Iterator[Line]:
    """`share` of many small objects, and of rows of which one cannot be kept."""

    class Small:
        def __init__(self, number: int) -> None:
            self.number, self.text = number, f"text {number}"

    class Holder(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.small = [Small(n) for n in range(200_000)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken, _ = seconds(lambda: shmloader.share(Holder()))
    what = f"share of 200,000 small objects ({len(caught)} warning)"
    yield what, taken, "s", 2
    bad: list[Any] = [{"path": f"{n}.jpg", "label": n} for n in range(200_000)]
    bad[150_000]["label"] = lambda: None

    def refused() -> str:
        try:
            shmloader.share(bad)
        except Exception as error:  # noqa: BLE001 - whatever pickling raises
            return " ".join(getattr(error, "__notes__", ()))
        return ""

    taken, said = seconds(refused)
    yield f"naming the bad row of 200,000 ({'150000' in said})", taken, "s", 1


def large_files() -> Iterator[Line]:
    """Stores of many chunks: what describes them, and one field's first row."""
    store = shmloader.share(iter([{"label": n, "path": str(n)} for n in range(1 << 20)]))
    yield f"repr of {len(store):,} rows", best_us(repr, [store] * 3), "us", None
    yield "nbytes", best_us(lambda one: one.nbytes, [store] * 3), "us", None
    import pyarrow as pa

    batch = pa.record_batch({"label": list(range(100)), "path": [str(n) for n in range(100)]})
    store = shmloader.share(pa.Table.from_batches([batch] * 1000))
    store["label"][5]
    yield "1,000 chunks: store['label'][i]", best_us(lambda n: store["label"][n], [50_123] * 10), "us", None
    yield "1,000 chunks: nbytes", best_us(lambda one: one.nbytes, [store] * 5), "us", None
    yield "1,000 chunks: repr", best_us(repr, [store] * 5), "us", None


class Coco(torch.utils.data.Dataset[Any]):
    """Annotations in pycocotools' shapes, read as torchvision's ``CocoDetection`` reads them."""

    def __init__(self, images: int = 25_000) -> None:
        draw = random.Random(0)
        boxes: list[dict[str, Any]] = [
            coco(number)
            | {
                "image_id": number // 7,
                "segmentation": [[round(draw.random() * 640, 2) for _ in range(draw.randrange(20, 60))]],
            }
            for number in range(images * 7)
        ]
        found = [{"id": n, "file_name": f"{n:012d}.jpg", "height": 480, "width": 640} for n in range(images)]
        self.dataset = {"images": found, "annotations": boxes}
        self.imgs: dict[int, dict[str, Any]] = dict(enumerate(found))
        self.anns = {box["id"]: box for box in boxes}
        self.by_image: dict[int, list[Any]] = {}
        for box in boxes:
            self.by_image.setdefault(box["image_id"], []).append(box)
        self.ids = sorted(self.imgs)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        image = self.ids[index]
        numbers = [box["id"] for box in self.by_image[image]]
        return self.imgs[image]["file_name"], [self.anns[number] for number in numbers]


def private_nbytes() -> int:
    """Bytes of this process's own."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:  # noqa: PTH123
        found = {line.split(":")[0]: line.split()[1] for line in list(file)[1:]}
    return (int(found["Private_Dirty"]) + int(found["Private_Clean"])) << 10


def _read_all(data: Any, pipe: Any) -> None:
    before = private_nbytes()
    for index in range(len(data)):
        data[index]
    pipe.send(private_nbytes() - before)


def growth_nbytes(data: Any) -> int:
    """Bytes by which a forked process grows that reads all samples."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_read_all, args=(data, theirs))
    process.start()
    grown: int = ours.recv()
    process.join()
    return grown


def coco_in_workers() -> Iterator[Line]:
    """A sample of COCO, and what a worker copies of it."""
    data = Coco()
    some = random.Random(0).choices(range(len(data)), k=1000)
    yield "COCO by pycocotools, plain: a sample", best_us(data.__getitem__, some), "us", None
    plain = growth_nbytes(data)
    yield "COCO, plain: growth of a worker", plain / 1e6, "MB", None
    size = len(pickle.dumps(data, 5))
    shared = shmloader.share(data)
    yield "COCO, shared: a sample", best_us(shared.__getitem__, some), "us", 40
    grown = growth_nbytes(shared)
    yield "COCO, shared: growth of a worker", grown / 1e6, "MB", None
    yield (
        f"COCO, shared: growth, of what a plain worker copies ({size / 1e6:.0f} MB pickled)",
        (100 * grown / plain),
        "%",
        2,
    )


PARTS: dict[str, Callable[[], Iterator[Line]]] = {
    part.__name__: part
    for part in (rows, first_rows, gathered, windows, building, large_files, coco_in_workers)
}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, if none is named")
    for name in parser.parse_args().parts or PARTS:
        for what, figure, unit, most in PARTS[name]():
            verdict = (
                "" if most is None else f"at most {most:,.4g}: " + ("reached" if figure <= most else "MISSED")
            )
            print(f"{what:<75}{figure:>12,.2f} {unit:<6}{verdict}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
