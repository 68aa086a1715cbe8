"""`share` for objects with attributes: their large containers are replaced by shared ones.

The object's graph of attributes is read first and nothing is changed in it. Then the containers worth it
are shared, and every object on a path to one is copied, shallowly, with the copies in the places of the
originals. What leads to no shared container stays the very same object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import itertools
import logging
import multiprocessing.process
import pathlib
import reprlib
import threading
import types
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.store.advice import how_to_share
from shmloader.store.base import SharedObject
from shmloader.store.build import build_store, estimate_nbytes, write_store
from shmloader.store.foreign import is_hugging_face, is_pandas_part
from shmloader.store.one_buffer import StoreGroup
from shmloader.store.rebuild import Rebuilder, slots_of
from shmloader.store.whole import ArrayStore, SharedArray, SharedTensor, TensorStore

_log = logging.getLogger(__name__)

LEAST_NBYTES = 1 << 20
"""Containers smaller than this, in bytes as Python objects, are not worth a mapping, a descriptor and a
microsecond at each access: 64 processes with a copy each would take 64 MiB."""

_MOST_LOOKED = 256  # parts of a value that are looked at
_SAMPLED = 100  # elements of a container that are looked at
_FEW = 32  # a container of so few large things is taken apart, not shared as a whole
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a C module that says so
_MOST_LABELS = 16  # of a path that is shown
_MOST_WALKED = 10_000  # elements of a container of objects that are walked through

_SCALARS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, np.dtype, torch.dtype)
_VALUES = (enum.Enum, dt.date, dt.time, dt.timedelta, decimal.Decimal, pathlib.PurePath)
_DATA = (*_SCALARS, *_VALUES, uuid.UUID, np.ndarray, torch.Tensor)
# Never looked into: they are no data, or know better than their attributes what belongs to them.
_CLOSED = (
    SharedObject,
    torch.nn.Module,
    logging.Logger,
    multiprocessing.process.BaseProcess,
    threading.Thread,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    *_DATA,
)


def share_attributes(root: Any, *, least_nbytes: int = LEAST_NBYTES, progress: bool | None = None) -> Any:
    """Share the large containers that an object holds, at any depth.

    Looked into are objects of classes written in Python (attributes and slots; so nested datasets,
    ``Subset``, ``ConcatDataset``, ``StackDataset``, dataclasses), lists, tuples and dicts of such objects,
    ``types.SimpleNamespace``, bound methods and ``functools.partial``. Replaced are, from ``least_nbytes``
    on:

    * lists, tuples and dicts of data, by stores. A container of at most 32 elements some of which are large
      themselves is looked into instead.
    * ndarrays and tensors, by read-only arrays and by tensors over shared memory.

    Everything else stays: smaller containers, subclasses of list, tuple and dict (but namedtuples are
    looked into), ndarrays of objects, memory-mapped arrays, tensors that require grad or lie on another
    device, Arrow, pandas and Hugging Face objects, ``torch.nn.Module``. What was done is logged at INFO
    level.

    An object that is referred to twice is shared once, and cycles are fine. What several containers refer to
    (the same arrays, texts, records) is in memory once; nothing of it may change meanwhile. Runs in the
    calling process; the result reaches workers by handle, under every start method.

    Args:
        root: The object; it is not modified.
        least_nbytes: Size as Python objects, in bytes, from which a container is replaced.
        progress: As for `share`.

    Returns:
        ``root`` itself if nothing in it was worth sharing, else a shallow copy of it and of each object
        between it and what was shared.

    Raises:
        TypeError: If ``root`` has no attributes to look at.
        SharedMemoryExhausted: If the host has not the memory.
        OSError: If the process may open no more descriptors: one is needed for all that is shared here.
    """
    graph = _Graph(least_nbytes)
    graph.add_root(root)
    replaced = _share_containers([node for node in graph.nodes.values() if node.nbytes is not None], progress)
    if not replaced:
        _log.info(
            "share: nothing that can be shared in %s is as large as %s bytes",
            type(root).__qualname__,
            f"{least_nbytes:,}",
        )
        return root
    return Rebuilder(graph.nodes, replaced).rebuild(root)


def share_for_loader(dataset: Any) -> Any:
    """Share what a dataset holds, or the dataset itself where it is a plain container.

    Returns:
        The shared dataset; ``dataset`` itself where there is nothing to share.

    Raises:
        SharedMemoryExhausted: If the host has not the memory.
    """
    if type(dataset) in (list, tuple, dict, np.ndarray, torch.Tensor):
        return build_store(dataset)
    return share_attributes(dataset) if _is_open(dataset) else dataset


_Label = str | tuple[Any]
"""How an object is reached from its holder: an attribute with its dot, or an index or key in a tuple."""


class _Node:
    """One object of the graph.

    Attributes:
        value: The object.
        label: How its holder leads to it.
        holder: What holds it; None for the root.
        children: The objects that it holds; empty for what is not looked into.
        nbytes: Its size if it is to be shared, else None.
        parents: Keys of the nodes that hold it.
    """

    __slots__ = ("children", "holder", "label", "nbytes", "parents", "value")

    def __init__(self, value: Any, label: _Label, holder: _Node | None = None) -> None:
        self.value = value
        self.label = label
        self.holder = holder
        self.children: list[Any] = []
        self.nbytes: int | None = None
        self.parents: list[int] = []

    @property
    def path(self) -> str:
        """How it is reached from the root, for people."""
        labels: list[str] = []
        node: _Node | None = self
        while node is not None:  # made when it is asked for: of a long chain, all paths are a lot of text
            label = node.label
            labels.append(label if isinstance(label, str) else f"[{reprlib.repr(*label)}]")
            node = node.holder
        labels.reverse()
        if len(labels) > _MOST_LABELS:
            labels[_MOST_LABELS // 2 : -_MOST_LABELS // 2] = ["..."]
        return "".join(labels)


class _Graph:
    """What can be reached from the root, by ``id``; every object stays alive through its node."""

    def __init__(self, least_nbytes: int) -> None:
        self.nodes: dict[int, _Node] = {}
        self._least_nbytes = least_nbytes

    def add_root(self, root: Any) -> None:
        node = self.nodes[id(root)] = _Node(root, type(root).__qualname__)
        if not _is_open(root):
            advice = how_to_share(root)
            raise TypeError(
                "share takes sequences, mappings, arrays, tensors, Arrow and pandas objects, and objects "
                f"with attributes, such as a dataset; not {type(root).__qualname__}"
                f"{'. ' * bool(advice)}{advice}"
            )
        todo = deque([node])
        while todo:
            node = todo.popleft()
            for label, child in self._open(node):
                node.children.append(child)
                known = self.nodes.get(id(child))
                if known is None:
                    known = self.nodes[id(child)] = _Node(child, label, node)
                    todo.append(known)
                known.parents.append(id(node.value))

    def _open(self, node: _Node) -> Iterable[tuple[_Label, Any]]:
        """Decide what becomes of an object; returns what it holds if that is to be looked at."""
        value = node.value
        kind = type(value)
        if kind in (np.ndarray, torch.Tensor):
            node.nbytes = self._if_large(value.nbytes) if _is_shareable_array(value) else None
            return ()
        if kind in (list, tuple, dict):
            if not all(map(_is_data, _some(value))):
                if len(value) <= _MOST_WALKED:
                    return _elements(value)
                _log.info("share: left %s: %s %s objects, which are no data", *_describe(node))
                return ()
            node.nbytes = self._if_large(estimate_nbytes(value))
            if node.nbytes is None or not self._is_few_large(value):
                return ()
            node.nbytes = None
            return _elements(value)
        if _is_open(value):
            return _attributes(value)
        if isinstance(value, SharedObject | SharedArray | SharedTensor):
            return ()
        nbytes = None
        with contextlib.suppress(Exception):  # whatever a property raises
            nbytes = getattr(value, "nbytes", None)  # Arrow and pandas objects, memory-mapped arrays
        if isinstance(nbytes, int) and nbytes >= self._least_nbytes:
            _log.info("share: left %s: %s of %s bytes", node.path, kind.__qualname__, f"{nbytes:,}")
        return ()

    def _if_large(self, nbytes: int) -> int | None:
        return nbytes if nbytes >= self._least_nbytes else None

    def _is_few_large(self, value: Any) -> bool:
        least_nbytes = max(self._least_nbytes, LEAST_NBYTES)
        return len(value) <= _FEW and any(
            estimate_nbytes(element) >= least_nbytes
            for element in _some(value)
            if isinstance(element, list | tuple | dict | np.ndarray | torch.Tensor)
        )


def _describe(node: _Node) -> tuple[str, str, str]:
    first = next(_some(node.value))
    return node.path, f"{type(node.value).__qualname__} of {len(node.value):,}", type(first).__qualname__


def _is_shareable_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return bool(
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.is_nested)
        and not (value.is_conj() or value.is_neg())
    )


def _some(container: Any) -> Iterator[Any]:
    """Elements of a container, evenly spaced; of a dict the values."""
    step = max(1, len(container) // _SAMPLED)
    if isinstance(container, dict | set | frozenset):
        elements = container.values() if isinstance(container, dict) else container
        return itertools.islice(elements, 0, None, step)
    return iter(container[::step])


def _is_data(value: Any) -> bool:
    """Whether a value is only data, so that a copy made at each access is as good as itself.

    Of values with very many parts only the outer ones are looked at.
    """
    todo = deque([value])
    looked = 0
    while todo and looked < _MOST_LOOKED:
        part = todo.popleft()
        looked += 1
        if isinstance(part, _DATA):
            continue
        if isinstance(part, list | tuple):
            todo.extend(part[:_SAMPLED])
        elif isinstance(part, dict | set | frozenset):
            todo.extend(_some(part))
        elif dataclasses.is_dataclass(part) and not isinstance(part, torch.utils.data.Dataset):
            todo.extend(getattr(part, field.name, None) for field in dataclasses.fields(part))
        else:
            return False
    return True


def _elements(container: Any) -> Iterable[tuple[_Label, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return (((key,), element) for key, element in items)


def _is_open(value: Any) -> bool:
    """Whether to look at an object's attributes."""
    if isinstance(value, types.MethodType | functools.partial) or type(value) is types.SimpleNamespace:
        return True
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    if isinstance(value, _CLOSED) and not isinstance(value, torch.utils.data.Dataset):
        return False
    if is_pandas_part(value) or is_hugging_face(value):
        return False
    return _is_all_python(type(value))


