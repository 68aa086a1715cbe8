"""The graph of objects that an object holds: finds the ones to share. Imports no pyarrow."""

from __future__ import annotations

import gc
import reprlib
import sys
import time
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch

from shmloader.codec.array_kinds import kind_of_tensor
from shmloader.foreign import is_arrow, is_hugging_face, is_pandas_part, is_polars, is_table_in_memory
from shmloader.store import objects, static
from shmloader.store.handles import MappedFiles, is_shared
from shmloader.store.static import is_a

_WHY_NOT = "its class is none that can be shared: keep its data in plain arrays or lists"
_WHY_NOT_POLARS = "polars keeps its memory to itself: keep the to_arrow() of it, which is shared"
_MOST_LABELS = 16  # of a path that is shown
_SURE = {id(kind) for kind in (str, int, float, bool, bytes, type(None))}  # a metaclass may define ==
_ENTERED = {id(kind) for kind in (list, tuple, dict)}
_MOST_PLAIN = 32  # parts of a row of plain values
_MOST_NODES = 500_000
_MOST_SECONDS = 2.0

_Label = str | tuple[Any]
"""The step from a holder to an object: an attribute with its dot, or an index or key in a tuple."""

_Plan = Literal["array", "rows", "foreign"]  # the last: an object of another library
_Held = Iterable[tuple[_Label, Any]]


