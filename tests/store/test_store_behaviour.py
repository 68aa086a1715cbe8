"""Behaviour of stores beyond a sequence: gathering, Arrow, fields, mappings, descriptions, streams."""

import copy
import decimal
import fractions
import io
import itertools
import pickle
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from store_samples import Colour, Point

import shmloader
from shmloader import open as shmloader_open
from shmloader import share
from shmloader.store import Store
from shmloader.store.handles import pack, unpack
from shmloader.store.take import join
from shmloader.store.testing import identical

ROWS = 5000


def stream(rows: int = ROWS) -> Any:
    """Records that come as a stream, and so in several chunks."""
    return (
        {"n": n, "x": n / 2, "s": str(n), "a": np.full(3, n, np.float32), "t": torch.full((2,), n)}
        for n in range(rows)
    )


@pytest.fixture(scope="module")
def records() -> Store:
    store = share(stream())
    assert len(store.chunks.starts) > 4
    return store


INDICES = np.random.default_rng(0).integers(-ROWS, ROWS, 700)


def test_take_gathers_records_by_columns(records: Store) -> None:
    taken = records.take(INDICES)
    wanted = INDICES % ROWS
    assert (taken["n"] == wanted).all()
    assert taken["n"].dtype == np.int64
    assert (taken["x"] == wanted / 2).all()
    assert taken["s"] == [str(n) for n in wanted]
    assert (taken["a"] == wanted[:, None]).all()
    assert taken["a"].shape == (700, 3)
    assert torch.equal(taken["t"], torch.from_numpy(wanted)[:, None].expand(-1, 2))


def test_take_fills_the_outputs_that_it_is_given(records: Store) -> None:
    out = {"n": shmloader.empty(700, dtype=torch.int64), "a": np.zeros((700, 3), np.float32)}
    taken = records.take(INDICES, out)
    assert taken["n"] is out["n"]
    assert torch.equal(out["n"], torch.from_numpy(INDICES % ROWS))
    assert (out["a"] == (INDICES % ROWS)[:, None]).all()
    assert taken["s"][0] == str(INDICES[0] % ROWS)


@pytest.mark.parametrize("count", [0, 1, 5, 2000])
def test_few_and_many_rows_are_taken_alike(records: Store, count: int) -> None:
    """Few rows are read one by one, many by chunks."""
    indices = list(itertools.islice(itertools.cycle(range(0, ROWS, 37)), count))
    taken, joined = records.take(indices), join([records[index] for index in indices], None)
    assert set(taken) == {"n", "x", "s", "a", "t"}
    if count:
        assert identical(taken, joined)


@pytest.mark.parametrize(("given", "at_one_distance"), [(list, True), (iter, False)])
def test_rows_of_tensors_are_taken_by_any_number_that_a_list_takes(given: Any, at_one_distance: bool) -> None:
    """If chunks lie one behind the other, only torch checks for numbers out of range."""
    rows = 150_000
    source = torch.arange(rows * 20.0).reshape(rows, 20)
    store = share(given(source))
    assert len(store.chunks.starts) > 3
    distance_nbytes = store[-1].data_ptr() - store[0].data_ptr()
    assert (distance_nbytes == (rows - 1) * 80) is at_one_distance
    for numbers in ([-1], [-rows, rows - 1] * 20, [7, -4096, 4095] * 20, [1 - rows] * 20):
        assert torch.equal(store.take(torch.tensor(numbers)), source[numbers])
    backwards = np.arange(40)[::-1]
    backwards.flags.writeable = False
    assert torch.equal(store.take(backwards), source[backwards.tolist()])
    for number in (rows, rows + 16, 2**18, 2**63 - 1, -rows - 1, -(2**18), -(2**62), -(2**63)):
        for others in ([], [3] * 20):
            with pytest.raises(IndexError):
                store.take(torch.tensor([*others, number]))


def test_unusual_indices_and_outputs_are_treated_alike_by_each_call() -> None:
    """The first call looks at all of them, later ones leave the common ones to torch."""
    numbers, rows = share(list(torch.arange(20_000))), share(list(torch.zeros(20_000, 8, dtype=torch.uint8)))
    indices = torch.arange(19, -1, -1)
    unaligned = torch.empty(161, dtype=torch.uint8)[1:].view(20, 8)
    for _ in range(2):
        for wrong in (indices.to("meta"), indices.to_sparse()):
            with pytest.raises(TypeError):
                numbers.take(wrong)
        assert rows.take(indices, unaligned).sum() == 0
        taken = numbers.take(indices, out=indices)
        assert taken is indices
        assert taken.tolist() == list(range(19, -1, -1))


