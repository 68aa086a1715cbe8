"""The graph of objects that an object holds: finds the ones to share, and copies the paths to them.

Nothing is changed in the graph. Every object on a path to a replaced one is copied, shallowly. All others
stay the same objects. Imports no pyarrow.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import time
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from shmloader.store import kinds, static
from shmloader.store.handles import MappedFiles, is_shared
from shmloader.store.static import is_a

_WHY_NOT = "its class is none that can be shared: keep its data in plain arrays or lists"
_MOST_LABELS = 16  # of a path that is shown
_SURE = {id(kind) for kind in (str, int, float, bool, bytes, type(None))}  # a metaclass may define ==
_MOST_NODES = 500_000
_MOST_SECONDS = 2.0

_Label = str | tuple[Any]
"""The step from a holder to an object: an attribute with its dot, or an index or key in a tuple."""

_Held = Iterable[tuple[_Label, Any]]


class Node:
    """One object of the graph.

    Attributes:
        value: The object.
        label: The step from its holder to it.
        holder: What holds it; None for the root.
        plan: The form in which it is shared: an array, a container of rows, an object of another library
            (``foreign``); None if it is not shared itself.
        parents: Keys of the nodes that hold it.
    """

    __slots__ = ("holder", "label", "parents", "plan", "value")

    def __init__(self, value: Any, label: _Label, holder: Node | None = None) -> None:
        self.value = value
        self.label = label
        self.holder = holder
        self.plan: Literal["array", "rows", "foreign"] | None = None
        self.parents: list[int] = []

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
    """The objects that can be reached from a root, by ``id``; every object stays alive through its node.

    Attributes:
        nodes: The objects.
        left: Large objects that cannot be shared: for each its size and a sentence.
        stopped: The object at which the walk was given up, for its length; None if it saw everything.
    """

    def __init__(self, root: Any, *, is_asked_for: bool = False) -> None:
        """Walk through an object and all that it holds.

        Args:
            root: The object.
            is_asked_for: Whether to share it whatever its size.
        """
        self.left: list[tuple[Node, int, str]] = []
        self.stopped: Node | None = None
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
        value, kind = node.value, kinds.container_kind(node.value)
        if kinds.is_store(value) or kinds.is_hugging_face(value):
            return self._open(node)
        if is_a(value, np.ndarray | torch.Tensor) and is_shared(value, self._files):
            return ()
        if is_a(value, torch.utils.data.Dataset):
            return kinds.attributes_of(value)
        if kind is not None and (kinds.is_few_large(value) or kinds.holds_datasets(value)):
            if kind is set:
                raise TypeError(
                    "a set of datasets, or of other large objects, is not shared: use a list or a dict"
                )
            return kinds.elements_of(value)
        if kind is None and type(value) in (np.ndarray, torch.Tensor):
            node.plan = "array"
        elif kind is not None or kinds.is_rows(value):
            node.plan = "rows"
        elif kinds.is_open(value):
            return kinds.attributes_of(value)
        else:
            advice = kinds.how_to_share(value)
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
            return kinds.attributes_of(value)
        if kinds.is_store(value):
            return ()
        if kinds.container_kind(value) is not None:
            return self._open_container(node)
        if kinds.is_hugging_face(value) and is_a(value, dict):  # a DatasetDict
            return kinds.elements_of(value)
        if kinds.is_open(value):
            self._open_classes.add(id(type(value)))
            return kinds.attributes_of(value)
        self._look_at_data(node)
        return ()

    def _look_at_data(self, node: Node) -> None:
        value = node.value
        if type(value) is np.ndarray or type(value) is torch.Tensor:
            self._look_at_array(node, kinds.estimate_nbytes(value))
        elif kinds.is_arrow(value) or kinds.is_pandas_part(value) or kinds.is_hugging_face(value):
            if kinds.estimate_nbytes(value) >= kinds.LEAST_NBYTES:
                node.plan = "foreign"
        elif is_a(value, np.ndarray):
            if not is_shared(np.ndarray.view(value, np.ndarray), self._files):
                self.leave(node, kinds.estimate_nbytes(value), _WHY_NOT)
        elif type(value) is types.MappingProxyType or (
            static.base_of(value) is not None and all(map(kinds.is_data, kinds.some(value)))
        ):
            self.leave(node, kinds.estimate_nbytes(value), _WHY_NOT)
        else:
            self.leave(node, static.sizeof(value), _WHY_NOT)  # a text, bytes, an array.array

    def _look_at_array(self, node: Node, nbytes: int) -> None:
        value = node.value
        if nbytes < kinds.LEAST_NBYTES or is_shared(value, self._files):
            return
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            why = "an array of Python objects with several dimensions has no rows: keep a list of its rows"
            self.leave(node, nbytes, why)
        elif isinstance(value, np.ndarray) or kinds.is_shareable_tensor(value):
            node.plan = "array"
        elif value.device.type == "cpu":
            why = "only dense tensors that do not require grad can be shared: see Tensor.detach"
            self.leave(node, nbytes, why)

    def _open_container(self, node: Node) -> _Held:
        value = node.value
        if not all(map(kinds.is_data, kinds.some(value))):
            if static.length(value) <= kinds.MOST_WALKED and kinds.container_kind(value) is not set:
                return kinds.elements_of(value)
            why = blame(value, kinds.is_data, "which is more than data")
            self.leave(node, kinds.estimate_nbytes(value), why)
        elif kinds.estimate_nbytes(value) >= kinds.LEAST_NBYTES:
            if kinds.is_few_large(value):
                return kinds.elements_of(value)
            node.plan = "rows"
        return ()

    def leave(self, node: Node, nbytes: int, why: str) -> None:
        """Note that a thing cannot be shared, if it is large."""
        if nbytes >= kinds.LEAST_NBYTES:
            self.left.append((node, nbytes, why))


def _is_small(value: Any) -> bool:
    """Whether a value is a number, or a text too small to be named."""
    return id(type(value)) in _SURE and static.sizeof(value) < kinds.LEAST_NBYTES


def _shown(key: Any) -> str:
    """A key for people, without its class's code."""
    return reprlib.repr(key) if id(type(key)) in _SURE else f"<{static.name_of(type(key))}>"


