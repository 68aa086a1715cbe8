"""Sources for torch's datasets that are made of others, and for datasets that make their own batches."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from shmloader.indices.array_samplers import is_by_torch
from shmloader.indices.mixture import Mixture
from shmloader.indices.packed_indices import Run, int_array
from shmloader.sources.base import (
    NotGathered,
    Rows,
    Source,
    array_of,
    as_sample_field,
    make_output,
    own_memory,
    within,
)
from shmloader.sources.blocks import block_of, is_array
from shmloader.store_hooks import hooks

_FEW_PARTS, _LEAST_OF_PART = 4, 16
"""Parts of a ``ConcatDataset``, and rows of each of more parts, that are gathered faster than samples are."""

Recognise = Callable[[Any], Source]
"""Gives the source for a dataset inside another; raises `NotGathered` if there is none."""

Pick = Callable[[Rows], Rows]


def _rows_of_fields(fields: Sequence[Source], names: Sequence[Any] | None = None) -> Source:
    """Samples that are tuples, or with ``names`` dicts, each field from a source of its own."""
    gathers, users_code = [field.gather for field in fields], any(field.users_code for field in fields)
    if names is None:
        return Source(lambda rows: [as_sample_field(gather(rows)) for gather in gathers], users_code)
    return Source(
        lambda rows: {name: gather(rows) for name, gather in zip(names, gathers, strict=True)}, users_code
    )


# --- rows of several datasets


def _concatenated_rows(dataset: ConcatDataset[Any], recognise: Recognise) -> Source:
    """Samples of several datasets, all of one form; those of each are gathered, then all put in order.

    The forms of a mixture's sources (stores, say) are seen in each batch.
    """
    forms = list(map(_form, dataset.datasets))
    of_one_form = forms == forms[:1] * len(forms)
    if not of_one_form and type(dataset) is not Mixture:
        raise NotGathered(
            "the rows of a ConcatDataset lie in several datasets, which are not all made of tensors, or of "
            "arrays, with rows of one dtype and shape. Join these into one: with shmloader.share() of all "
            "rows, or datasets.concatenate_datasets()"
        )
    parts = list(map(recognise, dataset.datasets))
    if any(part.users_code for part in parts):
        raise NotGathered("a __getbatch__ is called for the whole dataset only, not for parts of it")
    sizes = list(dataset.cumulative_sizes)
    begins = np.array([0, *sizes])

    def gather(rows: Any) -> Any:
        if type(rows) is Run:
            part = bisect.bisect_right(sizes, rows.begin)
            if part < len(sizes) and rows.end <= sizes[part]:
                before = sizes[part - 1] if part else 0
                return parts[part].gather(Run(rows.begin - before, rows.end - before))
        rows = array_of(rows)
        by_row = rows.argsort()
        ordered = rows[by_row]
        least, most = int(ordered[0]), int(ordered[-1])
        if least < 0 or most >= sizes[-1]:
            return gather(within(rows, sizes[-1]))
        part = bisect.bisect_right(sizes, least)
        if most < sizes[part]:
            return parts[part].gather(rows - begins[part])
        cuts = ordered.searchsorted(begins)
        held = np.flatnonzero(np.diff(cuts)).tolist()
        if len(held) > max(_FEW_PARTS, len(rows) // _LEAST_OF_PART):
            raise NotGathered("few rows of each of many datasets")
        with own_memory():
            batches = [parts[n].gather(ordered[cuts[n] : cuts[n + 1]] - begins[n]) for n in held]
        if not of_one_form and any(_leaf_forms(batch) != _leaf_forms(batches[0]) for batch in batches):
            raise NotGathered("the sources of a Mixture differ in the fields, dtypes or shapes of this batch")
        places = np.empty_like(by_row)
        places[by_row] = np.arange(len(rows))
        return _in_order(batches, torch.from_numpy(places))

    return Source(gather)


def _mixed_rows(mixture: Mixture, recognise: Recognise) -> Source:
    """Samples of a mixture, with the numbers of their sources if it has them."""
    samples = _concatenated_rows(mixture, recognise)
    if not mixture.with_source:
        return samples

    def numbers(rows: Rows) -> Any:
        out = make_output(len(rows), (), torch.int64)
        return out.copy_(torch.from_numpy(mixture.sources_of(within(rows, len(mixture)))))

    return _rows_of_fields([samples, Source(numbers)])


def _form(dataset: Any) -> Any:
    """The form that all samples of a dataset have in common; equal to nothing if that is not known."""
    kind = type(dataset)
    if is_array(dataset):
        return kind is torch.Tensor, dataset.dtype, dataset.shape[1:], getattr(dataset, "device", None)
    if kind is Subset:
        return _form(dataset.dataset)
    if kind is ConcatDataset or (kind is Mixture and not dataset.with_source):
        return _form(dataset.datasets[0])
    if kind is TensorDataset:
        return list(map(_form, dataset.tensors))
    if kind is not StackDataset:
        return object()
    if isinstance(dataset.datasets, dict):
        return [(name, _form(part)) for name, part in dataset.datasets.items()]
    return list(map(_form, dataset.datasets))


def _leaf_forms(batch: Any) -> Any:
    """The structure of a joined batch, with the dtypes and the shapes of its rows."""
    kind = type(batch)
    if kind is torch.Tensor and batch.dim():
        return batch.dtype, batch.shape[1:], batch.device
    if kind is dict:
        return [(name, _leaf_forms(part)) for name, part in batch.items()]
    if kind is list and batch and set(map(type, batch)) <= {torch.Tensor, dict, list}:
        return list(map(_leaf_forms, batch))
    raise NotGathered(f"a {kind.__qualname__} that is no tensor is in a batch of several sources")


def _in_order(batches: list[Any], order: torch.Tensor) -> Any:
    """The rows of several batches as one, in the order given."""
    first = batches[0]
    if type(first) is dict:
        return {name: _in_order([batch[name] for batch in batches], order) for name in first}
    if type(first) is list:
        return [_in_order(list(parts), order) for parts in zip(*batches, strict=True)]
    out = make_output(len(order), first.shape[1:], first.dtype, first.device)
    # In half the time of `index_copy_` for each.
    return torch.index_select(torch.cat(batches), 0, order.to(out.device), out=out)


def has_getbatch(dataset: Any) -> bool:
    """Whether to ask a dataset for whole batches: not if a subclass overrides how single samples are made."""
    if getattr(type(dataset), "__getbatch__", None) is None or _shadows_getitems(dataset):
        return False
    for kind in type(dataset).__mro__:
        if "__getbatch__" in vars(kind):
            return True
        if "__getitem__" in vars(kind) or "__getitems__" in vars(kind):
            return False
    return False


def _shadows_getitems(dataset: Any) -> bool:
    return "__getitems__" in getattr(dataset, "__dict__", ())


OWN_METHODS = {
    kind: tuple(getattr(kind, name, None) for name in ("__getitem__", "__getitems__"))
    for kind in (TensorDataset, Subset, StackDataset, ConcatDataset, Mixture)
}
"""Classes with sources, torch's and `Mixture`, and the methods by which they get samples."""

