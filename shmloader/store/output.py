"""The ``out`` argument of ``take``: a tensor or ndarray of the caller's, such as one in a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.store.arrays import Array, ArrayKind, array_of_tensor, kind_of_tensor


def output_array(out: Any, shape: tuple[int, ...], kind: ArrayKind) -> Array:
    """An array over the memory of ``out``, in the dtype in which items are stored.

    Args:
        out: A tensor or an ndarray.
        shape: What it has to be.
        kind: What the rows are; its ``ndim`` and order are not looked at.

    Raises:
        TypeError: If rows cannot be gathered into it.
    """
    if type(out) is torch.Tensor and out.dtype is kind.torch_dtype and out.shape == shape:
        if out.layout is torch.strided and out.is_contiguous() and out.device.type == "cpu":
            return array_of_tensor(out.detach(), kind.dtype)
    elif isinstance(out, torch.Tensor):
        found = kind_of_tensor(out)
        fits = found is not None and out.is_contiguous() and found.dtype == kind.dtype
        fits = fits and kind.torch_dtype in (None, out.dtype)
        if fits and tuple(out.shape) == shape:
            return array_of_tensor(out.detach(), kind.dtype)
    elif isinstance(out, np.ndarray):
        named_by_numpy = kind.torch_dtype is None or DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native
        if named_by_numpy and out.dtype == kind.dtype and out.shape == shape and out.flags.writeable:
            return out
    dtype = kind.torch_dtype or kind.dtype
    given = f"{type(out).__name__} of shape {tuple(getattr(out, 'shape', ()))}, {getattr(out, 'dtype', None)}"
    raise TypeError(
        f"rows are gathered into a contiguous tensor or ndarray of shape {shape}, {dtype}, not {given}"
    )


def outputs_by_name(out: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """The outputs for a record's columns; None for those that are not given."""
    names = tuple(names)
    if out is None:
        return dict.fromkeys(names)
    if not isinstance(out, Mapping) or set(out) - set(names):
        raise TypeError(f"records are gathered into a dict of outputs, with some of the keys {names}")
    return {name: out.get(name) for name in names}