def _is_all_python(kind: type) -> bool:
    """Whether instances have no state beside their attributes, so that copying these copies the object."""
    for base in kind.__mro__[:-1]:
        new = base.__dict__.get("__new__", object.__new__)
        written_in_python = isinstance(new, staticmethod) or new is object.__new__
        if not (written_in_python and base.__flags__ & _HEAP_TYPE):
            return False
    return kind is not object


def _attributes(value: Any) -> Iterable[tuple[_Label, Any]]:
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__)]
    held: Iterable[tuple[str, Any]] = getattr(value, "__dict__", {}).items()
    if isinstance(value, functools.partial):
        own = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        held = itertools.chain(own, held)
    elif isinstance(value, tuple):
        held = itertools.chain(zip(value._fields, value, strict=True), held)  # type: ignore[attr-defined]
    else:
        held = itertools.chain(held, slots_of(value))
    return [(f".{name}", attribute) for name, attribute in held]


_ORDER = {np.ndarray: 0, torch.Tensor: 0, list: 1, tuple: 1, dict: 2}
"""What is written first. Values are found again in what was written earlier, so that those of a dict, which
mostly are some of a list's, come last, and whole arrays before what refers to them."""


def _share_containers(nodes: list[_Node], progress: bool | None) -> dict[int, Any]:
    """Share the values of nodes in one buffer; returns what replaces them, by ``id``."""
    if not nodes:
        return {}
    nodes.sort(key=lambda node: _ORDER[type(node.value)])
    with StoreGroup(len(nodes)) as group:
        nodes = [node for node in nodes if _add(group, node, progress)]
        stores = group.finish() if nodes else []
    return {id(node.value): _replacement(node, store) for node, store in zip(nodes, stores, strict=True)}


def _add(group: StoreGroup, node: _Node, progress: bool | None) -> bool:
    """Add a node's value to the group; False if it cannot be shared."""
    try:
        group.add(write_store, node.value, progress)
    except (MemoryError, OSError):  # of this process or host, not of the elements
        raise
    except Exception as error:  # noqa: BLE001 - pickling raises whatever the elements' classes do
        # As text: whoever keeps the log record must not keep the frames, and with them the stores.
        notes = " ".join(["", *getattr(error, "__notes__", ())])
        _log.info("share: left %s: %s", node.path, f"{type(error).__name__}: {error}{notes}")
        return False
    return True


def _replacement(node: _Node, store: Any) -> Any:
    """What takes the place of a node's value."""
    what = store.describe()
    _log.info(
        "share: %s, a %s of about %s bytes in each process, is now a store of kind %r with %s rows: %s bytes "
        "of shared memory",
        node.path,
        type(node.value).__qualname__,
        f"{node.nbytes:,}",
        what.kind,
        f"{what.rows:,}",
        f"{what.nbytes:,}",
    )
    if isinstance(store, ArrayStore):
        return store.array
    return store.tensor if isinstance(store, TensorStore) else store
