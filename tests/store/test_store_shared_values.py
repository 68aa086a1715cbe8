"""What several rows share is in a store once, and what is read equals what was given all the same."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import Colour, Custom, Person, Point, same
from store_strategies import ARRAYS, SCALARS, containers

from shmloader import open as open_store
from shmloader.shared_memory.sealed_buffer import BufferBuilder
from shmloader.store import Store, share
from shmloader.store.base import finish
from shmloader.store.kept import Kept, KeptValue
from shmloader.store.rows import RowStore, RowWriter

ROWS = 3000
WORDS = [f"word {number}" for number in range(2000)]  # 13 kB in a store
LARGE = np.arange(20_000)
TENSOR = torch.arange(20_000)

SHARED: dict[str, Any] = {
    "a list": WORDS,
    "a dict": dict.fromkeys(WORDS, 1.5),
    "a dict as a record": {f"key {n}": n / 2 for n in range(100)},
    "a tuple": tuple(WORDS),
    "a namedtuple": Point(WORDS, 1.0),
    "a dataclass": Person("a", 1, WORDS),
    "an ndarray": LARGE,
    "a tensor": TENSOR,
    "a long text": "text " * 5000,
    "long bytes": bytes(20_000),
    "what is pickled": Custom(LARGE, TENSOR, "name"),
    "lists in lists": [[WORDS, WORDS], [WORDS]],
    "arrays in a list": [LARGE, LARGE, LARGE + 1],
}
ALONE = {name: share([value]).nbytes for name, value in SHARED.items()}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_what_all_rows_share_is_there_once(name: str, streamed: bool) -> None:
    value = SHARED[name]
    rows = [{"n": n, "shared": value} for n in range(ROWS)]
    store = share(iter(rows) if streamed else rows)
    assert len(store.starts) > 4 or not streamed
    assert store.nbytes < 1.2 * ALONE[name] + 20 * ROWS
    for number in (0, 17, ROWS // 2, -1):
        assert same(store[number], rows[number])
    assert same(store.column("shared")[5], value)
    assert store.describe().kind == "records"
    assert store.column("shared").describe().kind == share([value]).describe().kind


def test_what_two_fields_share_is_there_once() -> None:
    """Also where it is found in another depth, and where one of the fields is None at times."""
    rows = [{"one": LARGE, "two": None if n % 3 else LARGE, "more": [LARGE, n]} for n in range(ROWS)]
    store = share(rows)
    assert store.nbytes < 1.2 * LARGE.nbytes + 50 * ROWS
    assert all(map(same, store[:50], rows[:50]))


def test_some_rows_share_and_others_do_not() -> None:
    rows = [{"x": LARGE if n % 2 else np.full(300, n)} for n in range(2000)]
    for store in (share(rows), share(iter(rows))):
        assert store.nbytes < LARGE.nbytes + 2000 * 300 * 8 * 0.6
        assert all(map(same, store, rows))


def test_large_values_that_two_distant_rows_share_are_there_once() -> None:
    """Found across chunks in a list, the objects of which all live."""
    images = [np.full((64, 32), n, np.uint16) for n in range(3000)]
    rows = [{"image": image, "turned": False} for image in images]
    rows += [{"image": image, "turned": True} for image in random.Random(0).sample(images, len(images))]
    store = share(rows)
    assert len(store.starts) > 4
    assert store.nbytes < 1.1 * 3000 * 4096
    assert all(map(same, store, rows))


def test_a_value_from_more_chunks_than_a_column_can_name_is_written_once_more() -> None:
    """Of 127 columns at most; here each of the last chunk's rows refers to a chunk of its own."""
    blocks = [np.full(1 << 14, n, np.uint8) for n in range(160)]
    with BufferBuilder() as out:
        writer = RowWriter(out, 1.0, 320)
        for block in blocks:
            writer.append([{"x": block}])
        once_nbytes = out.nbytes
        writer.append([{"x": block} for block in blocks])
        assert out.nbytes - once_nbytes < 1.1 * (160 - 126) * blocks[0].nbytes
        store = finish(out, (RowStore, writer.finish()))
    assert all(same(store[n]["x"], blocks[n % 160]) for n in range(320))


