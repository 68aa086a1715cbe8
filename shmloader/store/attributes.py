"""Sharing an object and what it holds: large containers are replaced by shared ones, in one buffer.

The graph of attributes is read first and nothing is changed in it. Then the containers worth it are written,
and every object on a path to one is copied, shallowly, with what was shared in the places of the originals.
What leads to nothing shared stays the very same object.
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch

from shmloader.errors import NotSharedWarning
from shmloader.store import kinds, writing
from shmloader.store.base import SharedObject
from shmloader.store.columns.encode import Encoder
from shmloader.store.handles import is_shared
from shmloader.store.mapped_files import MappedFiles
from shmloader.store.memory import Make, MemoryWriter
from shmloader.store.rebuild import Rebuilder
from shmloader.store.sizes import estimate_nbytes

_log = logging.getLogger(__name__)

_MOST_LABELS = 16  # of a path that is shown
_LEAST_WARNED_NBYTES = 4 << 20
_SURE = {str, int, float, bool, bytes, type(None)}

_Label = str | tuple[Any]
"""The step from a holder to an object: an attribute with its dot, or an index or key in a tuple."""

Write = Callable[[MemoryWriter], Make]
"""Writes a value; returns what makes the shared one."""


class Node:
    """One object of the graph.

    Attributes:
        value: The object.
        label: How its holder leads to it.
        holder: What holds it; None for the root.
        write: What writes it if it is to be shared, else None.
        order: Its turn: whole arrays are written first, and dicts last, whose values mostly are some of a
            list's.
        parents: Keys of the nodes that hold it.
    """

    __slots__ = ("holder", "label", "order", "parents", "value", "write")

    def __init__(self, value: Any, label: _Label, holder: Node | None = None) -> None:
        self.value = value
        self.label = label
        self.holder = holder
        self.write: Write | None = None
        self.order = 0
        self.parents: list[int] = []

    @property
    def path(self) -> str:
        """The way to it from the root, for people."""
        labels: list[str] = []
        node: Node | None = self
        while node is not None:  # made when it is asked for: of a long chain, all paths are a lot of text
            label = node.label
            labels.append(label if isinstance(label, str) else f"[{reprlib.repr(*label)}]")
            node = node.holder
        labels.reverse()
        if len(labels) > _MOST_LABELS:
            labels[_MOST_LABELS // 2 : -_MOST_LABELS // 2] = ["..."]
        return "".join(labels)


class Graph:
    """The objects that can be reached from the root, by ``id``; every object stays alive through its node.

    Attributes:
        nodes: The objects.
        left: Sentences on what is large and cannot be shared.
    """

    def __init__(self, *, copy: bool, progress: bool | None) -> None:
        self.nodes: dict[int, Node] = {}
        self.left: list[str] = []
        self._copy = copy
        self._progress = progress
        self._files = MappedFiles()

    def add_root(self, root: Any, *, is_asked_for: bool = True) -> None:
        """Look at an object and all that it holds.

        Args:
            root: The object.
            is_asked_for: Whether it is to be shared whatever its size.
        """
        node = self.nodes[id(root)] = Node(root, type(root).__qualname__)
        todo = deque([(node, self._open_root(node) if is_asked_for else self._open(node))])
        while todo:
            node, held = todo.popleft()
            for label, child in held:
                known = self.nodes.get(id(child))
                if known is None:
                    known = self.nodes[id(child)] = Node(child, label, node)
                    todo.append((known, self._open(known)))
                known.parents.append(id(node.value))

    def _open_root(self, node: Node) -> Iterable[tuple[_Label, Any]]:
        """As `_open`, for what is shared whatever its size."""
        value = node.value
        if isinstance(value, SharedObject) or kinds.is_hugging_face(value):
            return self._open(node)
        if isinstance(value, np.ndarray | torch.Tensor) and is_shared(value, self._files):
            return ()
        if type(value) in (np.ndarray, torch.Tensor) and kinds.container_kind(value) is None:
            node.write = writing.array_writer(value)
            return ()
        if isinstance(value, torch.utils.data.Dataset):
            return kinds.attributes_of(value)
        if kinds.is_arrow(value) or kinds.is_pandas(value) or isinstance(value, Iterator):
            node.write = writing.rows_writer(value, self._copy, self._progress)
            return ()
        kind = kinds.container_kind(value)
        if kind is not None or kinds.is_sequence(value) or kinds.is_mapping(value):
            if kind is not None and (kinds.is_few_large(value) or _holds_datasets(value)):
                return kinds.elements_of(value)
            node.write = writing.rows_writer(value, self._copy, self._progress)
            return ()
        if not kinds.is_open(value):
            advice = kinds.how_to_share(value)
            raise TypeError(
                "share takes sequences, mappings, arrays, tensors, Arrow and pandas objects, and objects "
                f"with attributes, such as a dataset; not {type(value).__qualname__}"
                f"{'. ' * bool(advice)}{advice}"
            )
        return kinds.attributes_of(value)

    def _open(self, node: Node) -> Iterable[tuple[_Label, Any]]:
        """Decide what becomes of an object; returns what it holds if that is to be looked at."""
        value = node.value
        if isinstance(value, SharedObject):
            return ()
        if kinds.container_kind(value) is not None:
            return self._open_container(node)
        if type(value) is np.ndarray or type(value) is torch.Tensor:
            self._add_array(node)
        elif kinds.is_arrow(value) or kinds.is_pandas_part(value) or kinds.is_hugging_face(value):
            if estimate_nbytes(value) >= kinds.LEAST_NBYTES:
                node.write = writing.foreign_writer(value)
        elif kinds.is_open(value):
            return kinds.attributes_of(value)
        elif not (isinstance(value, np.ndarray | torch.Tensor) and is_shared(value, self._files)):
            nbytes = None
            with contextlib.suppress(Exception):  # whatever a property raises
                nbytes = getattr(value, "nbytes", None)
            if isinstance(nbytes, int):
                self._leave(
                    node,
                    nbytes,
                    "its class is none that can be shared: keep its data in plain arrays or lists",
                )
        return ()

    def _add_array(self, node: Node) -> None:
        value = node.value
        nbytes = estimate_nbytes(value)
        if nbytes < kinds.LEAST_NBYTES or is_shared(value, self._files):
            return
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                why = (
                    "an array of Python objects with several dimensions has no rows: keep a list of its rows"
                )
                self._leave(node, nbytes, why)
                return
        elif not kinds.is_shareable_tensor(value):
            if value.device.type == "cpu":
                why = "only dense tensors that do not require grad can be shared: see Tensor.detach"
                self._leave(node, nbytes, why)
            return
        node.write, node.order = writing.array_writer(value), 0

    def _open_container(self, node: Node) -> Iterable[tuple[_Label, Any]]:
        value = node.value
        if not all(map(kinds.is_data, kinds.some(value))):
            if len(value) <= kinds.MOST_WALKED and kinds.container_kind(value) is not set:
                return kinds.elements_of(value)
            self._leave(node, estimate_nbytes(value), _blame(value, kinds.is_data, "which is more than data"))
            return ()
        if estimate_nbytes(value) < kinds.LEAST_NBYTES:
            return ()
        if kinds.is_few_large(value):
            return kinds.elements_of(value)
        node.write = writing.rows_writer(value, self._copy, self._progress)
        node.order = 2 if isinstance(value, dict | set | frozenset) else 1
        return ()

    def _leave(self, node: Node, nbytes: int, why: str) -> None:
        """Note that a large thing cannot be shared."""
        if nbytes < kinds.LEAST_NBYTES:
            return
        text = f"{node.path}, a {type(node.value).__qualname__} of about {nbytes:,} bytes: {why}"
        _log.info("share: left %s", text)
        if nbytes >= _LEAST_WARNED_NBYTES:
            self.left.append(text)

    def share(self) -> dict[int, Any]:
        """Share the values of nodes in one buffer; returns what replaces them, by ``id``."""
        nodes = sorted((node for node in self.nodes.values() if node.write), key=lambda node: node.order)
        if not nodes:
            return {}
        made: list[tuple[Node, Make]] = []
        with MemoryWriter(len(nodes)) as writer:
            for node in nodes:
                make = self._write(node, writer)
                if make is not None:
                    made.append((node, make))
            if not made:
                return {}
            buffer = writer.seal()
            replaced = {id(node.value): make(buffer) for node, make in made}
        for node, _ in made:
            _log.info("share: %s, a %s, is now in shared memory", node.path, type(node.value).__qualname__)
        return replaced

    def _write(self, node: Node, writer: MemoryWriter) -> Make | None:
        """Write a node's value; None if it cannot be shared."""
        begin = writer.out.nbytes
        assert node.write is not None
        try:
            return node.write(writer)
        except (MemoryError, OSError):  # of this process or host, not of the elements
            raise
        except Exception as error:
            if node.holder is None:
                if isinstance(node.value, Sized):
                    error.add_note(f"shmloader: {_blame(node.value, _can_be_kept, 'which cannot be kept')}")
                raise
            # As text: whoever keeps the warning must not keep the frames, and with them the stores.
            said = f"which cannot be kept ({type(error).__name__}: {error})"
            self._leave(node, estimate_nbytes(node.value), _blame(node.value, _can_be_kept, said))
        writer.rewind(begin)
        return None

    def warn(self) -> None:
        """Say in one warning what is large and was not shared."""
        if self.left:
            warnings.warn(
                "share: each process will have a copy of its own of what could not be shared:\n  "
                + "\n  ".join(self.left),
                NotSharedWarning,
                stacklevel=4,
            )