_CHANGED = {
    kind
    for kind, methods in OWN_METHODS.items()
    if kind is not Mixture and not all(method is None or is_by_torch(method, kind) for method in methods)
}


def source_of(dataset: Any, recognise: Recognise, *, in_worker: bool) -> Source:
    """The source for a dataset of exactly one of torch's classes.

    Its `gather` raises `NotGathered` once the program has changed what the dataset is made of. Raises
    `NotGathered` if the program has changed the class's way to get a sample.
    """
    made_of = _made_of(dataset)
    source = _source_of(dataset, type(dataset), recognise, in_worker=in_worker)

    def gather(rows: Rows | Run) -> Any:
        if _made_of(dataset) != made_of:
            raise NotGathered("the dataset was changed since it was looked at")
        return source.gather(rows)

    return source._replace(gather=gather)


def _made_of(dataset: Any) -> list[Any]:
    """The identities of the parts of a dataset, in their order."""
    kind = type(dataset)
    get_one, get_some = OWN_METHODS[kind]
    if get_some is None:
        has_some = getattr(dataset, "__getitems__", None) is not None  # in a third of the class's time
    else:
        has_some = getattr(kind, "__getitems__", None) is not get_some or _shadows_getitems(dataset)
    if has_some or kind.__getitem__ is not get_one or kind in _CHANGED:
        raise NotGathered(
            f"the program overrides how {kind.__name__} gets a sample. Give a class of your own a method "
            "__getbatch__(indices) that returns the whole batch"
        )
    if kind is TensorDataset:
        return list(map(id, dataset.tensors))
    if kind is Subset:
        return [id(dataset.dataset)]
    if kind in (ConcatDataset, Mixture):
        return [*map(id, dataset.datasets), *dataset.cumulative_sizes]
    parts = dataset.datasets
    return [*parts, *map(id, parts.values())] if isinstance(parts, dict) else list(map(id, parts))