@settings(max_examples=50 if LONG else 20, deadline=None)
@given(
    st.lists(
        st.integers(-9, 9) | st.floats(allow_nan=False) | st.none() | st.booleans(), min_size=1, max_size=60
    ),
    st.lists(st.integers(0, 10**6), max_size=80),
)
def test_take_agrees_with_reading(values: list[Any], numbers: list[int]) -> None:
    indices = [number % len(values) for number in numbers]
    taken = share(iter(values)).take(indices)
    assert list(taken) == [values[index] for index in indices]


WRONG_OUTPUTS: dict[str, tuple[Any, str]] = {
    "shape": (torch.empty(4, 3), r"Tensor of shape \(4, 3\)"),
    "dtype": (torch.empty(3, 3, dtype=torch.float64), "float64"),
    "layout": (torch.empty(3, 3).T, "not contiguous"),
    "device": (torch.empty(3, 3, device="meta"), "on meta"),
    "sparse": (torch.empty(3, 3).to_sparse(), "sparse_coo"),
    "read-only": (np.frombuffer(bytes(36), np.float32).reshape(3, 3), "read-only"),
    "kind": ([[0.0] * 3] * 3, r"list of shape \(\)"),
}


@pytest.mark.parametrize("wrong", WRONG_OUTPUTS)
def test_an_output_that_does_not_fit_is_a_type_error(wrong: str) -> None:
    array, (out, why) = np.ones((5, 3), np.float32), WRONG_OUTPUTS[wrong]
    for store in (share(list(array)), share(list(torch.from_numpy(array)))):
        with pytest.raises(TypeError, match=f"gathered into .*, not .*{why}"):
            store.take([0, 1, 2], out)


def test_rows_that_are_no_numbers_have_no_output() -> None:
    with pytest.raises(TypeError, match="gathered into"):
        share(["a", "b"]).take([0], np.zeros(1))
    with pytest.raises(TypeError, match="some of the keys"):
        share([{"a": 1}] * 3).take([0, 1], {"b": np.zeros(2)})


def test_how_many_numbers_there_are_does_not_change_what_comes() -> None:
    store = share(["a", "b", "c"])
    for one in ([2], np.array([2]), torch.tensor([2])):
        assert store[one] == ["c"]
    for number in (2, True, np.uint8(2), np.array(2), torch.tensor(2)):
        assert store[number] == ["a", "b", "c"][number]
    assert share(["a"])[torch.tensor([True])] == ["a"]  # a mask


def test_indices_that_are_no_integers_are_type_errors() -> None:
    store = share(list(range(5)))
    for wrong in ([0.5], [[1, 2]], ["a"]):
        with pytest.raises(TypeError):
            store.take(wrong)
    assert store.take(np.array([True, False, False, True, True])).tolist() == [0, 3, 4]


def test_arrow_lies_over_the_same_memory(records: Store) -> None:
    store = share([{"path": str(n), "label": n, "ok": n % 2 == 0} for n in range(1000)])
    table = store.to_arrow()
    assert table.to_pylist() == list(store)
    begin, end = store.buffer.address, store.buffer.address + store.buffer.nbytes
    buffers = [buffer for column in table.columns for buffer in column.chunk(0).buffers() if buffer]
    assert len(buffers) == 4
    assert all(begin <= buffer.address < end for buffer in buffers)
    assert not any(buffer.is_mutable for buffer in buffers)


@pytest.mark.parametrize(
    "rows",
    [
        [1, None, 300, 2**40],
        [1.5, None],
        [True, None, False],
        ["a", None, "é"],
        [b"a", b""],
        [[1, 2], [], [3]],
        [["a"], [None]],
        [{"a": {"b": 1}}, {"a": {"b": None}}],
        [None, None],
        [1, "a", None],
        [np.arange(3), np.arange(2)],
        [np.ones(2, "f4")] * 2,
    ],
)
def test_arrow_has_the_values(rows: list[Any]) -> None:
    wanted = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
    assert share(rows).to_arrow().to_pylist() == wanted


