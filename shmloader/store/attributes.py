"""Sharing an object and what it holds: large containers are replaced by shared ones, in one buffer.

The shared value of each node of the graph is written first, and made once the memory is sealed. Then it is
put into the node's place.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import logging
import pickle
import sys
from collections import defaultdict
from collections.abc import ItemsView, Iterator, Mapping, Sized
from copy import deepcopy
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.codec.array_kinds import kind_of_tensor
from shmloader.errors import NotSharedWarning, warn
from shmloader.foreign import is_arrow, is_hugging_face, is_pandas, is_pandas_part
from shmloader.store import objects, static
from shmloader.store.base import Store
from shmloader.store.columns.encode import ColumnEncoder
from shmloader.store.columns.key_hashes import hashes_of
from shmloader.store.columns.kind import COLUMN
from shmloader.store.graph import Graph, Node, blame_element, find_all
from shmloader.store.handles import MappedFiles, is_shared, register
from shmloader.store.mapping import MappingStore, SetStore, factory_of, write_index
from shmloader.store.memory import Make, MemoryWriter, Table, write_rows
from shmloader.store.originals import note_shared
from shmloader.store.replace import Replacer
from shmloader.store.rows import RowStore
from shmloader.store.sealed_buffer import SharedBuffer

_log = logging.getLogger(__name__)

_LEAST_WARNED_NBYTES = 4 << 20
_PANDAS_ROWS = 1 << 14
_BLAMED_AT_ONCE = 1 << 14  # elements that are tried together
_MOST_BLAMED = 8  # keys that lead to an element, in a message


def share_graph(root: Any, *, copy: bool = False, only_held: bool = False, in_place: bool = False) -> Any:
    """Share an object and what it holds, or only what it holds; see `shmloader.share`.

    Either in a copy of the object, or ``in_place``: in the object itself, and in others that only it holds.
    """
    root = root if only_held else objects.plain_if_few(root)
    graph = Graph(root, is_asked_for=not only_held)
    nodes = [node for node in graph.nodes.values() if node.plan]
    elsewhere = graph.held_elsewhere() if in_place else set[int]()
    replacer = Replacer(graph.nodes, in_place=in_place, elsewhere=elsewhere)
    if in_place:
        files = MappedFiles()  # what the program shares with its workers by itself stays so
        nodes = [one for one in nodes if one.plan != "array" or not files.is_shared_by_program(one.value)]
        nodes = [node for node in nodes if _has_holder(node, replacer, graph)]
    # Whole arrays are written first, and dicts last, whose values mostly are some of a list's.
    nodes.sort(key=_turn)
    replaced: dict[int, Any] = {}
    if nodes:
        with MemoryWriter(len(nodes)) as writer:
            made = [(node, _write_if_possible(node, writer, graph, copy)) for node in nodes]
            if any(make is not None for _, make in made):
                buffer = writer.seal()
                replaced = {id(node.value): make(buffer) for node, make in made if make is not None}
    note_shared(node.value for node in nodes if id(node.value) in replaced)
    _report(graph, replaced)
    return replacer.replace(root, replaced) if replaced else root


def _turn(node: Node) -> tuple[int, int]:
    """When to write a node: arrays before others, and large ones before what may be views of them."""
    turn = (node.plan == "rows") + isinstance(node.value, dict | set | frozenset)
    return turn, -objects.estimate_nbytes(node.value) if node.plan == "array" else 0


def _has_holder(node: Node, replacer: Replacer, graph: Graph) -> bool:
    """Whether anything may hold an object's shared form; a holder that may not is named."""
    spared, can = replacer.spared_holder(node)
    if spared is not None:
        why = (
            f"its holder {spared.path}, a {static.name_of(type(spared.value))}, stays as it is, since "
            "something outside of the dataset refers to it too. Give the dataset one of its own: "
            "shmloader.share(...) makes a shared copy"
        )
        graph.leave(node, why)
    return can


