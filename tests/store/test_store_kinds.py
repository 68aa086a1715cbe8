"""Every kind of stored value has all that a kind needs: a kind that lacks something fails here."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import lzma
import uuid
import zoneinfo
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from store_samples import Colour, Frozen, Person, Point, Slotted, same

import shmloader
from shmloader.store.columns import kind as kind_module
from shmloader.store.columns.arrays import Arrays, Scalars
from shmloader.store.columns.buffers import texts_to_arrow
from shmloader.store.columns.kind import Kind, PythonType, kind_of, types_in
from shmloader.store.columns.lists import FixedLists, Lists, Maps, Sets
from shmloader.store.columns.mixed import Dictionaries, Links, Others, Unions
from shmloader.store.columns.records import Dataclasses, Keys, Namedtuples, Records, Tuples
from shmloader.store.columns.times import Dates, Datetimes, Durations, Times, ZonedDatetimes
from shmloader.store.columns.values import (
    Bools,
    Decimals,
    Enums,
    FixedOctets,
    Floats,
    Ints,
    Nulls,
    Octets,
    Paths,
    Pickles,
    Texts,
    Uuids,
)
from shmloader.store.handles import pack, unpack
from shmloader.store.take import join

DAY = dt.datetime(2024, 5, 17, 12, 30, 15, 250)  # noqa: DTZ001
ROWS = 100

VALUES: dict[type[Kind], list[Any]] = {
    Nulls: [None] * ROWS,
    Ints: [n * n for n in range(ROWS)],
    Floats: [n / 7 for n in range(ROWS)],
    Bools: [n % 3 == 0 for n in range(ROWS)],
    Texts: [f"text {n}" for n in range(ROWS)],
    Octets: [bytes([n, 0]) for n in range(ROWS)],
    Dates: [DAY.date() + dt.timedelta(n) for n in range(ROWS)],
    Times: [dt.time(n % 24, n % 60, 59 - n % 60, 999_999 - n) for n in range(ROWS)],
    Durations: [dt.timedelta(n, -n, 5) for n in range(ROWS)],
    Datetimes: [DAY - dt.timedelta(n * 1000, n) for n in range(ROWS)],
    ZonedDatetimes: [DAY.replace(tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo")) for n in range(ROWS)],
    Decimals: [decimal.Decimal(f"{n}.50") for n in range(ROWS)],
    Uuids: [uuid.UUID(int=n) for n in range(ROWS)],
    Paths: [PurePosixPath(f"a/{n}") for n in range(ROWS)],
    Enums: [[Colour.RED, Colour.BLUE][n % 2] for n in range(ROWS)],
    Pickles: [complex(n, 1) for n in range(ROWS)],
    Scalars: [np.float32(n / 3) for n in range(ROWS)],
    Arrays: [np.full((2, 3), n, np.int16) for n in range(ROWS)],
    Lists: [[n] * (n % 4) for n in range(ROWS)],
    FixedLists: [[n, n + 1] for n in range(ROWS)],
    Sets: [{n, n + 1} for n in range(ROWS)],
    Maps: [{n: str(n)} for n in range(ROWS)],
    Records: [{"a": n, "b": str(n)} for n in range(ROWS)],
    Keys: [{"a": n, **({"b": n} if n % 2 else {})} for n in range(ROWS)],
    Tuples: [(n, str(n)) for n in range(ROWS)],
    Namedtuples: [Point(n, 2.0) for n in range(ROWS)],
    Dataclasses: [Person(str(n), n) for n in range(ROWS)],
    Unions: [n if n % 2 else str(n) for n in range(ROWS)],
    Dictionaries: ["ab"[n % 2] for n in range(ROWS)],
}
ARROW = {
    FixedOctets: pa.array([b"ab", b"cd"] * 50, pa.binary(2)),
    Others: pa.array([DAY.time()] * ROWS, pa.time32("s")),
}
MEMORY_ONLY = {
    Links: "rows of a container that was written before: test_rows_of_another_container_have_fields"
}
WITH_BLOCKS = {Ints, Floats, Bools, Scalars, Arrays, FixedLists}


def kinds_below(kind: type[Kind]) -> Iterator[type[Kind]]:
    for one in kind.__subclasses__():
        if one is not PythonType and not one.__name__.startswith("_"):
            yield one
        yield from kinds_below(one)


KINDS = sorted(set(kinds_below(Kind)) - set(MEMORY_ONLY), key=lambda kind: kind.__name__)


def data_of(kind: type[Kind]) -> tuple[Any, list[Any]]:
    """Data with values of a kind to share, and its rows."""
    return (VALUES[kind], VALUES[kind]) if kind in VALUES else (ARROW[kind], ARROW[kind].to_pylist())


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_written_read_united_saved_gathered_and_described(
    kind: type[Kind], tmp_path: Path
) -> None:
    data, rows = data_of(kind)
    store = shmloader.share(data)
    assert kind in {type(kind_of(one)) for one in types_in(store.field(0).type)}
    assert same(list(store), rows)
    for gathered in (range(ROWS), list(range(0, ROWS, 3))):
        assert same(store.take(gathered), join([rows[n] for n in gathered], None))
    store.save(tmp_path / "x.arrow")
    assert same(list(shmloader.open(tmp_path / "x.arrow", allow_pickle=True)), rows)
    described = store.describe()
    assert "shmloader." not in str(described)
    assert described.fields[0].type


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_stands_beside_none_and_in_chunks_of_other_types(kind: type[Kind], tmp_path: Path) -> None:
    rows = [None if n % 10 == 3 else value for n, value in enumerate(VALUES[kind])]
    store = shmloader.share(rows)
    assert same(list(store), rows)
    assert same(store.take(range(ROWS)), rows)
    mixed = VALUES[kind] + [None] * 200 + rows + [{"other": 1}] + VALUES[kind]
    stream = shmloader.share(iter(mixed))
    assert len(stream.chunks.starts) > 3
    stream.save(tmp_path / "x.arrow")
    for found in (stream, shmloader.open(tmp_path / "x.arrow", allow_pickle=True)):
        assert same(list(found), mixed)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_arrays_are_gathered_as_blocks_and_nothing_else_is(kind: type[Kind]) -> None:
    column = shmloader.share(data_of(kind)[0]).field(0)
    found = kind_of(column.type)
    assert (type(found) is kind and found.block(column, None) is not None) == (kind in WITH_BLOCKS)


NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 bool".split()


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("nulls", [False, True])
def test_every_type_of_numbers_is_gathered_by_columns_from_any_chunk(
    name: str, nulls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = np.arange(1000) % 120
    numbers = counts % 2 == 0 if name == "bool" else counts.astype(name)
    whole = pa.array(numbers, mask=counts == 7 if nulls else None)
    chunks = [whole[:300], whole[313:340], whole[300:313], whole[341:]]
    store = shmloader.share(pa.chunked_array(chunks))
    rows = [value for chunk in chunks for value in chunk.to_pylist()]
    store.take(range(ROWS))
    monkeypatch.setattr("shmloader.store.chunks.Column.__call__", None)  # no row is read by itself
    for chosen in (range(len(rows)), np.random.default_rng(0).integers(0, len(rows), 500)):
        assert same(store.take(chosen), join([rows[n] for n in chosen], None))
    kind = {"f": torch.float64, "b": torch.bool}.get(np.dtype(name).kind, torch.int64)
    out = torch.empty(100, dtype=kind)
    if nulls:
        with pytest.raises(TypeError, match="None"):
            store.take(range(100), out=out)
    else:
        assert store.take(range(100), out=out).tolist() == rows[:100]


def test_numbers_that_int64_lacks_are_gathered_as_they_are() -> None:
    rows = [2**63 + n for n in range(ROWS)]
    assert shmloader.share(pa.array(rows, pa.uint64())).take(range(ROWS)) == rows


def orders_of(rows: list[Any]) -> list[list[str]]:
    return [list(row) for row in rows]


@pytest.mark.parametrize("stream", [False, True], ids=["one chunk", "chunks"])
def test_a_field_is_a_column_also_where_keys_are_in_another_order(stream: bool, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"path": f"{n}.jpg", "label": n} for n in range(300)]
    rows[7] = {"label": 7, "path": "7.jpg"}
    rows[200] = {"label": 200, "more": 1, "path": "200.jpg"}
    store = shmloader.share(iter(rows) if stream else rows)
    store.save(tmp_path / "x.arrow")
    store.save(tmp_path / "x.parquet")
    for name in ("", "x.arrow", "x.parquet"):
        found = shmloader.open(tmp_path / name) if name else store
        assert found["label"] == list(range(300))
        assert np.asarray(found["label"]).tolist() == list(range(300))
        assert list(found) == rows
        assert orders_of(found) == orders_of(rows)
    chosen = shmloader.open(tmp_path / "x.arrow", columns=["label", "path"])
    fields = [["label", "path"], ["path", "label"], ["label", "path"]]
    assert orders_of([chosen[7], chosen[8], chosen[200]]) == fields


@pytest.mark.parametrize("names", [3, pytest.param(40, marks=pytest.mark.long), 70])
def test_rows_with_keys_in_any_orders_come_back(names: int) -> None:
    random = np.random.default_rng(0)
    rows = [{f"k{k}": int(k) for k in random.permutation(names)[: n % names + 1]} for n in range(200)]
    rows += [Frozen("a", 1), {"k1": Slotted("q", 2), "k0": 1}]
    for some in (rows, rows * 200):  # the orders of the latter are too many for a type
        store = shmloader.share(some)
        assert all(map(same, store, some))
        assert orders_of(store[:200]) == orders_of(rows[:200])


def saved_rows() -> list[dict[str, Any]]:
    west = dt.timezone(-dt.timedelta(hours=5))
    return [
        {
            "int": n * 1000,
            "float": n / 7,
            "bool": n % 3 == 0,
            "none": None,
            "text": f"text {n}",
            "word": "ab"[n % 2],
            "bytes": bytes([n]),
            "perhaps": None if n % 4 == 0 else n,
            "mixed": [n, str(n), None, n / 2, (n,)][n % 5],
            "date": DAY.date(),
            "time": DAY.time(),
            "naive": DAY,
            "utc": DAY.replace(tzinfo=dt.UTC),
            "west": DAY.replace(tzinfo=west),
            "zone": DAY.replace(tzinfo=zoneinfo.ZoneInfo("Europe/Prague")),
            "span": dt.timedelta(n, 5),
            "decimal": decimal.Decimal("1.50") + n,
            "uuid": uuid.UUID(int=n),
            "path": PurePosixPath(f"a/{n}"),
            "enum": Colour.RED,
            "scalar": np.float32(n),
            "array": np.full((2, 3), n),
            "ragged": np.arange(n % 4, dtype=">i2"),
            "ragged 2": np.ones((n % 3, 2)),
            "tensor": torch.full((2,), float(n)),
            "half": torch.ones(2).bfloat16(),
            "list": [n] * (n % 3),
            "pair": [n, n + 1],
            "tuple": (n, "x"),
            "tuples": (n,) * (n % 3),
            "set": {n},
            "frozen": frozenset({str(n)}),
            "point": Point(n, 2.0),
            "person": Person("a", n, ["x"]),
            "frozen one": Frozen("p", n),
            "slots": Slotted("q", n),
            "map": {n: "x", (1, n): None},
            "record": {"a": n, "b": {"c": str(n)}},
            "pickled": 1j * n,
            "huge": 2**70 + n,
            **({"optional": n} if n % 2 else {}),
            "order": {"b": 1, "a": 2} if n == 7 else {"a": 1, "b": 2},
        }
        for n in range(20)
    ]


def test_a_file_of_the_first_releases_is_read(tmp_path: Path) -> None:
    """It was saved by the version before kinds were classes."""
    packed = Path(__file__).parent / "data" / "saved_by_format_1.arrow.xz"
    (tmp_path / "x.arrow").write_bytes(lzma.decompress(packed.read_bytes()))
    store = shmloader.open(tmp_path / "x.arrow", allow_pickle=True)
    assert all(map(same, store, saved_rows()))
    assert orders_of(store) == orders_of(saved_rows())
    store.save(tmp_path / "again.arrow")
    assert all(map(same, shmloader.open(tmp_path / "again.arrow", allow_pickle=True), saved_rows()))


def test_a_kind_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that reads, writes, saves, gathers and describes takes what it knows of a kind from that class."""
    for table in ("_TAKES", "_BY_ID"):
        monkeypatch.setattr(kind_module, table, dict(getattr(kind_module, table)))

    class Fractions(PythonType, name="fraction", over=Texts):
        takes = (fractions.Fraction,)

        @classmethod
        def write(cls, values: list[fractions.Fraction], encoder: Any, depth: int) -> Any:
            return cls.around(texts_to_arrow(list(map(str, values))))

        def maker(self, origin: Any) -> Any:
            return fractions.Fraction

    try:
        values = [fractions.Fraction(n, 7) for n in range(50)]
        keys = {value: str(value) for value in values}
        rows = [
            {"a": one, "b": [one, None], "c": {one: 1}, "d": ("x", one)[n % 2]}
            for n, one in enumerate(values)
        ]
        for given in (values, [*values, None, "x"], rows):
            store = shmloader.share(given)
            assert same(list(store), given)
            assert "pickle" not in str(store.describe())
            store.save(tmp_path / "saved.arrow")
            assert same(list(shmloader.open(tmp_path / "saved.arrow")), given)
            assert same(list(unpack(*pack(store))), given)
        assert store.describe().fields[0].type == "fraction"
        assert store.take([*range(20)])["a"] == values[:20]
        assert shmloader.share(keys)[fractions.Fraction(3, 7)] == "3/7"
    finally:
        pa.unregister_extension_type(Fractions.NAME)