def test_chunks_of_different_widths_become_one_arrow_column() -> None:
    rows = [*range(100), *range(10**6, 10**6 + 100), None, 10**12]
    assert share(iter(rows)).to_arrow().to_pylist() == rows


def test_a_field_is_a_store_of_its_own(records: Store) -> None:
    field = records.column("s")
    assert field[-1] == str(ROWS - 1)
    assert field == [str(n) for n in range(ROWS)]
    assert field.describe().kind == "string"
    assert records.column("n").take([5, -1]).tolist() == [5, ROWS - 1]
    assert share([(1, "a"), (2, "b")]).column(1) == ["a", "b"]
    for wrong in ("z", 0, None):
        with pytest.raises(KeyError):
            records.column(wrong)


KINDS = {
    "numbers": [1, 2.5, None, True],
    "strings": ["a", None],
    "bytes": [b"a"],
    "records": [{"a": 1}, {"b": 1}, {"a": 2}],
    "arrays": [np.zeros(3), torch.ones(2)],
    "lists": [[1], []],
    "objects": [{1, 2}, {3}],
    "mixed": [1, "a"],
}


def test_the_description_tells_what_is_saved() -> None:
    what = share({"path": f"{n:030d}", "label": n % 100} for n in range(20_000)).describe()
    dicts = 20_000 * (sys.getsizeof({"path": 1, "label": 2}) + sys.getsizeof("0" * 30) + 8)
    assert dicts <= what.python_nbytes <= 1.3 * dicts
    assert what.nbytes == pytest.approx(20_000 * (30 + 4 + 1), rel=0.1)


def test_the_description_of_a_slice_has_the_fields_in_proportion() -> None:
    store = share([{"path": f"{n:030d}", "label": n} for n in range(1000)])
    whole, half = store.describe(), store[::2].describe()
    assert [(one.name, one.type) for one in half.fields] == [(one.name, one.type) for one in whole.fields]
    assert [2 * one.nbytes for one in half.fields] == pytest.approx(
        [one.nbytes for one in whole.fields], abs=1
    )


def test_a_tensor_has_a_storage_of_its_own_bytes() -> None:
    """Saving one sample does not write the store."""
    file = io.BytesIO()
    torch.save(share([torch.rand(3) for _ in range(1000)])[5], file)
    assert len(file.getvalue()) < 3000


# Shared arrays and tensors as wholes.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, requires_grad=True),
        torch.tensor(3),
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
    ],
    ids=["gradients", "no dimension", "sparse", "meta"],
)
def test_a_tensor_that_cannot_be_shared_is_a_type_error(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="only dense CPU tensors"):
        share(tensor)


# Mappings.

MAPPING: dict[Any, Any] = {
    "a": 1,
    1: "one",
    2.5: None,
    None: [1],
    (1, "x"): 2,
    b"z": 3,
    "é\ud800": 5,
    2**80: 7,
    decimal.Decimal("7.5"): 8,
    fractions.Fraction(1, 3): 9,
    -1: 10,
    -2: 11,
    Point(3, 4): 12,
    Colour.BLUE: 13,
    frozenset({1}): 14,
    float("inf"): 15,
    np.int64(77): 16,
}


def test_a_mapping_finds_what_a_dict_finds() -> None:
    store = share(MAPPING)
    assert isinstance(store, Mapping)
    assert not isinstance(store, MutableMapping)
    for key in [*MAPPING, True, 1.0, 7.5, (True, "x"), (3, 4.0), 2, 77]:
        assert key in store
        assert identical(store[key], MAPPING[key])
    for stranger in ("b", 3, (1, "y"), frozenset(), object(), b"", float("nan")):
        assert stranger not in store
        with pytest.raises(KeyError):
            store[stranger]
    with pytest.raises(TypeError):
        store["a"] = 2
    with pytest.raises(TypeError):
        del store["a"]


def backwards(mapping: Any) -> list[list[Any]]:
    return [[*reversed(part)] for part in (mapping, mapping.keys(), mapping.values(), mapping.items())]


