"""Large lists and dicts inside of rows are views, at any count and any depth; small ones are built."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from store_samples import Point, same
from store_strategies import ARRAYS, SCALARS, containers

import shmloader
from shmloader.store import MappingStore, Store
from shmloader.store import rows as stores
from shmloader.store.columns import kind, lists
from shmloader.store.columns.encode import ColumnEncoder
from shmloader.store.handles import pack, unpack

RECORDS = [{"path": f"{n}.jpg", "label": n} for n in range(300)]
TEXTS = [f"text {n}" for n in range(3000)]
NUMBERS = list(range(40_000))
BY_KEY = {f"key {n}": {"n": n} for n in range(300)}


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if containers of more than some 20 values were large."""
    for module in (kind, lists):
        monkeypatch.setattr(module, "MOST_BUILT", 300)
    monkeypatch.setattr(stores.RowStore.__init__, "__defaults__", ((), False, stores.RowViews(300)))


def is_view(value: Any) -> bool:
    return isinstance(value, Store | MappingStore)


@pytest.mark.parametrize("count", [2, 33, 500])
@pytest.mark.parametrize("large", [RECORDS, TEXTS, BY_KEY], ids=["records", "texts", "dicts"])
def test_large_containers_are_views_at_any_count(large: Any, count: int) -> None:
    for rows in (shmloader.share([large] * 2 + [[1]] * (count - 2)), shmloader.share([large] * count)):
        assert is_view(rows[1])
        assert rows[1] == large
    by_number = shmloader.share({number: [*RECORDS, number] for number in range(count)})
    assert is_view(by_number[1])
    assert by_number[1] == [*RECORDS, 1]


def test_the_rule_goes_by_the_work_of_building() -> None:
    rows = [
        (list(range(32_768)), list(range(32_769))),
        (["x" + str(n) for n in range(2048)], ["x" + str(n) for n in range(2049)]),
        ([[]] * 256, [[]] * 257),
        ({n: str(n) for n in range(1900)}, {n: str(n) for n in range(2000)}),
        ([["x"] * 1000, ["y"] * 1000], [["x"] * 1000, ["y"] * 1040]),
        ([1.5, ["x"] * 2000], [1.5, "", ["x"] * 2048]),
    ]
    store = shmloader.share([row for row in rows for _ in range(6)])
    for read, (small, large) in zip(store[::6], rows, strict=True):
        assert same(read[0], small)
        assert is_view(read[1])
        assert read[1] == large


def work(value: Any) -> int:
    """The work of building a value, as docs/stores.md has it."""
    if isinstance(value, dict):
        names = [] if "a" in value else list(value)
        return 128 + sum(map(work, [*names, *value.values()]))
    if isinstance(value, list | tuple):
        return 128 + sum(map(work, value))
    return 1 if isinstance(value, int | float) else 16


SEVERAL: list[list[Any]] = [TEXTS[:100], TEXTS[:200], NUMBERS[:200]]
WEIGHED: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: [n] * (n % 5),
    "texts": lambda n: [f"text {n}"] * (n % 5),
    "pairs": lambda n: [[n, n / 2]] * (n % 3),
    "pairs of lists": lambda n: [[[n] * (n % 4), [n]]] * (n % 3),
    "several kinds": lambda n: [n, "x", [n] * (n % 4), n / 2, ["y"] * (n % 3), (n, "z")][: n % 7],
    "dicts": lambda n: {number: ["x"] * number for number in range(n % 5)},
    "records": lambda n: [{"a": n, "b": [str(n)] * (n % 3)}] * (n % 4),
    "the same": lambda n: [SEVERAL[n % 3], SEVERAL[2]],
}


@pytest.mark.parametrize("name", WEIGHED)
def test_the_weight_of_a_row_is_the_work_of_building_it(name: str) -> None:
    rows = [WEIGHED[name](n) for n in range(200)]
    weights = np.broadcast_to(kind.weights_of(shmloader.share(rows).field(0)), len(rows))
    assert weights.tolist() == list(map(work, rows))
    holes = [None if n % 3 == 0 else [row, None, row] for n, row in enumerate(rows)]
    weights = np.broadcast_to(kind.weights_of(shmloader.share(holes).field(0)), len(rows))
    of_none = {weights[n] - 128 - 2 * work(row) for n, row in enumerate(rows) if holes[n]}
    assert of_none <= {0, 1, 16, 128}


