"""Default collate straight into the slot, and ``empty()`` for custom collate functions.

torch's ``default_collate`` looks up how to join samples in a public map at every call. A worker replaces
torch's own entries of that map, in its own process, by functions that write their result into the slot of
the current task. A user's ``collate_fn`` that calls ``default_collate`` gets the same; entries that the
user put there stay. What worker threads put there stays too: in other threads it does what torch's own do.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader import torch_private
from shmloader.codec.layout import CODE_OF_NUMPY_DTYPE, DTYPES
from shmloader.codec.slot_writer import Column, Recipe, SlotWriter, current_writer
from shmloader.sources import SAME_AS_TORCHS, DefaultCollate

_CollateMap = dict[Any, Callable[..., Any]]


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor, in the slot of the batch that is being made.

    Call it in a ``collate_fn`` or dataset and return the tensor, or a view of it, in the batch: it then
    reaches the main process without a copy. Outside a worker, or where the tensor does not fit in the
    slot, it is an ordinary ``torch.empty`` and the result is the same.

    Args:
        *size: Sizes in items, as for ``torch.empty``.
        dtype: Its dtype; ``torch.get_default_dtype()`` if None.

    Returns:
        A contiguous tensor. In a worker it may be kept beyond the task: it is then moved to private
        memory when the batch is published.
    """
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    dtype = dtype or torch.get_default_dtype()
    writer = current_writer()
    tensor = None if writer is None else writer.tensor(shape, dtype)  # type: ignore[arg-type]
    if tensor is not None:
        return tensor
    return torch.empty(shape, dtype=dtype, device="cpu")  # type: ignore[arg-type]


def install_slot_collate(
    collate_fn: Callable[[Any], Any], *, in_thread: bool = False
) -> Callable[[Any], Any]:
    """Let ``default_collate`` write into slots, in this process.

    Args:
        collate_fn: The loader's collate function.
        in_thread: Whether other threads of this process are none of a worker's.

    Returns:
        The function to call in its place: itself unless it is torch's ``default_collate``.
    """
    collate_map = torch_private.collate_fn_map
    pristine = torch_private.collate_map_is_pristine(tuple(SAME_AS_TORCHS))
    if collate_map.get(torch.Tensor) in (torch_private.collate_tensor_fn, _collate_tensors_in_threads):
        collate_map[torch.Tensor] = _collate_tensors_in_threads if in_thread else collate_tensors
    if collate_map.get(np.ndarray) is torch_private.collate_numpy_array_fn:
        collate_map[np.ndarray] = collate_arrays
    if not pristine or collate_fn is not default_collate:
        return collate_fn
    return _SlotCollate(dict(collate_map))


class _SlotCollate(DefaultCollate):
    """``default_collate``, into the writer's outputs.

    Args:
        ours: torch's map of collate functions as `install_slot_collate` has left it.
    """

    def __init__(self, ours: _CollateMap) -> None:
        self._ours = ours

    def is_default(self) -> bool:
        """See `DefaultCollate`."""
        # The map may be changed at any time, by worker_init_fn for one.
        collate_map = torch_private.collate_fn_map
        if collate_map == self._ours:
            return True
        if not torch_private.collate_map_is_pristine(tuple(SAME_AS_TORCHS)):
            return False
        self._ours = dict(collate_map)  # with an entry more, for a type that is not joined here
        return True

    def __call__(self, samples: list[Any]) -> Any:
        writer = current_writer()
        if writer is None or not self.is_default():
            return default_collate(samples)
        if type(samples[0]) is dict:
            writer.collated, writer.recipe = _collate_dicts(samples, writer)
        else:
            writer.collated = _collate_plain(samples, writer)
        return writer.collated


def _collate_plain(samples: Sequence[Any], writer: SlotWriter) -> Any:
    """Do as torch's ``default_collate``, into the writer's outputs.

    Tensors, ndarrays, numbers and strings in built-in containers are joined here; whatever else there is
    goes to torch's function.
    """
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor:
        return _stack_tensors(samples, writer)
    if kind is dict:
        return {
            key: (_stack_tensors if type(value) is torch.Tensor else _collate_plain)(
                [sample[key] for sample in samples], writer
            )
            for key, value in first.items()
        }
    if kind is str or kind is bytes:
        return samples
    if kind is int or kind is float:
        return _join_numbers(samples, kind, writer)
    if kind is np.ndarray:
        return _stack_arrays(samples, writer)
    if kind is tuple or kind is list:
        size = len(first)
        if all(type(sample) is kind and len(sample) == size for sample in samples):
            return [_collate_plain(items, writer) for items in zip(*samples, strict=True)]
    return default_collate(samples)  # type: ignore[arg-type]


