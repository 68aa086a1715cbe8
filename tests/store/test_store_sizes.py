"""What a store takes is known before it is built; what rows share is counted once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shmloader import SharedMemoryExhausted, share
from shmloader.host.limits import Headroom
from shmloader.shared_memory.sealed_buffer import BufferBuilder
from shmloader.store import room
from shmloader.store.size import SizeEstimate, estimate_nbytes

MIB = 1 << 20


class Reserved:
    """How many bytes have been reserved in all, by scratch memory too."""

    nbytes = 0


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> type[Reserved]:
    """On a host with room for 100 MiB."""
    monkeypatch.setattr(room, "memory_headroom", lambda: Headroom(100 * MIB, 200 * MIB, "a small cgroup"))
    reserve = BufferBuilder.reserve
    Reserved.nbytes = 0

    def counted(self: BufferBuilder, nbytes: int) -> None:
        Reserved.nbytes += max(0, nbytes - self.reserved_nbytes)
        reserve(self, nbytes)

    monkeypatch.setattr(BufferBuilder, "reserve", counted)
    return Reserved


class Rows(Sequence[Any]):
    """A sequence that is no list: what it holds is not to be seen from outside."""

    def __init__(self, rows: list[Any], broken: bool = False) -> None:
        self._rows = rows
        self._broken = broken

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if self._broken:
            raise RuntimeError("no access by number")
        return self._rows[index]

    def __iter__(self) -> Any:
        return iter(self._rows)


def texts() -> list[str]:
    return [f"{number:0700d}" for number in range(200_000)]


TOO_LARGE: dict[str, Any] = {
    "a list": texts,
    "a tuple": lambda: tuple(texts()),
    "a dict": lambda: dict(enumerate(texts())),
    "another sequence": lambda: Rows(texts()),
    "an array of objects": lambda: np.array(texts(), object),
    "a few large rows": lambda: [np.empty(4 * MIB, np.uint8) for _ in range(40)],
    "rows of which each has its own and a shared part": lambda: [
        {"own": text, "shared": SHARED} for text in texts()
    ],
}
SHARED = np.zeros(MIB)


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_what_is_certain_not_to_fit_is_refused_before_it_is_begun(
    kind: str, reserved: type[Reserved]
) -> None:
    data = TOO_LARGE[kind]()
    with pytest.raises(SharedMemoryExhausted, match=r"needs about 1\d\d,\d{3},\d{3} bytes .* 104,857,600 of"):
        share(data)
    assert reserved.nbytes < 20 * MIB  # for the sample


def test_a_large_pandas_frame_is_refused_before_it_is_begun(reserved: type[Reserved]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": texts(), "n": range(200_000)})
    for data in (frame, frame["text"]):
        with pytest.raises(SharedMemoryExhausted, match=r"these 200,000 rows needs about 14\d,\d{3},\d{3}"):
            share(data)
    assert reserved.nbytes < 2 * MIB


def test_a_sequence_that_is_only_iterated_over_is_built_all_the_same(reserved: type[Reserved]) -> None:
    assert len(share(Rows([{"n": n} for n in range(5000)], broken=True))) == 5000


FITTING: dict[str, Any] = {
    "one array in all rows": lambda: [{"a": SHARED, "n": n, "s": f"{n:050}"} for n in range(200_000)],
    "one row many times": lambda: [{"a": SHARED}] * 200_000,
    "an array in thousands of rows": lambda: [
        {"clip": clip, "n": n} for clip in list(np.zeros((500, 15_000))) for n in range(400)
    ],
    "a dict of rows that share": lambda: {n: (n, SHARED) for n in range(200_000)},
}


@pytest.mark.parametrize("kind", FITTING)
def test_what_rows_share_is_counted_once(kind: str, reserved: type[Reserved]) -> None:
    store = share(FITTING[kind]())
    assert len(store) == 200_000
    assert store.nbytes < 70 * MIB


def test_the_estimate_counts_what_chunks_share_once() -> None:
    words = [f"word {number}" for number in range(50_000)]
    words_nbytes = sys.getsizeof(words) + sum(map(sys.getsizeof, words))
    rows = [{"n": n, "words": words} for n in range(30_000)]
    row_nbytes = sys.getsizeof(rows[0]) + 28 + 8
    wanted = words_nbytes + 30_000 * row_nbytes
    assert estimate_nbytes(rows) == pytest.approx(wanted, rel=0.1)
    for data in (rows, iter(rows)):
        assert share(data).describe().python_nbytes == pytest.approx(wanted, rel=0.1)
    assert estimate_nbytes(dict(enumerate(rows))) == pytest.approx(wanted, rel=0.3)


def test_an_estimate_of_equal_rows_is_their_number_times_one() -> None:
    estimate = SizeEstimate()
    estimate.add([bytes(1000) + bytes([n % 256]) for n in range(1000)])
    assert estimate.nbytes == 1000 * (sys.getsizeof(bytes(1001)) + 8)