def test_rows_with_names_are_dicts_whatever_they_hold() -> None:
    row = shmloader.share([{"id": 1, "texts": TEXTS}] * 2)[1]
    assert type(row) is dict
    assert is_view(row["texts"])


def trie(words: list[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node["end"] = True
    return root


def test_a_trie_is_walked_without_building_it() -> None:
    draw = np.random.default_rng(0)
    words = ["".join(map(chr, draw.integers(0x4E00, 0x4E00 + 60, 5))) for _ in range(5000)]
    root = trie(words)
    shared = shmloader.share(root)
    assert is_view(shared[words[0][0]])
    for word in words[:300]:
        node, plain = shared, root
        for letter in word:
            node, plain = node[letter], plain[letter]
            assert (letter in node) == (letter in plain)
        assert same(copy.deepcopy(node), plain)
    assert shared == root


def test_dicts_answer_as_dicts() -> None:
    large = {**BY_KEY, 7: "seven", (1, "x"): None, 2.5: [1]}
    view = shmloader.share([large] * 2)[1]
    assert list(view) == list(large)
    assert list(view.items()) == list(large.items())
    assert next(reversed(view)) == 2.5
    assert [*reversed(view.items())] == [*reversed(large.items())]
    assert all(view[key] == value and key in view and view.get(key) == value for key, value in large.items())
    assert (view.get("no"), view.get("no", 5), "no" in view, 8 in view) == (None, 5, False, False)
    with pytest.raises(KeyError, match="no"):
        view["no"]
    assert {**view} == large
    assert view | {"a": 1} == large | {"a": 1}
    assert {"a": 1, 7: 7} | view == {"a": 1, 7: 7} | large
    assert view.keys() & {7, 8} == {7}
    assert len(view.to_arrow()) == len(large)


def test_keys_of_one_hash_are_told_apart() -> None:
    words = ["plumless", *TEXTS]  # crc32 of it is that of "buckeroo"
    view = shmloader.share([dict.fromkeys(words, 1)] * 2)[0]
    assert "plumless" in view
    assert "buckeroo" not in view


@pytest.mark.usefixtures("everything_is_large")
def test_dicts_without_an_index_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in files of before, and in dicts with few keys of large values."""
    monkeypatch.setattr(lists, "_MOST_SCANNED", 1 << 20)
    view = shmloader.share([BY_KEY] * 2)[1]
    assert is_view(view)
    assert all(view[key] == value for key, value in BY_KEY.items())
    assert "no" not in view


def test_an_index_that_leads_elsewhere_finds_nothing_wrong() -> None:
    column = lists.Maps.write([BY_KEY, BY_KEY], ColumnEncoder(), 1)
    pairs = column.storage.values
    fields = [pairs.field(0), pairs.field(1), pairs.field(2)]
    places = pa.array(np.full(len(pairs), 306, np.uint32))
    spoilt = pa.StructArray.from_arrays([*fields, places], ["key", "value", "hash", "place"])
    spoilt = lists.Maps.around(pa.ListArray.from_arrays(column.storage.offsets, spoilt))
    view = shmloader.share(spoilt)[0]
    assert is_view(view)
    assert not any(key in view for key in BY_KEY)
    assert list(view.plain()) == list(BY_KEY)


def test_what_a_list_gives_a_view_gives() -> None:
    view = shmloader.share([TEXTS] * 2)[0]
    assert view[:2] + view[5:6] == view[:2] + TEXTS[5:6] == TEXTS[:2] + view[5:6] == [*TEXTS[:2], TEXTS[5]]
    assert view[:2] * 2 == 2 * view[:2] == TEXTS[:2] * 2
    assert view[1:] > TEXTS
    assert view <= TEXTS
    assert type(view.copy()) is list
    assert "text 5" in view
    assert view.index("text 5") == 5
    first, *rest = view[:3]
    assert [first, *rest] == TEXTS[:3]
    assert json.dumps([view], default=shmloader.unshare) == json.dumps([TEXTS])
    dicts = shmloader.share([BY_KEY] * 2)[0]
    assert json.dumps({"a": dicts}, default=shmloader.unshare) == json.dumps({"a": BY_KEY})


@pytest.mark.parametrize("large", [[RECORDS, RECORDS], {"a": BY_KEY, **BY_KEY}], ids=["list", "dict"])
def test_copies_and_pickles_are_lists_and_dicts(large: Any) -> None:
    view = shmloader.share([large] * 2)[1]
    assert is_view(view)
    for made in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), shmloader.unshare(view)):
        assert same(made, large)
    assert type(copy.copy(view)) is type(large)
    again = shmloader.share([view, view])[0]
    assert again == large


@pytest.mark.parametrize("large", [RECORDS, BY_KEY], ids=["list", "dict"])
def test_a_view_goes_to_other_processes_by_handle(large: Any) -> None:
    view = shmloader.share([large] * 2)[1]
    pickled, buffers = pack(view)
    assert len(pickled) < 8192
    there = unpack(pickled, buffers)
    assert is_view(there)
    assert there == large


def test_tensors_of_a_view_may_be_written_to_where_it_came_with_its_contents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small columns are sent so; torch makes tensors of what is read-only, too."""
    view = shmloader.share([[torch.full((2,), n, dtype=torch.int16) for n in range(300)]] * 2)[1]
    there = unpack(*pack(view))
    writeable, wrap = [], torch.from_numpy

    def noted(array: Any) -> torch.Tensor:
        writeable.append(array.flags.writeable)
        return wrap(array)

    monkeypatch.setattr(torch, "from_numpy", noted)
    assert there[3].add_(1).tolist() == [4, 4]
    assert writeable == [True]


class Views(torch.utils.data.Dataset[Any]):
    def __init__(self, view: Any) -> None:
        self.view = view

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.view, self.view[index]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_read_views_and_send_lists(method: str, warm_helpers: None) -> None:
    view = shmloader.share([RECORDS] * 2)[1]
    context = multiprocessing.get_context(method)
    loader = shmloader.DataLoader(
        Views(view), num_workers=1, multiprocessing_context=context, collate_fn=list
    )
    batches = list(loader)
    assert same(batches[2], [(RECORDS, RECORDS[2])])


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_views_of_files(suffix: str, tmp_path: Path) -> None:
    rows: list[Any] = [{"n": n, "by": {str(k): {"a": k} for k in range(n % 5)}} for n in range(200)]
    rows += [{"n": 1, "by": BY_KEY}, {"n": 2, "by": {"a": {"b": dict.fromkeys(TEXTS, 1)}}}]  # in later pieces
    shmloader.share(iter(rows)).save(tmp_path / f"rows.{suffix}")
    store = shmloader.open(tmp_path / f"rows.{suffix}")
    assert same(list(store.plain()), rows)
    assert is_view(store[200]["by"])
    assert store[200]["by"]["key 7"] == {"n": 7}
    assert is_view(store[201]["by"]["a"]["b"])
    store[200]["by"].save(tmp_path / "inner.arrow")
    assert shmloader.open(tmp_path / "inner.arrow") == BY_KEY


VALUES = st.recursive(SCALARS | ARRAYS, containers, max_leaves=40)


@pytest.mark.usefixtures("everything_is_large")
@settings(max_examples=150 if LONG else 20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(VALUES, max_size=6), st.integers(1, 30))
def test_views_hold_what_was_given(rows: list[Any], times: int) -> None:
    rows = [*rows, [rows] * times, dict.fromkeys(range(times), rows), {"a": [Point(1, 2.0)] * times}]
    store = shmloader.share(rows)
    for row, plain in zip(rows, store.plain(), strict=True):
        assert same(plain, row)
    for row, read in zip(rows, store, strict=True):
        assert same(pickle.loads(pickle.dumps(read)), row)


FLOATS = [n / 3 for n in range(1000)]


@pytest.mark.parametrize(
    "rows",
    [
        FLOATS,
        [int(n) for n in range(500)],
        [n % 3 == 0 for n in range(500)],
        [[n / 2, 1.0] for n in range(200)],
        [[n, 1] for n in range(200)],
        [np.arange(4, dtype=np.float64) + n for n in range(100)],
        [np.float32(n) for n in range(100)],
        [1.5, 2] * 50,
        [[[1.5, n]] * 2 for n in range(50)],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")
def test_slices_of_numbers_become_the_arrays_and_tensors_that_lists_become(rows: list[Any]) -> None:
    for store in (shmloader.share(rows), shmloader.share(iter(rows))):
        for part in (slice(3, 40), slice(0, None), slice(2, 30, 3), slice(30, 2, -1)):
            given_, wanted = torch.tensor(store[part]), torch.tensor(rows[part])
            assert same(given_, wanted)
            assert same(np.array(store[part]), np.array(rows[part]))
            given_[:1] = 0  # it is a copy
            assert same(list(store[part]), rows[part])


def test_rows_that_are_no_numbers_are_the_errors_of_lists() -> None:
    for rows in ([1.0, None] * 30, ["a"] * 30, [2**63] * 2 + [-1] * 30):
        for data in (rows, shmloader.share(rows)):
            with pytest.raises((TypeError, ValueError, RuntimeError, OverflowError)):
                torch.tensor(data[:])


def test_a_wanted_dtype_loses_nothing_and_numbers_that_do_not_fit_are_errors() -> None:
    store, numbers = shmloader.share(FLOATS), shmloader.share([300, 1] * 50)
    wanted = torch.tensor(FLOATS[3:9], dtype=torch.float64)
    assert same(torch.tensor(store[3:9], dtype=torch.float64), wanted)
    assert same(np.array(store[3:9], np.float32), np.array(FLOATS[3:9], np.float32))
    with pytest.raises(RuntimeError, match="overflow"):
        torch.tensor(numbers[:4], dtype=torch.uint8)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(OverflowError):
            np.array(numbers[:4], np.uint8)


@pytest.mark.parametrize("read", [lambda view: view[[]], lambda view: view.get({}), lambda view: [] in view])
def test_a_list_is_no_key_of_a_view_as_it_is_none_of_a_dict(read: Callable[[Any], Any]) -> None:
    view = shmloader.share([BY_KEY] * 2)[0]
    assert is_view(view)
    for mapping in (view, BY_KEY):
        with pytest.raises(TypeError, match="unhashable"):
            read(mapping)


def test_an_array_of_mappings_has_mappings_as_items_and_not_their_keys() -> None:
    by_number = {7 * n: n for n in range(40_000)}
    store = shmloader.share([by_number] * 3)
    assert is_view(store[0])
    for mapping in (store[0], shmloader.share(by_number)):
        for array in (np.array([mapping] * 3), np.array(store), np.asarray([mapping], object)):
            assert array.dtype == object
            assert array.ndim == 1
            assert array[0] == by_number
        assert np.array(mapping).item() == by_number
        assert (np.array([1, 2]) == mapping).tolist() == [False, False]
        with pytest.raises((TypeError, ValueError)):
            np.array(mapping, float)


def test_a_window_that_is_read_as_a_sequence_gives_new_lists() -> None:
    rows = [[n, n / 2] for n in range(50)]
    window = shmloader.share(rows)[10:20]
    for _ in range(3):
        assert same([window[n] for n in range(-10, 10)], rows[10:20] * 2)
        assert same(list(window), rows[10:20])
        window[1].append(5)
        next(iter(window)).append(5)
    with pytest.raises(IndexError):
        window[10]


def test_what_a_set_gives_a_shared_set_gives() -> None:
    members, others = set(range(300)), {5, 500}
    shared = shmloader.share(members)
    for method in ("union", "intersection", "difference", "symmetric_difference", "issubset", "issuperset"):
        assert same(getattr(shared, method)(others), getattr(members, method)(others))
    assert same(shared.union([1000], {2000}), members | {1000, 2000})
    assert same(shared.copy(), members)
