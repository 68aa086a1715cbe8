"""Rows that are parts of larger values: read as a whole, once for a pass, and anew for each single row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

from shmloader import open as open_store
from shmloader import share
from shmloader.store import Store
from shmloader.store.walk import share_attributes

read_trees: list[int] = []
"""The numbers of trees that have been unpickled."""


class Counted:
    """A part of each tree that tells when it is unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _read, (self.number,)


def _read(number: int) -> Counted:
    read_trees.append(number)
    return Counted(number)


@dataclasses.dataclass(eq=False)
class Node:
    name: str
    parent: Node | None = None
    children: list[Node] = dataclasses.field(default_factory=list)
    tree: Counted | None = None


def make_tree(number: int, nodes: int = 20) -> list[Node]:
    root = Node(f"tree {number}", tree=Counted(number))
    root.children = [Node(f"{root.name} child {n}", root, tree=root.tree) for n in range(nodes - 1)]
    return [root, *root.children]


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    read_trees.clear()
    yield
    read_trees.clear()


NODES = [node for number in range(10) for node in make_tree(number)]
NAMES = [node.name for node in NODES]


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def test_a_pass_reads_each_tree_once_and_its_rows_refer_to_one_another() -> None:
    store = share(NODES)
    rows = list(store)
    assert names(rows) == NAMES
    assert read_trees == list(range(10))
    assert rows[7].parent is rows[0]
    assert rows[0].children[6] is rows[7]
    again = list(store[20:60:2])
    assert names(again) == NAMES[20:60:2]
    assert read_trees[10:] == [1, 2]
    assert again[0] is not rows[20]
    assert again[1].parent is again[0]


def test_a_batch_reads_each_tree_once() -> None:
    store = share(NODES)
    numbers = [41, 3, 40, 59, 0, 41]
    rows = store.__getitems__(numbers)
    assert names(rows) == [NAMES[number] for number in numbers]
    assert sorted(read_trees) == [0, 2]
    assert rows[0].parent is rows[2]
    assert rows[1].parent is rows[4]
    assert rows[0] is rows[5]
    part = store[40:]
    assert names(part.__getitems__([1, 0, -1])) == [NAMES[41], NAMES[40], NAMES[-1]]
    assert len(read_trees) == 4
    assert names(store.take(numbers * 20)) == [NAMES[number] for number in numbers * 20]
    assert len(read_trees) == 6


def test_single_rows_are_read_anew_and_nothing_that_was_changed_comes_back() -> None:
    store = share(NODES)
    first = store[0]
    assert store[0] is not first
    first.name = "changed"
    first.children.clear()
    child = store[1]
    assert child.parent.name == NAMES[0]
    assert len(child.parent.children) == 19
    (batched,) = store.__getitems__([0])
    batched.name = "changed"
    assert store.__getitems__([0])[0].name == NAMES[0]
    for row in store:
        row.name = "changed"
    assert names(store) == NAMES


def test_fields_of_records_are_read_so_too() -> None:
    store = share({"n": n, "node": node} for n, node in enumerate(NODES))
    rows = list(store)
    assert [row["n"] for row in rows] == list(range(200))
    assert names(row["node"] for row in rows) == NAMES
    chunks = len(store.starts) - 1
    assert len(read_trees) < 10 + 2 * chunks  # a tree in two chunks is in each of them
    read_trees.clear()
    nodes = list(store.column("node")[100:140])
    assert names(nodes) == NAMES[100:140]
    assert nodes[3].parent is nodes[0]
    assert len(read_trees) < 5
    plain = share([{"n": n} for n in range(10)])
    assert not plain.has_graphs


def test_a_loader_reads_each_tree_once_for_a_batch() -> None:
    store = share(NODES)
    batches = list(TorchLoader(store, batch_size=40, collate_fn=names))
    assert [name for batch in batches for name in batch] == NAMES
    assert read_trees == list(range(10))


def test_a_copy_of_some_rows_has_each_tree_once(tmp_path: Any) -> None:
    """Rows that were read one by one would be as many trees as there are rows."""
    store = share(make_tree(0, 200))
    whole_nbytes = store.nbytes
    copy = store.alone(range(1, 200))
    assert names(copy) == names(make_tree(0, 200)[1:])
    assert copy.nbytes < 12 * whole_nbytes  # a tree for each chunk: the first ones are small
    store[1:].save(tmp_path / "trees.arrow")
    assert (tmp_path / "trees.arrow").stat().st_size < 12 * whole_nbytes
    opened = open_store(tmp_path / "trees.arrow")
    assert opened.has_graphs
    assert names(opened) == names(copy)


def test_trees_of_a_dataset_are_there_once_and_read_once() -> None:
    nodes: list[Any] = [[["node", n], {}] for n in range(60)]
    for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        one[1]["next"] = other
    shared = share_attributes(
        SimpleNamespace(nodes=nodes, some={n: nodes[n] for n in range(0, 60, 3)}), least_nbytes=1
    )
    assert shared.nodes[7][1]["next"][0] == ["node", 8]
    assert shared.some[9][1]["next"][0] == ["node", 10]
    assert isinstance(shared.nodes, Store)
    assert shared.some.nbytes < shared.nodes.nbytes
    rows = list(shared.nodes)
    assert rows[7][1]["next"] is rows[8]


# Chains that are longer than Python can follow.


@dataclasses.dataclass
class Link:
    number: int
    then: Link | None = None


def chain(links: int) -> Link:
    first = link = Link(0)
    for number in range(1, links):
        link.then = Link(number)
        link = link.then
    return first


def test_pickling_a_chain_that_is_too_long_is_an_error_with_advice() -> None:
    with pytest.raises(RecursionError) as raised:
        share([chain(20_000)])
    (note,) = raised.value.__notes__
    assert "pickling a Link" in note
    assert "row numbers in place of such references" in note


def test_comparing_a_chain_that_is_too_long_is_an_error_with_advice() -> None:
    store = share([chain(100)])
    assert store == [chain(100)]

    class Endless(list[Any]):
        def __eq__(self, other: object) -> bool:
            return self == other

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(RecursionError) as raised:
        assert store == [Endless()]
    (note,) = raised.value.__notes__
    assert "comparing a Link with a " in note