def _collate_dicts(samples: list[Any], writer: SlotWriter) -> tuple[Any, Recipe | None]:
    """Collate samples that are dicts, by a recipe where there is one."""
    begin, items, first = writer.cursor, len(samples), samples[0]
    recipe = writer.recipe_for(items, tuple(first))
    if recipe is not None:
        batch = _follow(recipe, samples)
        if batch is not None:
            writer.cursor = recipe.end
            return batch, recipe
    batch = _collate_plain(samples, writer)
    columns: list[Column] = []
    for name, value in first.items():
        joined = batch[name]
        if type(name) is not str or (id(joined) not in writer.leaf_of and type(value) is not str):
            return batch, None
        kind = type(value)
        if kind is str:
            columns.append(Column(name, kind))
        elif kind is torch.Tensor:
            columns.append(Column(name, kind, value.shape, value.dtype, joined))
        elif kind is np.ndarray and value.ndim:
            columns.append(Column(name, kind, value.shape, value.dtype, joined, _rows_of(joined.numpy())))
        else:
            return batch, None
    writer.remember(begin, items, columns)
    return batch, None


def _follow(recipe: Recipe, samples: list[Any]) -> dict[str, Any] | None:
    """Collate by a recipe; None, with nothing lost, where it does not fit."""
    batch: dict[str, Any] = {}
    stack = torch.stack
    try:
        for name, kind, shape, dtype, out, rows in recipe.columns:
            column = [sample[name] for sample in samples]
            value = column[0]
            found = type(value)
            if found is not kind:
                return None
            if out is None:
                batch[name] = column
                continue
            if value.shape != shape or value.dtype != dtype:
                return None
            if rows is not None:
                if not _join_rows(column, rows):
                    return None
            elif stack(column, 0, out=out) is not out:
                return None
            batch[name] = out
    except (RuntimeError, TypeError, KeyError, NotImplementedError):
        return None  # the general way raises what torch raises, or joins what can be joined
    return batch


def _stack_tensors(samples: Sequence[torch.Tensor], writer: SlotWriter) -> torch.Tensor:
    first = samples[0]
    try:
        output = writer.output(len(samples), first.shape, first.dtype)  # a nested tensor's shape raises
        if output is not None:
            # A tensor subclass among the samples may give something else than the output.
            return torch.stack(samples, 0, out=output.tensor)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, NotImplementedError):
        pass  # shapes that differ, sparse, nested, on another device: torch's own function knows what to do
    return collate_tensors(samples, collate_fn_map=torch_private.collate_fn_map)


def _rows_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory with the first two dimensions as one: what `numpy.concatenate` of the samples gives."""
    return array.reshape(-1, *array.shape[2:])


_shape = operator.attrgetter("shape")


def _are_alike(arrays: Sequence[Any]) -> bool:
    """Whether all are ndarrays of the first one's shape, which has a dimension at least."""
    first = arrays[0]
    return (
        first.ndim > 0
        and set(map(type, arrays)) == {np.ndarray}
        and list(map(_shape, arrays)).count(first.shape) == len(arrays)
    )


def _has_torchs_strides(array: np.ndarray[Any, Any]) -> bool:
    """Whether torch takes an ndarray of such strides; it has errors of its own for others.

    Of the samples of a batch the first one is asked: to look at each would add a tenth to the time in which
    all are joined. The others are joined right, whatever their strides.
    """
    strides = array.strides
    return not strides or (min(strides) >= 0 and not gcd(*strides) % array.itemsize)


