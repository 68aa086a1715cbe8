"""Default collate straight into the slot; ``empty()`` and `collate_packed` for a program's own batches.

torch's ``default_collate`` looks up how to join samples in a public map at every call. A worker replaces
torch's entry for tensors there by a function that writes into the slot of the current task. So a
``collate_fn`` that calls ``default_collate`` writes there, too. The user's own entries stay. Worker threads
never remove their function: in other threads it does the same as torch's.

If ``default_collate`` itself is the loader's collate function, no user code sees the batch before it is
published. The batch then consists of placeholders for outputs, which are made once for each place in a slot
(docs/decisions/0007).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from shmloader import torch_private
from shmloader.codec.slot_allocator import SlotAllocator, current_allocator
from shmloader.sources.gatherer import SAME_AS_TORCHS, collate_map_is_pristine

_LABELS, _NO_LABEL = "labels", -100  # which torch's losses ignore
_in_worker_process = False


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor, in the slot of the batch that is being made.

    Call it in a ``collate_fn`` or dataset and return the tensor, or a view of it, in the batch: it then
    reaches the main process without a copy. Outside a worker, or if the tensor does not fit in the slot, it
    is an ordinary ``torch.empty`` and the result is the same.

    Args:
        *size: Sizes in items, as for ``torch.empty``.
        dtype: Its dtype; ``torch.get_default_dtype()`` if None.

    Returns:
        A contiguous tensor. In a worker it may be kept beyond the task: it is then moved to private
        memory when the batch is published.
    """
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    dtype = dtype or torch.get_default_dtype()
    allocator = current_allocator()
    tensor = None if allocator is None else allocator.tensor(shape, dtype)  # type: ignore[arg-type]
    return torch.empty(shape, dtype=dtype, device="cpu") if tensor is None else tensor  # type: ignore[arg-type]


