"""Data of real shapes in stores, beside other ways to keep Python's records in one piece of memory.

Sizes are of the data as each contestant keeps it, without any copies. All give Python objects when they are
read. Contestants that are not installed are left out with a message.
"""

from __future__ import annotations

import datetime as dt
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import shmloader

READ_ROWS = 2000


def coco(number: int) -> dict[str, Any]:
    """An annotation as in COCO's files."""
    box = [number % 640 + 0.5, number % 480 + 0.25, number % 97 + 1.0, number % 89 + 2.5]
    outline = [float((number * 7 + place * 13) % 6400) / 10 for place in range(8 + number % 5 * 4)]
    return {
        "id": number,
        "image_id": number // 7,
        "category_id": number % 80,
        "area": box[2] * box[3],
        "bbox": box,
        "iscrowd": 0,
        "segmentation": [outline],
    }


def tokens(number: int) -> dict[str, Any]:
    """A text as numbers of words."""
    length = 64 + number % 192
    return {"input_ids": [(number * 31 + place * 17) % 50_000 for place in range(length)], "length": length}


def image_bytes(number: int) -> dict[str, Any]:
    """An encoded image."""
    return {"image": random.Random(number).randbytes(2000 + number % 4000), "label": number % 1000}


def boxes(number: int) -> dict[str, Any]:
    """Boxes of an image, as an array."""
    return {"image": f"{number:012d}.jpg", "boxes": np.full((number % 9, 4), number, np.float32)}


def paths(number: int) -> dict[str, Any]:
    """A path and a time."""
    taken = dt.datetime(2020, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=number * 61)
    return {
        "path": Path(f"/data/camera{number % 20}/{number:09d}.png"),
        "taken": taken,
        "camera": f"camera {number % 20}",
    }


def optional(number: int) -> dict[str, Any]:
    """A record that has some of many keys."""
    row: dict[str, Any] = {"id": number, "title": f"title of {number}"}
    return row | {f"tag {place}": number % (place + 2) for place in range(12) if (number + place) % 3}


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "COCO annotations": coco,
    "tokens": tokens,
    "image bytes": image_bytes,
    "ragged boxes": boxes,
    "Path and datetime": paths,
    "optional keys": optional,
}


class Pickles:
    """A pickle per record in one array, with offsets: detectron2's ``DatasetFromList``."""

    def __init__(self, rows: list[Any]) -> None:
        pickled = [pickle.dumps(row, 5) for row in rows]
        self.ends = np.cumsum([0, *map(len, pickled)])
        self.data = np.frombuffer(b"".join(pickled), np.uint8)
        self.nbytes = self.data.nbytes + self.ends.nbytes

    def __getitem__(self, index: int) -> Any:
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]].data)


class TorchSerializedList:
    """The same with tensors, as in torch's tutorials."""

    def __init__(self, rows: list[Any]) -> None:
        pickled = [pickle.dumps(row, -1) for row in rows]
        self.ends = torch.cumsum(torch.tensor([0, *map(len, pickled)]), 0)
        self.data = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        self.nbytes = self.data.nbytes + self.ends.nbytes

    def __getitem__(self, index: int) -> Any:
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]].numpy().tobytes())


class PlainArrow:
    """An Arrow table; rows are read as ``to_pylist`` reads them."""

    def __init__(self, rows: list[Any]) -> None:
        self.table = pa.Table.from_pylist([_for_arrow(row) for row in rows])
        self.nbytes = self.table.nbytes

    def __getitem__(self, index: int) -> Any:
        return self.table.slice(index, 1).to_pylist()[0]


class HuggingFace:
    """A ``datasets.Dataset`` in memory."""

    def __init__(self, rows: list[Any]) -> None:
        import datasets

        self.data = datasets.Dataset.from_list([_for_arrow(row) for row in rows])
        self.nbytes = self.data.data.nbytes

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def _for_arrow(row: dict[str, Any]) -> dict[str, Any]:
    """A record converted to types that Arrow has."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in row.items()}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in plain.items()}


CONTESTANTS: dict[str, Callable[[list[Any]], Any]] = {
    "shmloader": shmloader.share,
    "detectron2's list": Pickles,
    "torch's serialized list": TorchSerializedList,
    "plain Arrow": PlainArrow,
    "Hugging Face datasets": HuggingFace,
}


def measure(count: int) -> Iterator[tuple[str, float, str]]:
    """Size and reading time of each shape in each contestant: name, figure and unit."""
    chosen = random.Random(0).choices(range(count), k=READ_ROWS)
    for shape, make in SHAPES.items():
        rows = [make(number) for number in range(count)]
        kept = {}
        for name, build in CONTESTANTS.items():
            try:
                kept[name] = build(rows)
            except ImportError as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
        times: dict[str, list[int]] = {name: [] for name in kept}
        turns = list(kept)
        for index in chosen:
            # In turns, so that other load of the machine hits all alike, and in any order: after a slow
            # one there is less of one's own in the processor's cache.
            random.shuffle(turns)
            for name in turns:
                data = kept[name]
                begin = time.perf_counter_ns()
                data[index]
                times[name].append(time.perf_counter_ns() - begin)
        for name, data in kept.items():
            yield f"{shape}, {name}: per row", data.nbytes / count, "bytes/row"
            yield f"{shape}, {name}: [i], median", statistics.median(times[name]) / 1000, "us"