class Node:
    """One object of the graph: the ``value``, the step to it, and its ``holder``, if it is not the root."""

    __slots__ = ("holder", "label", "parents", "plan", "value")

    def __init__(self, value: Any, label: _Label, holder: Node | None = None) -> None:
        self.value, self.label, self.holder = value, label, holder
        self.plan: _Plan | None = None  # None if it is not shared itself
        self.parents: list[int] = []  # the keys of all nodes that hold it

    def share_as(self, plan: _Plan) -> None:
        """Decide the form in which it is shared."""
        self.plan = plan

    @property
    def path(self) -> str:
        """The way to it from the root, for people."""
        labels: list[str] = []
        node: Node | None = self
        while node is not None:  # made when it is asked for: of a long chain, all paths are a lot of text
            label = node.label
            labels.append(label if isinstance(label, str) else f"[{_shown(*label)}]")
            node = node.holder
        labels.reverse()
        if len(labels) > _MOST_LABELS:
            labels[_MOST_LABELS // 2 : -_MOST_LABELS // 2] = ["..."]
        return "".join(labels)


class Graph:
    """The objects that can be reached from a root, by ``id``; every object stays alive through its node."""

    def __init__(self, root: Any, *, is_asked_for: bool = False) -> None:
        """Walk through an object and all that it holds; one ``is_asked_for`` is shared whatever its size."""
        self.left: list[tuple[Node, int, str]] = []  # large ones that cannot be shared: size, and why
        self.stopped: Node | None = None  # where the walk was given up, for its length
        self._files = MappedFiles()
        self._open_classes: set[int] = set()  # by ``id``, as a metaclass may define a hash
        node = Node(root, static.name_of(type(root)))
        self.nodes = {id(root): node}
        todo = deque([(node, self._open_root(node) if is_asked_for else self._open(node))])
        end = time.monotonic() + _MOST_SECONDS
        while todo:
            node, held = todo.popleft()
            for label, child in held:
                if _is_small(child):
                    continue
                if len(self.nodes) > _MOST_NODES or time.monotonic() > end:
                    self.stopped = Node(child, label, node)
                    return
                known = self.nodes.get(id(child))
                if known is None:
                    known = self.nodes[id(child)] = Node(child, label, node)
                    todo.append((known, self._open(known)))
                known.parents.append(id(node.value))

    def _open_root(self, node: Node) -> _Held:
        """Like `_open`, for an object that is shared whatever its size."""
        value, kind = node.value, objects.container_kind(node.value)
        if objects.is_store(value) or is_hugging_face(value):
            return self._open(node)
        if is_a(value, np.ndarray | torch.Tensor) and is_shared(value, self._files):
            return ()
        if is_a(value, torch.utils.data.Dataset):
            return objects.attributes_of(value)
        if kind is not None and (objects.is_few_large(value) or objects.holds_datasets(value)):
            if kind is set:
                raise TypeError(
                    "a set of datasets, or of other large objects, is not shared: use a list or a dict"
                )
            return objects.elements_of(value)
        if kind is None and type(value) in (np.ndarray, torch.Tensor):
            node.share_as("array")
        elif kind is not None or objects.is_rows(value):
            node.share_as("rows")
        elif objects.is_open(value):
            return objects.attributes_of(value)
        else:
            advice = objects.how_to_share(value)
            raise TypeError(
                "share takes sequences, mappings, arrays, tensors, Arrow and pandas objects, and objects "
                f"with attributes, such as a dataset; not {type(value).__qualname__}"
                f"{'. ' * bool(advice)}{advice}"
            )
        return ()

    def _open(self, node: Node) -> _Held:
        """Decide whether and how to share an object; returns its contents if the walk goes on there."""
        value = node.value
        if id(type(value)) in self._open_classes:
            return objects.attributes_of(value)
        if objects.is_store(value):
            return ()
        if objects.container_kind(value) is not None:
            return self._open_container(node)
        if is_hugging_face(value):
            # Of a dataset the tables in memory: of its rows, and of its indices if it was shuffled.
            held = objects.attributes_of(value)
            tables = [one for one in held if is_table_in_memory(one[1])]
            return objects.elements_of(value) if is_a(value, dict) else tables
        if objects.is_open(value):
            self._open_classes.add(id(type(value)))
            return objects.attributes_of(value)
        self._look_at_data(node)
        return ()

    def _look_at_data(self, node: Node) -> None:
        value = node.value
        if type(value) is np.ndarray or type(value) is torch.Tensor:
            self._look_at_array(node)
        elif is_arrow(value) or is_pandas_part(value) or is_table_in_memory(value):
            if objects.estimate_nbytes(value) >= objects.LEAST_NBYTES:
                node.share_as("foreign")
        elif is_polars(value):
            self.leave(node, _WHY_NOT_POLARS, int(value.estimated_size()))
        elif is_a(value, np.ndarray):
            if not is_shared(np.ndarray.view(value, np.ndarray), self._files):
                self.leave(node, _WHY_NOT)
        elif type(value) is types.MappingProxyType or (
            static.base_of(value) is not None and all(map(objects.is_data, objects.some(value)))
        ):
            self.leave(node, _WHY_NOT)
        else:
            self.leave(node, _WHY_NOT, static.sizeof(value))  # a text, bytes, an array.array

    def _look_at_array(self, node: Node) -> None:
        value, nbytes = node.value, objects.estimate_nbytes(node.value)
        if isinstance(value, np.ndarray) or value.layout is torch.strided:
            nbytes = max(nbytes, value.nbytes)  # overlapping items are pickled one by one
        if nbytes < objects.LEAST_NBYTES or is_shared(value, self._files):
            return
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            why = "an array of Python objects with several dimensions has no rows: keep a list of its rows"
            self.leave(node, why, nbytes)
        elif isinstance(value, np.ndarray) or kind_of_tensor(value.resolve_conj().resolve_neg()) is not None:
            node.share_as("array")
        elif value.device.type == "cpu":
            why = "only dense tensors that do not require grad can be shared: see Tensor.detach"
            self.leave(node, why, nbytes)

    def _open_container(self, node: Node) -> _Held:
        value = node.value
        if not all(map(objects.is_data, objects.some(value))):
            if static.length(value) <= objects.MOST_WALKED and objects.container_kind(value) is not set:
                return objects.elements_of(value)
            self.leave(node, blame(value, objects.is_data, "which is more than data"))
        elif objects.estimate_nbytes(value) >= objects.LEAST_NBYTES:
            if objects.is_few_large(value):
                return objects.elements_of(value)
            node.share_as("rows")
        return ()

    def held_elsewhere(self) -> set[int]:
        """Keys of the objects that also something outside of the graph refers to, by any number of steps.

        Neither the root nor datasets are among them, nor what only these hold. An object that the search has
        not seen counts as outside.
        """
        alone = Node(object(), "")
        usual = sys.getrefcount(alone.value)
        held: dict[int, list[int]] = defaultdict(list)
        todo = []
        for key, node in self.nodes.items():
            for parent in node.parents:
                held[parent].append(key)
            if sys.getrefcount(node.value) > usual + len(node.parents):
                todo.append(key)
        found: set[int] = set()
        while todo:
            key = todo.pop()
            node = self.nodes[key]
            if key not in found and node.holder is not None and not objects.is_dataset(node.value):
                found.add(key)
                todo += held[key]
        return found

    def leave(self, node: Node, why: str, nbytes: int | None = None) -> None:
        """Note that a thing cannot be shared, if it is large: by these bytes, or else by an estimate."""
        nbytes = objects.estimate_nbytes(node.value) if nbytes is None else nbytes
        if nbytes >= objects.LEAST_NBYTES:
            self.left.append((node, nbytes, why))


def _is_small(value: Any) -> bool:
    """Whether a value is a number, or a text too small to be named."""
    return id(type(value)) in _SURE and static.sizeof(value) < objects.LEAST_NBYTES


class _Parts:
    """The objects that others hold, data as well, without the way to them; knows the classes it has met."""

    def __init__(self) -> None:
        self._is_atom = dict.fromkeys(_SURE, True)  # by ``id``, like the next
        self._is_open: dict[int, bool] = {}

    def are_plain(self, value: Any, depth: int = 3) -> bool:
        """Whether a value surely holds nothing but numbers, texts and the like, as most rows do."""
        kind = type(value)
        key = id(kind)
        if key in _ENTERED:
            if not depth or len(value) > _MOST_PLAIN:  # may be in many places: is looked at once
                return False
            held = value.values() if kind is dict else value
        else:
            if key not in self._is_atom:
                self._is_atom[key] = issubclass(kind, objects.ATOMS)
                self._is_open[key] = objects.is_open(value)
            if self._is_atom[key] or not depth or not self._is_open[key]:
                return self._is_atom[key]
            held = gc.get_referents(value)
        is_atom = self._is_atom.get
        for one in held:  # noqa: SIM110 - a generator takes twice as long
            if not is_atom(id(type(one))) and not self.are_plain(one, depth - 1):
                return False
        return True

    def of(self, value: Any) -> Iterable[Any] | None:
        """The objects that one holds; None if it is not entered."""
        kind = type(value)
        if kind is list or kind is tuple:
            return value  # type: ignore[no-any-return]
        if self._is_open.get(id(kind)):
            return (held for _, held in objects.attributes_of(value))
        if objects.is_store(value):
            return None
        # A list or dict may be of a class of its own.
        is_hugging = is_hugging_face(value)
        if is_a(value, dict) or (is_a(value, list | deque) and not is_hugging):
            return (held for _, held in static.items(value))
        if objects.container_kind(value) is list:
            return (held for _, held in static.items(value))
        if is_hugging:
            return (held for _, held in objects.attributes_of(value) if is_table_in_memory(held))
        return (held for _, held in objects.attributes_of(value)) if objects.is_open(value) else None


def find_all(root: Any, is_wanted: Callable[[Any], bool]) -> dict[int, Node]:
    """The wanted ones among all that a root holds, data as well, and what leads to them, by ``id``."""
    parts = _Parts()
    values, holders = {id(root): root}, dict[int, list[int] | int]()
    found, todo = list[int](), [root]
    while todo:
        value = todo.pop()
        key, held = id(value), parts.of(value)
        if held is None and is_wanted(value):
            found.append(key)
        for child in held or ():
            if parts.are_plain(child):
                continue
            known = id(child)
            if known not in values:
                values[known] = child
                todo.append(child)
            before = holders.setdefault(known, key)  # one number for most: a list takes as much as all else
            if isinstance(before, list):
                before.append(key)
            elif before != key:
                holders[known] = [before, key]
    nodes: dict[int, Node] = {}
    while found:
        key = found.pop()
        if key not in nodes:
            by = holders.get(key, [])
            node = nodes[key] = Node(values[key], "")
            node.parents.extend(by if isinstance(by, list) else [by])
            found += node.parents
    return nodes


def _shown(key: Any) -> str:
    """A key for people, without its class's code."""
    return reprlib.repr(key) if id(type(key)) in _SURE else f"<{static.name_of(type(key))}>"


def blame(container: Any, is_fine: Callable[[Any], bool], why: str) -> str:
    """A sentence on the first element of a container that keeps it from being shared."""
    for (key,), element in objects.elements_of(container):
        if not _is_small(element) and not is_fine(element):
            return blame_element([key], element, why)
    return why


def blame_element(keys: Iterable[Any], element: Any, why: str) -> str:
    """A sentence on an element of a container, which is reached through these keys."""
    steps = "".join(f"[{_shown(key)}]" for key in keys)
    return (
        f"its element {steps} is a {static.name_of(type(element))}, {why}. Leave it out, or "
        "keep it in a container of its own"
    )