def collate_packed(samples: Sequence[Any]) -> dict[str, Any]:
    """Join samples to one row without padding, for attention over sequences of various lengths.

    It is meant for batches of a `TokenBatchSampler` with ``layout="packed"``. Names and values are those of
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` of transformers.

    Args:
        samples: Sequences of tokens, or dicts of sequences that are equally long within a sample, such as
            ``input_ids`` and ``labels``. A sequence is a tensor, an array or a list of shape ``(length,)``.

    Returns:
        The sequences joined, each of shape ``(1, total)``; bare ones are ``input_ids``. The first label of
        each sample is -100, since no token of its own comes before it. ``position_ids``, int64 of shape
        ``(1, total)``, begin at 0 in each sample. ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 of shape
        ``(samples + 1,)``, are the boundaries; ``max_length_q`` and ``max_length_k`` the longest length.

    Raises:
        ValueError: If the sequences of a sample differ in length; the sample's place and lengths are named.
    """
    rows = [sample if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    parts = {name: [torch.as_tensor(row[name]) for row in rows] for name in rows[0]}
    lengths = [len(one) for one in next(iter(parts.values()))]
    for place, length in enumerate(lengths):
        if any(len(part[place]) != length for part in parts.values()):
            found = ", ".join(f"{name}: {len(part[place]):,}" for name, part in parts.items())
            raise ValueError(f"the sequences of sample {place} of {len(rows)} differ in length: {found}")
    # Empty ones have no dtype of their own if they were lists.
    filled = {name: [one for one in part if len(one)] or part for name, part in parts.items()}
    batch: dict[str, Any] = {name: torch.cat(part)[None] for name, part in filled.items()}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if _LABELS in batch:
        firsts = ends[:-1][ends.diff() > 0]  # an empty sample has no label
        batch[_LABELS][0, firsts.long()] = _NO_LABEL
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = ends
    batch["max_length_q"] = batch["max_length_k"] = max(lengths)
    return batch


def install_slot_collate(collate_fn: Callable[[Any], Any], *, in_thread: bool) -> Callable[[Any], Any]:
    """Let ``default_collate`` write into slots: in this process, or with ``in_thread`` in its worker threads.

    Returns the function to call in place of the loader's ``collate_fn``.
    """
    global _in_worker_process  # noqa: PLW0603 - a process is a worker for good
    _in_worker_process |= not in_thread  # also where a worker's dataset has a loader with threads
    collate_map = torch_private.collate_fn_map
    if collate_map.get(torch.Tensor) is torch_private.collate_tensor_fn:
        collate_map[torch.Tensor] = collate_tensors
    return slot_collate if collate_fn is default_collate else collate_fn


def slot_collate(batch: list[Any]) -> Any:
    """Join samples as torch's ``default_collate`` does, with placeholders for leaves written in the slot."""
    allocator = current_allocator()
    if allocator is None or not collate_map_is_pristine():
        return default_collate(batch)
    return _collate(batch, allocator)


def _collate(samples: Sequence[Any], allocator: SlotAllocator) -> Any:
    """Join samples, or corresponding parts of samples; types that are not in `_JOIN` go to torch."""
    return _JOIN.get(type(samples[0]), _join_by_torch)(samples, allocator)


def _join_by_torch(samples: Sequence[Any], _: SlotAllocator) -> Any:
    return default_collate(samples)  # type: ignore[arg-type]


def _join_dicts(samples: Sequence[Any], allocator: SlotAllocator) -> Any:
    names = list(samples[0])
    try:
        # One call takes all values of a sample, in half the time of a look-up for each.
        rows = map(operator.itemgetter(*names), samples)
        columns = list(zip(*rows, strict=True)) if len(names) > 1 else [list(rows)]
    except Exception:  # noqa: BLE001 - a key that is missing, or none: torch's own function has the error
        return _join_by_torch(samples, allocator)
    # As lists, like torch's: they are returned where there is nothing to join.
    return {name: _collate(list(column), allocator) for name, column in zip(names, columns, strict=True)}


def _join_sequences(samples: Sequence[Any], allocator: SlotAllocator) -> Any:
    kind, size = type(samples[0]), len(samples[0])
    if all(type(sample) is kind and len(sample) == size for sample in samples):
        return [_collate(items, allocator) for items in zip(*samples, strict=True)]
    return _join_by_torch(samples, allocator)


def _stack_tensors(samples: Sequence[torch.Tensor], allocator: SlotAllocator) -> Any:
    first, begin = samples[0], allocator.cursor
    try:
        output = allocator.output(len(samples), first.shape, first.dtype)
        # A tensor subclass among the samples may give something other than the output.
        if output is not None and torch.stack(samples, 0, out=output.tensor) is output.tensor:  # type: ignore[arg-type]
            return output.placeholder
    except (RuntimeError, TypeError, NotImplementedError):
        pass  # shapes that differ, nested, sparse, on another device: torch's own function has the error
    allocator.go_back(begin)
    return collate_tensors(samples, collate_fn_map=torch_private.collate_fn_map)


def _stack_arrays(samples: Sequence[np.ndarray[Any, Any]], allocator: SlotAllocator) -> Any:
    first, begin = samples[0], allocator.cursor
    # torch raises errors of its own for other strides. Only the first sample's are looked at, for speed: the
    # others are joined correctly with any.
    strides = first.strides
    fits = strides and min(strides) >= 0 and not gcd(*strides) % first.itemsize
    try:
        # Concatenation stacks arrays of one length, in half the time of numpy.stack.
        if fits and set(map(type, samples)) == {np.ndarray} and len(set(map(len, samples))) == 1:
            output = allocator.output(len(samples), first.shape, first.dtype)
            if output is not None:
                np.concatenate(samples, out=output.rows, casting="no")
                return output.placeholder
    except (TypeError, ValueError):
        allocator.go_back(begin)  # shapes or dtypes that differ
    return _join_by_torch(samples, allocator)


def _join_numbers(samples: Sequence[Any], allocator: SlotAllocator) -> Any:
    """Join ints to int64 and floats to float64, as torch does; mixed types are left to torch."""
    kind = type(samples[0])
    if set(map(type, samples)) == {kind}:
        output = allocator.output(len(samples), (), torch.int64 if kind is int else torch.float64)
        if output is not None:
            with contextlib.suppress(OverflowError):  # torch has an error of its own for it
                output.rows[:] = samples
                return output.placeholder
    return _join_by_torch(samples, allocator)


_JOIN: dict[type, Callable[[Sequence[Any], SlotAllocator], Any]] = {
    torch.Tensor: _stack_tensors,
    np.ndarray: _stack_arrays,
    int: _join_numbers,
    float: _join_numbers,
    str: lambda samples, _: samples,
    bytes: lambda samples, _: samples,
    dict: _join_dicts,
    tuple: _join_sequences,
    list: _join_sequences,
}
"""By the exact class of the first sample."""


def collate_tensors(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors into the slot, in place of torch's ``collate_tensor_fn``: same result and errors.

    Outside of shmloader's workers it calls torch's own function.
    """
    first, allocator = batch[0], current_allocator()
    in_worker = _in_worker_process or allocator is not None
    if not in_worker or first.is_nested or first.layout is not torch.strided:
        result: torch.Tensor = torch_private.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return result
    shape = (len(batch), *first.shape)
    out = None
    if allocator is not None and type(first) is torch.Tensor and first.device.type == "cpu":
        out = allocator.tensor(shape, first.dtype)
    if out is None:
        # With ``out``, as torch has it in workers: dtypes that differ, and samples that require grad, then
        # raise the same errors.
        out = first.new_empty(shape)
    return torch.stack(batch, 0, out=out)  # type: ignore[arg-type]


def is_own(collate_fn: Callable[[Any], Any]) -> bool:
    """Whether a collate function is the program's own, and none of torch's."""
    return not any(collate_fn is torchs for torchs in (slot_collate, default_collate, default_convert))


SAME_AS_TORCHS.extend([slot_collate, collate_tensors])