def _source_of(dataset: Any, kind: type, recognise: Recognise, *, in_worker: bool) -> Source:
    if kind is TensorDataset:
        return _rows_of_fields([block_of(tensor, in_worker=in_worker) for tensor in dataset.tensors])
    if kind is Subset:
        source, pick = recognise(dataset.dataset), pick_from(dataset.indices, now=not in_worker)
        if in_worker:
            return Source(lambda rows: source.gather(pick(rows)), source.users_code)
        return Source(lambda rows: source.gather(_picked_now(dataset.indices, rows)), source.users_code)
    if kind is ConcatDataset:
        return _concatenated_rows(dataset, recognise)
    if kind is Mixture:
        return _mixed_rows(dataset, recognise)
    parts = dataset.datasets
    if isinstance(parts, dict):
        return _rows_of_fields(list(map(recognise, parts.values())), list(parts))
    return _rows_of_fields(list(map(recognise, parts)))


# --- the indices of a Subset


def pick_from(indices: Any, *, now: bool) -> Pick:
    """A function that looks row numbers up in the indices of a ``Subset``.

    A list is read here, as a whole; with ``now``, for a function that is called at once, only its rows are.
    Raises `NotGathered` if the indices are anything but whole numbers in one dimension.
    """
    kind = type(indices)
    if kind is range:
        return lambda rows: indices.start + indices.step * within(rows, len(indices))
    array: Any = None
    if kind is list or kind is tuple:
        if now:
            return lambda rows: plain_ints(_items(indices, rows.tolist()))
        array = plain_ints(list(indices))
    elif kind in (np.ndarray, np.memmap):
        array = np.asarray(indices)
    elif kind is torch.Tensor and indices.device.type == "cpu" and indices.dtype is torch.int64:
        array = indices.detach()
        if now:
            return lambda rows: array.index_select(0, torch.from_numpy(rows)).numpy()
        array = array.numpy()
    elif hooks.is_store(indices):
        return lambda rows: _pick_from_store(indices, rows)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype == np.uint64:
        form = f" of {indices.dtype}, {indices.ndim}-d" if hasattr(indices, "dtype") else ""
        raise NotGathered(
            f"the indices of a Subset are a {kind.__qualname__}{form}. Pass a list of ints, or an array or "
            "tensor of int64 with one dimension"
        )
    return lambda rows: array.take(rows).astype(np.int64, copy=False)


def _picked_now(indices: Any, rows: Rows | Run) -> Rows | Run:
    """The rows at these places in the indices of a ``Subset``, which are read now."""
    if type(rows) is not Run:
        return pick_from(indices, now=True)(rows)  # type: ignore[arg-type]
    begin, end = rows
    if type(indices) is range and indices.step == 1 and indices.start >= 0 and end <= len(indices):
        return Run(indices.start + begin, indices.start + end)
    if type(indices) in (list, tuple) and end <= len(indices):
        picked = plain_ints(indices[begin:end])
    else:
        picked = pick_from(indices, now=True)(rows.array())
    run = Run(int(picked[0]), int(picked[-1]) + 1)
    may_be_run = run.begin >= 0 and run.end - run.begin == len(picked)
    return run if may_be_run and picked.tobytes() == run.array().tobytes() else picked


def _items(values: Any, places: list[int]) -> list[Any]:
    return list(operator.itemgetter(*places)(values)) if len(places) > 1 else [values[places[0]]]


def _pick_from_store(store: Any, rows: Rows) -> Rows:
    picked = store.take(within(rows, len(store)))
    if type(picked) is not np.ndarray or picked.dtype != np.int64 or picked.ndim != 1:
        raise NotGathered(
            "the indices of a Subset are a store of something else than ints. Share a list of ints"
        )
    return picked


def plain_ints(values: list[Any] | tuple[Any, ...]) -> Rows:
    """A list or tuple of ints, or of NumPy's ints, as an array; `NotGathered` if it holds anything else."""
    array = int_array(values)
    if array is None and all(issubclass(kind, np.signedinteger) for kind in set(map(type, values))):
        array = np.array(values, np.int64)
    if array is None:
        raise NotGathered("not all indices are ints of 64 bits. Convert them with int()")
    return array