def blame(container: Any, is_fine: Callable[[Any], bool], why: str) -> str:
    """A sentence on the first element of a container that keeps it from being shared."""
    for (key,), element in kinds.elements_of(container):
        if not _is_small(element) and not is_fine(element):
            return (
                f"its element [{_shown(key)}] is a {static.name_of(type(element))}, {why}. Leave it out, or "
                "keep it in a container of its own"
            )
    return why


class Rebuilder:
    """Copies the objects on paths to shared ones, each once.

    Args:
        nodes: The objects, by ``id``.
        replaced: The replacements of some of them.
    """

    def __init__(self, nodes: Mapping[int, Node], replaced: dict[int, Any]) -> None:
        self._nodes = nodes
        self._copies = replaced
        self._changed = self._ancestors(replaced)

    def _ancestors(self, keys: Iterable[int]) -> set[int]:
        found: set[int] = set()
        todo = list(keys)
        while todo:
            for parent in self._nodes[todo.pop()].parents:
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def rebuild(self, root: Any) -> Any:
        """The replacement of the root."""
        # Mutable objects first, all of them and still empty, so that cycles find them.
        mutable = [key for key in self._changed if not _is_immutable(self._nodes[key].value)]
        for key in mutable:
            self._copies[key] = _empty_like(self._nodes[key].value)
        for key in mutable:
            self._fill(self._nodes[key].value, self._copies[key])
            _keep_if_it_matters(self._nodes[key].value, self._copies[key])
        return self._new(root)

    def _new(self, value: Any) -> Any:
        """The replacement of ``value``."""
        key = id(value)
        if key in self._copies:
            return self._copies[key]
        if key not in self._changed:
            return value
        copy = self._copies[key] = self._with_parts(value)
        if not is_a(value, types.MethodType) and (attributes := static.dict_of(value)):
            # After the copy is known: what an attribute holds may lead back to it.
            copy.__dict__.update((name, self._new(held)) for name, held in attributes.items())
        return copy

    def _with_parts(self, value: Any) -> Any:
        """A copy of an immutable object whose parts are replaced, without its attributes."""
        if is_a(value, types.MethodType):
            return types.MethodType(value.__func__, self._new(value.__self__))
        if is_a(value, functools.partial):
            parts = self._new(value.func), self._new(value.args), self._new(value.keywords)
            return type(value)(parts[0], *parts[1], **parts[2])
        if type(value) is tuple:
            return tuple(map(self._new, value))
        return type(value)._make(map(self._new, value))

    def _fill(self, original: Any, copy: Any) -> None:
        if is_a(original, list | deque):
            copy.extend(map(self._new, original))
        elif is_a(original, np.ndarray):
            for number, value in enumerate(original):  # of a list, NumPy would look into the elements
                copy[number] = self._new(value)
        elif is_a(original, dict):
            copy.update((key, self._new(value)) for key, value in original.items())
        else:
            attributes, slots = static.dict_of(original), static.slots_of(original)
            # Not setattr: frozen dataclasses and datasets with rules of their own refuse it. Nor the copy's
            # __dict__ where it can be helped: attributes would be slower to read (docs/decisions/0033).
            for name, value in attributes.items():
                if _is_plain_name(name, type(copy)):
                    object.__setattr__(copy, name, self._new(value))
                else:
                    copy.__dict__[name] = self._new(value)
            for name, value in slots.items():
                object.__setattr__(copy, name, self._new(value))


_kept_for_good: list[Any] = []


class Identity(weakref.ref[Any]):
    """A weak reference to an original; equal to another one of the same living object."""

    __slots__ = ()
    __hash__ = weakref.ref.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self() is not None and self() is other()


def _keep_if_it_matters(original: Any, copy: Any) -> None:
    """Keep an object as long as its copy, if its death would affect objects that both hold.

    That may be by ``__del__`` or ``weakref.finalize``, or because the copy's contents refer to the original
    weakly.
    """
    others = any(type(one) is not Identity for one in weakref.getweakrefs(original))
    if others or hasattr(type(original), "__del__"):
        try:
            weakref.finalize(copy, lambda _: None, original)  # at exit, too: else neither of them would end
        except TypeError:  # its class has slots, and none for weak references
            _kept_for_good.append(original)


def _is_plain_name(name: Any, kind: type) -> bool:
    """Whether setting an attribute of an object of a class calls no property or other descriptor."""
    return type(name) is str and not inspect.isdatadescriptor(inspect.getattr_static(kind, name, None))


def _is_immutable(value: Any) -> bool:
    return is_a(value, tuple | types.MethodType | functools.partial)


def _empty_like(value: Any) -> Any:
    kind = type(value)
    if is_a(value, defaultdict):
        return kind(value.default_factory)
    if is_a(value, deque):
        return kind(maxlen=value.maxlen)
    if is_a(value, np.ndarray):
        return np.empty_like(value)
    return kind() if is_a(value, list | dict | types.SimpleNamespace) else object.__new__(kind)