def _write_if_possible(node: Node, writer: MemoryWriter, graph: Graph, copy: bool) -> Make | None:
    """Write a node's value; None if it cannot be shared."""
    begin = writer.place
    try:
        return _write(node, writer, copy)
    except (MemoryError, OSError):  # of this process or host, not of the elements
        raise
    except Exception as error:
        if node.holder is None:
            can_be_read_again = isinstance(node.value, Sized) and not isinstance(node.value, Iterator)
            if node.plan == "rows" and can_be_read_again:
                error.add_note(f"shmloader: {_blame(node.value, 'which cannot be kept')}")
            raise
        # As text: a warning that is kept must not keep the frames, and with them the stores.
        said = f"which cannot be kept ({type(error).__name__}: {error})"
        graph.leave(node, _blame(node.value, said))
    writer.rewind(begin)
    return None


def _blame(container: Any, why: str) -> str:
    """A sentence on the first element, at any depth, that cannot be kept; ``why`` alone if each can."""
    keys: list[Any] = []
    value = container
    while not keys or (len(keys) < _MOST_BLAMED and objects.container_kind(value) is not None):
        if (found := _element_to_blame(value)) is None:
            break
        (key,), value = found
        keys.append(key)
    return blame_element(keys, value, why) if keys else why


def _element_to_blame(container: Any) -> tuple[tuple[Any], Any] | None:
    """The first element of a container that cannot be kept, after the key that leads to it."""
    elements = list(objects.elements_of(container))
    parts = (elements[begin : begin + _BLAMED_AT_ONCE] for begin in range(0, len(elements), _BLAMED_AT_ONCE))
    part = next((part for part in parts if not _can_be_kept(part)), [])
    while len(part) > 1:
        half = part[: len(part) // 2]
        part = part[len(half) :] if _can_be_kept(half) else half
    return part[0] if part and not _can_be_kept(part) else None


def _can_be_kept(elements: list[tuple[Any, Any]]) -> bool:
    try:
        ColumnEncoder().encode([value for _, value in elements])
    except Exception:  # noqa: BLE001 - whatever their classes raise
        return False
    return True


def _report(graph: Graph, replaced: Mapping[int, Any]) -> None:
    """Log what was shared, and give one warning that names everything large that was not."""
    for key in replaced:
        node = graph.nodes[key]
        _log.info("share: %s, a %s, is now in shared memory", node.path, static.name_of(type(node.value)))
    left = []
    for node, nbytes, why in graph.left:
        text = f"{node.path}, a {static.name_of(type(node.value))} of about {nbytes:,} bytes: {why}"
        _log.info("share: left %s", text)
        if nbytes >= _LEAST_WARNED_NBYTES:
            left.append(text)
    if graph.stopped is not None:
        left.append(
            f"{graph.stopped.path} and what comes after it: the search was given up after "
            f"{len(graph.nodes):,} objects. Keep small ones as dicts in one list, or share large parts"
        )
    if left:
        said = "share: the following could not be shared, so each process will have its own copy:\n  "
        warn(said + "\n  ".join(left), NotSharedWarning)


def share_for_loader(dataset: Any) -> Any:
    """Share the contents of a dataset in place; returns it, or the shared form of a plain container."""
    is_plain = type(dataset) in (list, tuple, dict, np.ndarray, torch.Tensor)
    if is_plain or objects.is_open(dataset) or is_hugging_face(dataset):
        # A sequence or mapping with a class of its own may give other samples at each access.
        return share_graph(dataset, only_held=not is_plain, in_place=True)
    graph = Graph(dataset)
    if not graph.left:
        why = "it is neither a torch Dataset nor a list, tuple, dict, array or tensor"
        graph.leave(graph.nodes[id(dataset)], why)
    _report(graph, {})
    return dataset


def unshare(root: Any) -> Any:
    """Put lists, dicts and arrays in the place of shared ones; see `shmloader.unshare`."""
    replaced: dict[int, Any] = {}

    def is_shared_one(value: Any) -> bool:
        made = _unshared(value)
        if made is not None:
            replaced[id(value)] = made
        return made is not None

    nodes = find_all(root, is_shared_one)
    return Replacer(nodes, in_place=True).replace(root, replaced) if replaced else root


def _unshared(value: Any) -> Any:
    """A copy of a shared value in the memory of this process; None if it is not shared."""
    if type(value) in (np.ndarray, torch.Tensor):
        if not is_shared(value, None):
            return None
        return value.clone() if isinstance(value, torch.Tensor) else value.copy()
    if isinstance(value, MappingStore):
        factory = value.default_factory
        return value.plain() if factory is None else defaultdict(factory, value.plain())
    if isinstance(value, Store | SetStore):
        return list(value.plain()) if isinstance(value, Store) else set(value)
    if is_pandas_part(value):
        with contextlib.suppress(Exception):  # of its objects, which cannot be pickled: nor are they shared
            arrays = (np.asarray(view) for view in _pickled_pandas(value)[1] if view.nbytes)
            return deepcopy(value) if any(is_shared(array, None) for array in arrays) else None
    return None


# --- writing of values


def _write(node: Node, writer: MemoryWriter, copy: bool) -> Make:
    """Write a node's value; returns the function that makes the shared one."""
    value = node.value
    if node.plan == "array":
        return _write_array(value, writer)
    if node.plan == "rows":
        return _write_rows(value, writer, copy)
    if is_pandas_part(value):  # objects of other libraries keep their classes
        return _write_pandas(value, writer)
    make = _write_in_place(value if is_arrow(value) else value.table, writer)
    return make if is_arrow(value) else lambda it: sys.modules["datasets.table"].InMemoryTable(make(it))


def _write_array(value: Any, writer: MemoryWriter) -> Make:
    """Write an ndarray or a tensor; TypeError if it is one small value, or a tensor that cannot be shared."""
    if isinstance(value, torch.Tensor):
        resolved = value.resolve_conj().resolve_neg() if not value.requires_grad else value
        if kind_of_tensor(resolved) is None or not value.dim():
            raise TypeError(
                "only dense CPU tensors without gradients, of at least one dimension, can be shared; this "
                f"one has {value.dim()} dimensions, {value.dtype}, {value.layout}, device {value.device}, "
                f"requires_grad={value.requires_grad}. See Tensor.detach(), Tensor.cpu(), Tensor.to_dense() "
                "and Tensor.reshape(1)."
            )
        return writer.array(resolved)
    if not value.ndim and value.nbytes < objects.LEAST_NBYTES:
        raise TypeError(
            f"an array without dimensions is one value ({value!r:.80}), not rows: nothing in it would be "
            "worth sharing. Share array.reshape(1), or leave it as it is"
        )
    if value.dtype.hasobject:
        raise TypeError(f"an array of Python objects with {value.ndim} dimensions: share a list of its rows")
    return writer.array(value)


def _write_rows(value: Any, writer: MemoryWriter, copy: bool) -> Make:
    """Write the rows of a store: a container of objects, an iterator, Arrow or pandas data."""
    if isinstance(value, Mapping) or objects.container_kind(value) is set:
        return _write_keyed(value, writer, copy)
    if is_arrow(value):
        table = _write_arrow(value, writer)
    else:
        table = write_rows(_pandas_rows(value) if is_pandas(value) else value, writer)
    if isinstance(value, list | tuple):
        writer.remember(value, table)
    return lambda buffer: RowStore(writer.chunks(table, buffer), (), copy)


def _write_keyed(value: Any, writer: MemoryWriter, copy: bool) -> Make:
    """Write a mapping or a set, and the index of its keys."""
    is_mapping = isinstance(value, Mapping)
    keys = value if is_mapping else list(value)
    factory, hashes = factory_of(value) if is_mapping else None, hashes_of(keys)
    items = value.items() if is_mapping else keys
    if is_mapping and not isinstance(items, ItemsView):  # of some classes a list or an iterator
        items = ItemsView(value)
    table = write_rows(items, writer)
    make_index = write_index(hashes, writer)

    def make(buffer: SharedBuffer) -> MappingStore | SetStore:
        rows = RowStore(writer.chunks(table, buffer), (), copy)
        if not is_mapping:
            return SetStore(rows, make_index(rows, buffer))
        keys = rows.column("key") if len(rows) else rows
        return MappingStore(rows, make_index(keys, buffer), factory)

    return make


def _write_arrow(data: Any, writer: MemoryWriter) -> Table:
    """Write an ``Array``, ``ChunkedArray``, ``RecordBatch`` or ``Table``."""
    if isinstance(data, pa.Array):
        data = pa.chunked_array([data])
    if isinstance(data, pa.ChunkedArray):
        data = pa.Table.from_arrays([data], schema=pa.schema([pa.field("", data.type)], COLUMN))
    writer.out.reserve(writer.out.nbytes + data.nbytes)  # before any page is touched
    table = writer.table()
    for batch in [data] if isinstance(data, pa.RecordBatch) else data.to_batches():
        if len(batch):
            batch.validate(full=True)
            table.append_batch(batch)
    return table


def _pandas_rows(data: Any) -> Iterator[Any]:
    parts = (data.iloc[begin : begin + _PANDAS_ROWS] for begin in range(0, len(data), _PANDAS_ROWS))
    if data.ndim == 1:
        return chain.from_iterable(part.tolist() for part in parts)
    if not data.columns.is_unique:
        twice = sorted({*data.columns[data.columns.duplicated()]}, key=repr)
        raise ValueError(f"rows are dicts, and columns of this DataFrame have one name: {twice}. Rename some")
    return chain.from_iterable(part.to_dict("records") for part in parts)


def _write_in_place(data: Any, writer: MemoryWriter) -> Make:
    """Write Arrow data, to be made again in the same class, over shared memory."""
    table = _write_arrow(data, writer)

    def make(buffer: SharedBuffer) -> Any:
        batches = writer.chunks(table, buffer).batches
        if isinstance(data, pa.RecordBatch):
            return batches[0] if batches else data
        if isinstance(data, pa.Table):
            return pa.Table.from_batches(batches, data.schema)
        columns = pa.chunked_array([batch.column(0) for batch in batches], data.type)
        if isinstance(data, pa.ChunkedArray):
            return columns
        return columns.chunk(0) if batches else columns.combine_chunks()

    return make


def _write_pandas(value: Any, writer: MemoryWriter) -> Make:
    """Write a pandas object as it pickles itself, with the memory of its arrays beside the pickle."""
    pickled, views = _pickled_pandas(_with_texts_in_arrow(value))
    if len(pickled) >= objects.LEAST_NBYTES:
        raise TypeError(
            f"{len(pickled):,} bytes of it are Python objects, not arrays: convert these columns, or keep "
            "them in a list or a dict"
        )
    writer.out.reserve(writer.out.nbytes + sum(view.nbytes for view in views))  # before any page is touched
    places = [(writer.out.append(view), view.nbytes) for view in views]

    def make(buffer: SharedBuffer) -> Any:
        view = buffer.view
        return pickle.loads(pickled, buffers=[view[begin : begin + nbytes] for begin, nbytes in places])

    return make


def _pickled_pandas(value: Any) -> tuple[bytes, list[memoryview[Any]]]:
    """The pickle of a pandas object, and the memory of its arrays."""
    out: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=out.append)
    pickler.dispatch_table = {**copyreg.dispatch_table, np.ndarray: _reduce_with_times}
    pickler.dump(value)
    return file.getvalue(), [buffer.raw() for buffer in out]


