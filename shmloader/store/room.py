"""Whether a container is certain not to fit into memory, before anything of it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from shmloader.errors import SharedMemoryExhausted
from shmloader.host.limits import memory_headroom
from shmloader.store.encode import ValueEncoder
from shmloader.store.kept import Kept
from shmloader.store.one_buffer import new_builder
from shmloader.store.size import mean_stored_nbytes, nbytes_of_rows

_SAMPLED_ROWS = 256
_SAMPLED_ACCESSES = 32  # of sequences that may make a row at each access
_LEAST_ROWS = 16
_SURE_NBYTES = 64 << 20  # what takes less as Python objects is built without looking ahead
_MOST_SAMPLE_NBYTES = 64 << 20
_LARGE_ROW_NBYTES = 1 << 20


def check_rows(data: Sequence[Any] | np.ndarray[Any, Any], kept: Kept | None = None) -> None:
    """Raise SharedMemoryExhausted if the store of some rows is certain not to fit.

    What is only nearly too large is found while it is built.

    Args:
        data: The rows.
        kept: What is in memory already and is referred to.
    """
    if isinstance(data, list | tuple | np.ndarray):
        step = max(1, len(data) // _SAMPLED_ROWS)
        check_sample(list(data[::step]), len(data), "rows", data, kept)
        return
    numbers = range(0, len(data), max(1, len(data) // _SAMPLED_ACCESSES))
    try:
        sample = [data[number] for number in numbers]
    except Exception:  # noqa: BLE001 - whatever it raises, it will raise once more when it is iterated over
        return
    check_sample(sample, len(data), "rows", ())


def check_items(data: dict[Any, Any], kept: Kept | None = None) -> None:
    """As `check_rows`, for the items of a dict."""
    step = max(1, len(data) // _SAMPLED_ROWS)
    check_sample(list(islice(data.items(), 0, None, step)), len(data), "items", data.values(), kept)


def check_sample(
    sample: list[Any], rows: int, unit: str, data: Iterable[Any], kept: Kept | None = None
) -> None:
    """As `check_rows`.

    Args:
        sample: Some of the rows, evenly spaced.
        rows: How many there are.
        unit: What they are called.
        data: All of them, if they can be looked at cheaply, else none.
        kept: As in `check_rows`.
    """
    python_nbytes = nbytes_of_rows(sample, rows)
    if rows < _LEAST_ROWS or python_nbytes < _SURE_NBYTES:
        return
    once_nbytes, others_nbytes = _needed_nbytes(sample, rows, python_nbytes / rows, kept)
    room = memory_headroom()
    if 0.9 * (once_nbytes + others_nbytes) > room.available_nbytes:
        # Rows that share what the sample holds once only: to be sure, all are looked at.
        others_nbytes *= _distinct_share(data, sample, kept)
    needed_nbytes = round(once_nbytes + others_nbytes)
    if 0.9 * needed_nbytes > room.available_nbytes:
        raise SharedMemoryExhausted(
            f"a store of these {rows:,} {unit} needs about {needed_nbytes:,} bytes of shared memory, but "
            f"only {room.available_nbytes:,} of {room.limit_nbytes:,} bytes are available in {room.source}. "
            "Share less of it, raise the limit, or keep the data in a file: shmloader.open(path) maps Arrow "
            "IPC files that may be larger than memory.",
            needed_nbytes=needed_nbytes,
            available_nbytes=room.available_nbytes,
        )


def _needed_nbytes(sample: list[Any], rows: int, row_nbytes: float, kept: Kept | None) -> tuple[float, float]:
    """Bytes that are needed once, about, and those that the number of rows decides on."""
    if row_nbytes > _LARGE_ROW_NBYTES:
        return 0, mean_stored_nbytes(sample) * rows
    sample = sample[: max(4, int(_MOST_SAMPLE_NBYTES / max(row_nbytes, 1)))]
    with new_builder() as out:
        encoder = ValueEncoder(out, Kept(out, earlier=kept))
        # The first half pays for what all rows share: the second half only refers to it.
        encoder.encode(sample[::2])
        half_nbytes = out.nbytes
        encoder.encode(sample[1::2])
        each_nbytes = (out.nbytes - half_nbytes) / (len(sample) // 2)
    return half_nbytes, each_nbytes * max(0, rows - (len(sample) + 1) // 2)


def _distinct_share(data: Iterable[Any], sample: list[Any], kept: Kept | None) -> float:
    """How many objects rows refer to, of all references: 1 if nothing is shared, 0 if all is there already.

    What the sample refers to is left out, since it has paid for that.
    """
    there = np.fromiter(kept.ids() if kept else (), np.int64)
    parts = chain.from_iterable(map(_parts, data))
    paid = chain.from_iterable(map(_parts, sample))
    return min(_share(map(id, data), map(id, sample), there), _share(map(id, parts), map(id, paid), there))


def _share(ids: Iterator[int], paid: Iterator[int], there: np.ndarray[Any, Any]) -> float:
    numbers = np.fromiter(ids, np.int64)
    numbers = numbers[~np.isin(numbers, np.fromiter(paid, np.int64))]
    new = numbers[~np.isin(numbers, there)]
    return len(np.unique(new)) / len(numbers) if len(numbers) else 1.0


def _parts(row: Any) -> Iterable[Any]:
    """What of a row takes room of its own."""
    if isinstance(row, Mapping):
        parts: Iterable[Any] = row.values()
    elif isinstance(row, list | tuple):
        parts = row
    else:
        parts = getattr(row, "__dict__", {}).values()
    return [part for part in parts if not _is_short(part)]


def _is_short(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return len(value) < 64
    return value is None or isinstance(value, int | float)