def _holds_datasets(value: Any) -> bool:
    """Whether a container holds objects that are shared themselves, such as datasets."""
    closed = (torch.utils.data.Dataset, SharedObject, torch.nn.Module)
    return any(isinstance(element, closed) for element in kinds.some(value))


def _can_be_kept(value: Any) -> bool:
    if type(value) in _SURE:
        return True
    try:
        Encoder().encode([value])
    except Exception:  # noqa: BLE001 - whatever its class raises
        return False
    return True


def _blame(container: Any, is_fine: Callable[[Any], bool], why: str) -> str:
    """A sentence on the first element of a container that keeps it from being shared."""
    for (key,), element in kinds.elements_of(container):
        if type(element) not in _SURE and not is_fine(element):
            return (
                f"its element [{key!r:.60}] is a {type(element).__qualname__}, {why}. Leave it out, or keep "
                "it in a container of its own"
            )
    return why


def share_graph(root: Any, *, copy: bool = False, progress: bool | None = None) -> Any:
    """Share an object and what it holds; see `shmloader.share`."""
    graph = Graph(copy=copy, progress=progress)
    graph.add_root(root)
    replaced = graph.share()
    graph.warn()
    if not replaced:
        return root
    return Rebuilder(graph.nodes, replaced).rebuild(root)