def _join_rows(arrays: Sequence[Any], rows: np.ndarray[Any, Any]) -> bool:
    """Copy arrays of one dimension or more below each other, in half of the time that `numpy.stack` takes.

    Args:
        arrays: Samples, the first of which fits.
        rows: See `_rows_of`.

    Returns:
        Whether all of them are ndarrays of one shape, so that it was done.

    Raises:
        TypeError: If the dtypes are not all that of ``rows``.
    """
    if not _are_alike(arrays) or not _has_torchs_strides(arrays[0]):
        return False
    np.concatenate(arrays, out=rows, casting="no")
    return True


def _stack_arrays(samples: Sequence[np.ndarray[Any, Any]], writer: SlotWriter) -> torch.Tensor:
    first = samples[0]
    code = CODE_OF_NUMPY_DTYPE.get(first.dtype)
    if code is not None and first.ndim:
        begin = writer.cursor
        output = writer.output(len(samples), first.shape, DTYPES[code].torch_dtype)
        if output is not None:
            with contextlib.suppress(TypeError):
                if _join_rows(samples, _rows_of(output.array)):
                    return output.tensor
            writer.cursor = begin  # nobody has seen the output
    return collate_arrays(samples, collate_fn_map=torch_private.collate_fn_map)


def _join_numbers(samples: Sequence[Any], kind: type, writer: SlotWriter) -> torch.Tensor:
    """Join ints to int64 and floats to float64, as torch does; anything mixed is left to torch."""
    if set(map(type, samples)) == {kind}:
        output = writer.output(len(samples), (), torch.int64 if kind is int else torch.float64)
        if output is not None:
            try:
                output.array[:] = samples
            except OverflowError:
                pass  # torch has an error of its own for it
            else:
                return output.tensor
    joined: torch.Tensor = default_collate(samples)  # type: ignore[arg-type]
    return joined


def collate_tensors(
    batch: Sequence[torch.Tensor], *, collate_fn_map: _CollateMap | None = None
) -> torch.Tensor:
    """Stack tensors into the slot; same result and errors as torch's ``collate_tensor_fn``."""
    first = batch[0]
    if first.is_nested or first.layout is not torch.strided:
        result: torch.Tensor = torch_private.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return result
    shape = (len(batch), *first.shape)
    out = None
    if type(first) is torch.Tensor and first.device.type == "cpu":
        writer = current_writer()
        if writer is not None:
            out = writer.tensor(shape, first.dtype)
    if out is None:
        # With ``out`` as torch has it in workers, so that dtypes that differ, and samples that require
        # grad, are met with the same errors.
        out = first.new_empty(shape)
    return torch.stack(batch, 0, out=out)  # type: ignore[arg-type]


def _collate_tensors_in_threads(
    batch: Sequence[torch.Tensor], *, collate_fn_map: _CollateMap | None = None
) -> torch.Tensor:
    """The same in worker threads while they make a batch; torch's own function anywhere else."""
    if current_writer() is not None:
        return collate_tensors(batch, collate_fn_map=collate_fn_map)
    result: torch.Tensor = torch_private.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    return result


_JOIN_TENSORS = (collate_tensors, _collate_tensors_in_threads)


def collate_arrays(
    batch: Sequence[np.ndarray[Any, Any]], *, collate_fn_map: _CollateMap | None = None
) -> torch.Tensor:
    """Stack ndarrays into a tensor in the slot; same result and errors as torch's own function."""
    first = batch[0]
    code = CODE_OF_NUMPY_DTYPE.get(first.dtype)
    writer = current_writer()
    ours = collate_fn_map is not None and collate_fn_map.get(torch.Tensor) in _JOIN_TENSORS
    if ours and code is not None and writer is not None and _has_torchs_strides(first):
        dtype, shape = first.dtype, first.shape
        samples: Sequence[Any] = batch
        alike = _are_alike(samples)
        fit = alike or all(isinstance(sample, np.ndarray) and sample.shape == shape for sample in samples)
        if fit and all(sample.dtype == dtype for sample in samples):
            out = writer.tensor((len(batch), *shape), DTYPES[code].torch_dtype)
            if out is not None:
                if alike:
                    np.concatenate(batch, out=_rows_of(out.numpy()), casting="no")
                else:
                    np.stack(batch, out=out.numpy())
                return out
    result: torch.Tensor = torch_private.collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)
    return result


SAME_AS_TORCHS.update((*_JOIN_TENSORS, collate_arrays))
