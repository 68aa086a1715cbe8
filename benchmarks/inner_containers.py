"""Large lists and dicts inside of shared data, beside the same data as Python objects.

Reads of an inner container, and of one of its items; windows of numbers and arrays as tensors. Each call is
timed, of Python's objects and of the store in turns; figures are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import shmloader
from benchmarks.options import whole_number
from benchmarks.tables import Columns, table_of

COUNTS = (32, 33, 500)
WINDOW = 64


def texts(count: int, items: int) -> list[Any]:
    """Lists of texts."""
    return [[f"text {number} of {inner}" for number in range(items)] for inner in range(count)]


def record(number: int) -> dict[str, Any]:
    """A sample of a speaker."""
    return {"path": f"{number:08}.wav", "label": number % 10, "length_s": number / 7}


def records(count: int, items: int) -> dict[str, Any]:
    """Lists of records, by speaker."""
    return {f"speaker {inner}": list(map(record, range(items))) for inner in range(count)}


def dicts(count: int, items: int) -> dict[str, Any]:
    """Dicts of records, by speaker."""
    speakers = [f"speaker {inner}" for inner in range(count)]
    return {speaker: {str(number): record(number) for number in range(items)} for speaker in speakers}


def trie(count: int, items: int) -> dict[str, Any]:
    """Words by their letters."""
    draw, root = random.Random(0), dict[str, Any]()
    letters = [chr(0x4E00 + number) for number in range(count)]
    for first in letters:
        for _ in range(items):
            node = root.setdefault(first, {})
            for letter in draw.choices(letters, k=3):
                node = node.setdefault(letter, {})
            node["end"] = True
    return root


def item_of(inner: Any, draw: random.Random) -> Any:
    """The number or key of one of the items of a container."""
    return draw.randrange(len(inner)) if isinstance(inner, list) else draw.choice(list(inner))


Call = Callable[[Any, Any, Any], Any]
"""Uses data, with a key in it and one in what it leads to; or with the ends of a slice."""


def median_us(call: Call, kept: dict[str, Any], arguments: list[tuple[Any, Any]]) -> dict[str, float]:
    """The median time of a call with each of the ways to keep some data, in microseconds."""
    taken: dict[str, list[int]] = {name: [] for name in kept}
    for one, other in arguments:
        for name, data in kept.items():
            begin = time.perf_counter_ns()
            call(data, one, other)
            taken[name].append(time.perf_counter_ns() - begin)
    return {name: statistics.median(some) / 1000 for name, some in taken.items()}


def measure_reads(items: int, times: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Times of `[key]` and `[key][item]` for each shape and count."""
    for make in (texts, records, dicts, trie):
        for count in COUNTS:
            data, draw = make(count, items), random.Random(0)
            kept = {"Python": data, "shmloader": shmloader.share(data)}
            keys = [item_of(data, draw) for _ in range(times)]
            arguments = [(key, item_of(data[key], draw)) for key in keys]
            name = f"{count} {make.__name__}"
            yield f"{name}, [key]", median_us(lambda data, one, _: data[one], kept, arguments)
            yield (
                f"{name}, [key][item]",
                median_us(lambda data, one, other: data[one][other], kept, arguments),
            )


def measure_windows(times: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Times of slices as tensors and arrays."""
    count = times + WINDOW
    floats = [number / 3 for number in range(count)]
    boxes = [[number / 2, 1.0, 2.0, 3.0] for number in range(count)]
    arrays = [np.arange(8, dtype=np.float32) + number for number in range(count)]
    tensors = list(map(torch.from_numpy, arrays))
    kinds: dict[str, tuple[list[Any], Call]] = {
        "floats, torch.tensor": (floats, lambda data, one, other: torch.tensor(data[one:other])),
        "floats, np.array": (floats, lambda data, one, other: np.array(data[one:other])),
        "lists of four floats, torch.tensor": (boxes, lambda data, one, other: torch.tensor(data[one:other])),
        "arrays of 8 float32, np.array": (arrays, lambda data, one, other: np.array(data[one:other])),
        "tensors, torch.stack of a list and torch.tensor of a store": (tensors, _stack),
    }
    arguments = [(number, number + WINDOW) for number in range(times)]
    for name, (data, call) in kinds.items():
        kept = {"Python": data, "shmloader": shmloader.share(data)}
        yield f"windows of {WINDOW} {name}", median_us(call, kept, arguments)


def _stack(data: Any, begin: int, end: int) -> torch.Tensor:
    window = data[begin:end]
    return torch.stack(window) if isinstance(window, list) else torch.tensor(window)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=whole_number(1), default=2500, help="items of each inner container")
    parser.add_argument("--times", type=whole_number(1), default=2000, help="calls of each kind")
    options = parser.parse_args()
    lines = [*measure_reads(options.items, options.times), *measure_windows(options.times)]
    columns: Columns[tuple[str, dict[str, float]]] = [
        ("microseconds per call", lambda line: line[0]),
        ("Python", lambda line: f"{line[1]['Python']:.2f}"),
        ("shmloader", lambda line: f"{line[1]['shmloader']:.2f}"),
    ]
    print(table_of(columns, lines, texts=1))


if __name__ == "__main__":
    main()