def _reduce_with_times(array: np.ndarray[Any, Any]) -> Any:
    """The pickle of an array without its memory; NumPy itself leaves the memory of times in the pickle."""
    if array.dtype.kind in "mM":
        return np.ndarray.view, (array.view(np.int64), array.dtype)
    return array.__reduce_ex__(5)


def _reduce_arrow_backed(array: Any, _: MappedFiles | None) -> Any:
    """The pickle of a pandas array over Arrow's, without the copy that pandas makes first."""
    return array.dtype.__from_arrow__, (array.__arrow_array__(),)


def _with_texts_in_arrow(value: Any) -> Any:
    """A pandas object whose columns of Python's texts are Arrow's."""
    import pandas as pd

    try:  # with NaN for missing ones, as columns of objects have it
        of_texts: Any = pd.StringDtype("pyarrow", na_value=np.nan)
    except TypeError:  # pandas before 2.3
        of_texts = pd.ArrowDtype(pa.large_string())
    arrays = pd.arrays.ArrowExtensionArray, pd.arrays.ArrowStringArray, of_texts.construct_array_type()
    for kind in arrays:
        register(kind, _reduce_arrow_backed)

    def texts(series: Any) -> Any:
        is_of_objects = getattr(series.dtype, "hasobject", False)
        if not is_of_objects or pd.api.types.infer_dtype(series, skipna=True) != "string":
            return series
        return series.astype(of_texts)

    if isinstance(value, pd.DataFrame):
        value = value.copy(deep=False)
        for number, kind in enumerate(value.dtypes):
            if getattr(kind, "hasobject", False):
                value.isetitem(number, texts(value.iloc[:, number]))
    return texts(value) if isinstance(value, pd.Series) else value