def test_a_mapping_has_the_views_of_a_dict() -> None:
    store = share(MAPPING)
    assert identical(list(store), list(MAPPING))
    assert identical(list(store.items()), list(MAPPING.items()))
    assert identical(list(store.values()), list(MAPPING.values()))
    assert store.keys() == MAPPING.keys()
    assert backwards(store) == backwards(MAPPING)
    assert store == MAPPING
    assert store != {**MAPPING, "a": 2}
    assert store.get("b", 5) == 5
    assert copy.deepcopy(store) is store
    assert share({}) == {}
    with pytest.raises(pickle.PicklingError, match="save"):
        pickle.dumps(store)
    assert share(UserDict(a=1)) == {"a": 1}
    assert store.describe().kind == "mapping"
    assert share({"a": 1}).to_arrow().to_pylist() == [{"key": "a", "value": 1}]


def counted_missing() -> list[int]:
    return [7]


def test_a_counter_and_a_defaultdict_answer_for_keys_that_they_do_not_have(tmp_path: Any) -> None:
    counter, lists = Counter("aab"), defaultdict(list, x=[1])
    made = defaultdict(counted_missing, {5: [1]})
    for original, value in ((counter, 0), (lists, []), (made, [7])):
        store = share(original)
        again = [unpack(*pack(store))]
        if original is made:
            with pytest.raises(TypeError, match="missing keys are made by"):
                store.save(tmp_path / "mapping.arrow")
        else:
            store.save(tmp_path / "mapping.arrow")
            again.append(shmloader_open(tmp_path / "mapping.arrow"))
        for mapping in (store, *again):
            assert mapping["missing"] == value
            assert (
                mapping["missing"] is not mapping["missing"] or value == 0
            )  # made anew, as by a defaultdict
            assert "missing" not in mapping
            assert mapping.get("missing") is None
            assert mapping.get("missing", 5) == 5
            assert mapping == dict(original)
            assert len(mapping) == len(original)
    assert share(counter).get("a") == 2
    for plain in (defaultdict(None, a=1), OrderedDict(a=1)):
        assert share(plain) == {"a": 1}
        with pytest.raises(KeyError, match="missing"):
            share(plain)["missing"]


def test_mappings_whose_missing_keys_a_store_could_not_make_up_are_refused() -> None:
    class Squares(dict[int, int]):
        def __missing__(self, key: int) -> int:
            return key**2

    with pytest.raises(TypeError, match=r"Squares defines __missing__.*share\(dict\(data\)\)"):
        share(Squares())
    with pytest.raises(
        TypeError, match=r"default_factory <function .*lambda.* cannot be pickled.*share\(dict"
    ):
        share(defaultdict(lambda: 5, a=1))
    assert share(dict(Squares({2: 4}))) == {2: 4}


@settings(max_examples=40 if LONG else 15, deadline=None)
@given(
    st.dictionaries(
        st.text()
        | st.integers()
        | st.binary()
        | st.floats(allow_nan=False)
        | st.tuples(st.integers(), st.text()),
        st.integers(),
    )
)
def test_any_dict_comes_back(original: dict[Any, int]) -> None:
    store = share(original)
    assert all(store[key] == value for key, value in original.items())
    assert identical(list(store.items()), list(original.items()))


def test_keys_whose_hashes_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.store.columns.key_hashes.crc32", lambda data, start=0: 7)
    store = share({str(n): n for n in range(50)})
    assert [store[str(n)] for n in range(50)] == list(range(50))
    assert "50" not in store


# Streams and other sources of rows.


def test_a_stream_never_exists_as_a_whole() -> None:
    class Counted:
        alive = most = 0

        def __init__(self) -> None:
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)

        def __del__(self) -> None:
            Counted.alive -= 1

        def __reduce__(self) -> Any:
            return Counted, ()

    Counted.__qualname__ = "Counted"
    globals()["Counted"] = Counted
    try:
        share(Counted() for _ in range(30_000))
    finally:
        del globals()["Counted"]
    assert Counted.most < 5000


def test_a_stream_that_fails_leaves_nothing() -> None:
    def rows() -> Any:
        yield from range(1000)
        raise ZeroDivisionError("in the generator")

    with pytest.raises(ZeroDivisionError, match="in the generator"):
        share(rows())


class Counting:
    """A default_factory with a state of its own."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> int:
        self.made += 1
        return self.made


def test_a_shared_mapping_has_a_default_factory_of_its_own() -> None:
    """As in a worker: later changes of the program's own one have no effect."""
    factory = Counting()
    store = share(defaultdict(factory, {"a": 1}))
    factory.made = 100
    assert store["b"] == 1
    assert factory.made == 100