class _Shared:
    """A dataset that a loader has shared: what it was made from, and what became of it."""

    def __init__(self, dataset: Any, shared: Any) -> None:
        self.state = _state_of(dataset)
        self.shared = weakref.ref(shared)


_shared: dict[int, _Shared] = {}


def share_for_loader(dataset: Any) -> Any:
    """Share what a dataset holds, or the dataset itself where it is a plain container.

    Frameworks make loaders anew from their original arguments: a dataset that was shared before, that is
    still in use, and whose containers are the same, is not shared again.

    Returns:
        The shared dataset; ``dataset`` itself where there is nothing to share.

    Raises:
        SharedMemoryExhausted: If the host has not the memory.
    """
    known = _shared.get(id(dataset))
    found = None if known is None else known.shared()
    if known is not None and found is not None and known.state == _state_of(dataset):
        return found
    if not (kinds.is_open(dataset) or type(dataset) in (list, tuple, dict, np.ndarray, torch.Tensor)):
        return dataset
    shared = share_graph(dataset)
    for key in [key for key, one in _shared.items() if one.shared() is None]:
        del _shared[key]
    if shared is not dataset:
        with contextlib.suppress(TypeError):  # a list of few large ones has no weak references
            _shared[id(dataset)] = _Shared(dataset, shared)
    return shared


def _state_of(dataset: Any) -> list[Any]:
    """The containers that a dataset holds, with samples of their elements."""
    graph = Graph(copy=False, progress=None)
    graph.add_root(dataset)
    state: list[Any] = []
    for key, node in graph.nodes.items():
        value = node.value
        if node.write is not None and hasattr(value, "__len__"):
            state.append((key, type(value), len(value), list(map(_identity, kinds.some(value)))))
    return state


def _identity(element: Any) -> Any:
    return repr(element) if isinstance(element, np.generic | np.ndarray | torch.Tensor) else id(element)