def test_views_of_the_same_memory_are_there_once() -> None:
    clips = np.random.default_rng(0).random((10, 5000))
    tensors = torch.rand(10, 5000)
    rows = [{"clip": clips[n // 100], "tensor": tensors[n // 100], "n": n} for n in range(1000)]
    store = share(rows)
    assert store.nbytes < 1.1 * (clips.nbytes + tensors.nbytes)
    assert all(map(same, store, rows))
    strides = [
        clips[0, ::2][:2000],
        clips[0, ::2][1:2001],
        clips[0, :2000],
        clips[0, :2000].reshape(4, 500),
    ] * 8
    assert all(map(same, share(strides), strides))


@pytest.mark.parametrize("streamed", [False, True])
def test_memory_that_pickled_objects_share_is_there_once(streamed: bool) -> None:
    scattered = np.arange(40_000)[::2]
    rows = [Custom(LARGE if n % 2 else scattered, TENSOR[::2], str(n)) for n in range(500)]
    store = share(iter(rows) if streamed else rows)
    chunks = len(store.starts) - 1
    # What is not contiguous is copied for each chunk, and not found again.
    assert store.nbytes < LARGE.nbytes + chunks * (scattered.nbytes + TENSOR.nbytes // 2) + 500 * 500
    assert all(map(same, store[::50], rows[::50]))


def test_short_and_small_values_are_written_as_often_as_they_occur() -> None:
    """A place takes four bytes, and time when it is read."""
    pair, word, flag = (1, 2), "word", Colour.RED
    assert share([pair] * 10_000).nbytes < 10_000 * 2.2
    store = share([{"pair": pair, "word": word, "none": ()} for _ in range(10_000)])
    assert store.nbytes < 10_000 * (2 + 8 + 0.2)
    assert share([flag] * 10_000).nbytes < 10_000 * 4.2  # but a pickle is long


def test_whole_rows_that_repeat_are_there_once() -> None:
    some = [{"text": str(n) * 50, "n": n} for n in range(500)]
    rows = random.Random(0).choices(some, k=20_000)
    store = share(rows)
    assert store.nbytes < 20_000 * 4.5 + 4 * 500 * 200
    assert all(map(same, store, rows))
    numbers = np.random.default_rng(0).integers(0, 20_000, 3000)
    taken = store.take(numbers)
    assert taken["n"].tolist() == [rows[n]["n"] for n in numbers]
    assert taken["text"] == [rows[n]["text"] for n in numbers]
    assert store.column("n").take(numbers).tolist() == taken["n"].tolist()
    assert store.to_arrow().to_pylist() == rows
    assert store.take([])["n"].tolist() == []


# Gathering, Arrow, files.


def test_take_gathers_shared_arrays_by_columns() -> None:
    arrays = [np.full((3, 40), n, np.float32) for n in range(7)]
    rows = [{"a": arrays[n % 7], "n": n} for n in range(ROWS)]
    for store in (share(rows), share(iter(rows))):
        numbers = np.random.default_rng(0).integers(-ROWS, ROWS, 500)
        out = {"a": torch.empty(500, 3, 40)}
        taken = store.take(numbers, out)
        assert taken["a"] is out["a"]
        assert (out["a"][:, 2, 39].numpy() == numbers % ROWS % 7).all()
        assert (store.take(numbers)["a"] == out["a"].numpy()).all()
        assert store.take([])["a"].shape == (0, 3, 40)


def addresses(array: Any) -> set[int]:
    if hasattr(array, "dictionary"):
        return addresses(array.dictionary)
    return {buffer.address for buffer in array.buffers() if buffer}


def test_arrow_has_shared_values_as_dictionaries_over_the_same_memory() -> None:
    rows = [{"words": WORDS, "n": n, "vector": LARGE, "text": "x" * 999} for n in range(ROWS)]
    store = share(rows)
    table = store.to_arrow()
    assert table.slice(7, 2).to_pylist() == [
        {"words": WORDS, "n": n, "vector": LARGE.tolist(), "text": "x" * 999} for n in (7, 8)
    ]
    begin, end = store.buffer.address, store.buffer.address + store.buffer.nbytes
    for name in ("words", "vector", "text"):
        assert all(begin <= address < end for address in addresses(table[name].chunk(0)))


TEXT = "x" * 999
FEW_WORDS = WORDS[:60]
CHANGING: dict[str, Any] = {
    "texts": (TEXT, lambda n: f"{n:0100}"),
    "lists of numbers": (list(range(100)), lambda n: [n * 1000] * 20),
    "records": ({f"k{n}": n for n in range(50)}, lambda n: {f"k{m}": n * m for m in range(50)}),
    "in a list": ([FEW_WORDS, [TEXT]], lambda n: [[str(n)], [f"{n:0100}"] * 2]),
    "in a record": ({"a": FEW_WORDS, "b": 1}, lambda n: {"a": [str(n)] * 20, "b": 300}),
    "in a tuple": ((FEW_WORDS, 1), lambda n: ([str(n)] * 20, 300)),
    "in a dataclass": (Person(TEXT, 1, FEW_WORDS), lambda n: Person(f"{n:0100}", 300, [str(n)])),
    "None": (TEXT, lambda n: None),
}


@pytest.mark.parametrize("name", CHANGING)
def test_arrow_has_one_type_where_only_some_chunks_share(name: str) -> None:
    value, make = CHANGING[name]
    chunks = [[value] * 16, [make(n) for n in range(64)], [value, *map(make, range(255))], [value] * 500]
    rows = [{"n": n, "x": x} for n, x in enumerate(itertools.chain(*chunks))]
    store = share(iter(rows))
    assert len(store.starts) > 4
    assert all(map(same, store, rows))
    field = store.column("x").to_arrow()
    wanted = [plain(row["x"]) for row in rows]
    assert field.to_pylist() == wanted
    assert store.to_arrow()["x"].to_pylist() == wanted


def plain(value: Any) -> Any:
    """As Arrow gives it back."""
    if isinstance(value, Person):
        return dict(vars(value))
    return {str(n): item for n, item in enumerate(value)} if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", SHARED)
def test_shared_values_are_saved_and_opened_as_they_lie(name: str, tmp_path: Any) -> None:
    rows = [{"n": n, "shared": SHARED[name]} for n in range(300)]
    share(rows).save(tmp_path / "store.arrow")
    assert (tmp_path / "store.arrow").stat().st_size < 1.2 * ALONE[name] + 20_000
    opened = open_store(tmp_path / "store.arrow")
    assert all(map(same, opened[::77], rows[::77]))


# Values that refer to themselves.


@dataclasses.dataclass(eq=False)
class Node:
    name: str
    parent: Node | None = None
    children: list[Node] = dataclasses.field(default_factory=list)

    def add(self, name: str) -> Node:
        self.children.append(Node(name, self))
        return self.children[-1]


def make_tree(name: str = "root") -> list[Node]:
    """73 nodes, each with its parent and its children."""
    root = Node(name)
    children = [root.add(f"{name} {n}") for n in range(8)]
    return [root, *children, *(child.add(f"{child.name}.{n}") for child in children for n in range(8))]


def text_of(node: Node) -> str:
    """The whole tree that a node is in, and which node it is."""
    root = node
    while root.parent:
        root = root.parent
    assert all(child.parent is root for child in root.children)

    def walk(one: Node) -> str:
        mark = "*" if one is node else ""
        return f"{mark}{one.name}({', '.join(map(walk, one.children))})"

    return walk(root)


def test_trees_with_parent_pointers_come_back_in_little_memory() -> None:
    nodes = make_tree()
    store = share(nodes[:1])
    assert store.nbytes < 5000
    assert text_of(store[0]) == text_of(nodes[0])
    store = share(nodes)  # each row leads to all the others
    assert store.nbytes < 6000
    assert list(map(text_of, store)) == list(map(text_of, nodes))
    assert store.describe().kind == "objects"


@pytest.mark.parametrize("streamed", [False, True])
def test_trees_in_fields_of_records_are_kept_apart_from_the_rest(streamed: bool) -> None:
    nodes = [node for number in range(40) for node in make_tree(f"tree {number}")]
    rows = [{"n": n, "node": node, "again": node} for n, node in enumerate(nodes)]
    store = share(iter(rows) if streamed else rows)
    assert store.column("n").describe().kind == "numbers"
    assert store.nbytes < 40 * 73 * 200
    for number in range(0, len(rows), 97):
        assert store[number]["n"] == number
        assert text_of(store[number]["node"]) == text_of(nodes[number])
        assert store[number]["again"].name == nodes[number].name


def test_rings_of_every_container_come_back() -> None:
    one: list[Any] = [1]
    one.append(one)
    two: dict[str, Any] = {"n": 2}
    two["again"] = ([two],)
    row = share([[one, two]] * 3 + [[one, two]])[2]
    assert row[0][1] is row[0]
    assert row[1]["again"][0][0] is row[1]
    assert row[1]["n"] == 2


def test_neighbours_in_a_graph_are_found_to_refer_to_one_another() -> None:
    nodes = [Node(str(n)) for n in range(60)]
    chosen = random.Random(0)
    for node in nodes:
        for other in chosen.sample(nodes, 5):
            node.children.append(other)
            other.children.append(node)
    store = share(nodes)
    assert store.nbytes < 10_000
    assert [child.name for child in store[7].children] == [child.name for child in nodes[7].children]


# Any data.


LIGHT = [LARGE, TENSOR, "text " * 500, WORDS[:40], Custom(LARGE, TENSOR, "name"), Person("a", 1, WORDS[:40])]


@st.composite
def rows_that_share(draw: st.DrawFn) -> list[Any]:
    """Rows made of a few objects, each of which may be in many places, large ones among them."""
    pool = draw(st.lists(SCALARS | ARRAYS | st.sampled_from(LIGHT), min_size=1, max_size=5))
    for _ in range(draw(st.integers(0, 6))):  # of what is in the pool already, so that depths grow
        pool.append(draw(containers(st.sampled_from(pool))))
    return draw(st.lists(st.sampled_from(pool), min_size=1, max_size=8)) * draw(st.sampled_from([1, 2, 30]))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(rows_that_share(), st.booleans())
def test_rows_that_share_come_back_as_they_were(rows: list[Any], streamed: bool) -> None:
    store = share(iter(rows) if streamed else rows)
    assert len(store) == len(rows)
    for number in {0, 1, 15, 16, 17, len(rows) // 2, len(rows) - 1} & set(range(len(rows))):
        assert same(store[number], rows[number]), (store[number], rows[number])
    store.take(range(len(rows)))
    part = store.alone(range(1, len(rows)))
    assert len(part) == len(rows) - 1
    assert all(map(same, part[:3], rows[1:4]))


# While it is built.


@pytest.mark.parametrize("make", [lambda: np.zeros(1 << 21), lambda: [float(n) for n in range(1 << 17)]])
def test_one_huge_shared_object_does_not_make_small_chunks(make: Any) -> None:
    huge = make()
    rows = 20_000
    plain_store = share({"n": n} for n in range(rows))
    store = share({"n": n, "huge": huge} for n in range(rows))
    assert len(store.starts) <= len(plain_store.starts) + 2
    assert store.nbytes < 1.1 * len(huge) * 8 + 20_000 * 10


def test_what_is_kept_of_a_stream_is_bounded() -> None:
    """By number and size, but for the few that were used last: else they would be gone by then."""
    kept = Kept(NoMemory(), streamed=True)
    for number in range(1000):
        kept.add(number, KeptValue(object(), None, 0, 1 << 20))
    assert sum(number in kept for number in range(1000)) == 16
    for number in range(1000, 1020):
        kept.add(number, KeptValue(object(), None, 0, 1 << 30))
    assert [number for number in range(1020) if number in kept] == list(range(1012, 1020))
    assert kept.get(1012, object()) is not None
    kept.add(1020, KeptValue(object(), None, 0, 1))
    assert 1012 in kept
    assert 1013 not in kept


class NoMemory:
    nbytes = 0


def test_a_store_of_shared_rows_reads_in_another_chunk_what_the_first_one_wrote() -> None:
    store = share({"n": n, "words": WORDS} for n in range(ROWS))
    fields = [store.column_of(chunk).fields[1] for chunk in range(len(store.starts) - 1)]
    assert len({field.of for field in fields}) == 1
    assert isinstance(store, Store)


@pytest.mark.parametrize(
    ("rare", "common", "most_nbytes"),
    [
        (list(range(1000, 21000)), lambda i: [i], 400_000),
        (np.zeros(100_000, np.uint8), lambda i: np.zeros(3, np.uint8), 600_000),
        ({"y": [0] * 100_000}, lambda i: {"y": [i]}, 600_000),
    ],
)
def test_what_few_rows_share_is_stored_once(rare: Any, common: Any, most_nbytes: int) -> None:
    """A few of them are large: what a value takes on the average says little."""
    rows = [{"id": i, "extra": rare if i % 50 == 7 else common(i)} for i in range(20_000)]
    store = share(rows)
    assert store.nbytes < most_nbytes
    assert same(store[7], rows[7])
    assert same(store[8], rows[8])


def test_short_texts_among_long_ones_are_no_dictionary() -> None:
    rows = [{"t": f"some text {i} " * 20 if i % 5 else "", "y": i} for i in range(20_000)]
    assert str(share(rows).to_arrow().schema.field("t").type) == "string"


class Holder:
    """Is pickled."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer


@pytest.mark.parametrize("wrap", [lambda buffer: buffer, torch.from_numpy, Holder, lambda buffer: [buffer]])
def test_a_stream_that_writes_to_its_buffers_again_gives_no_old_values(wrap: Any) -> None:
    """It is to yield copies; but what an earlier chunk has stored is never taken for what is there now."""

    def stream() -> Any:
        ring = np.zeros((8, 2000))
        for number in range(3000):
            ring[number % 8] = number
            yield {"number": number, "buffer": wrap(ring[number % 8])}

    for row in share(stream()):
        buffer = row["buffer"]
        buffer = (
            buffer.buffer if isinstance(buffer, Holder) else buffer[0] if type(buffer) is list else buffer
        )
        assert buffer[0] >= row["number"]
