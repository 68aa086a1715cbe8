"""Ways to hold a batch through an object derived from it, each with a way to read the object again."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .compare import storage_bytes

Way = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def leaves(batch: Any) -> Any:
    """A collate function that changes nothing."""
    return batch


class Leaves(Dataset):
    """Each sample is a dict of leaves of odd sizes and many dtypes, or the one that is named."""

    def __init__(self, length: int, only: str | None = None) -> None:
        self.length, self.only = length, only

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        if self.only is not None:
            return {"leaf": getattr(self, "_" + self.only.replace(" ", "_"))(index)}
        return {
            "float32": self._float32(index),
            "int8": torch.arange(4099).to(torch.int8) + index,
            "bool": torch.arange(5001) % (index + 2) == 0,
            "bfloat16": self._bfloat16(index),
            "complex64": torch.arange(1999.0).to(torch.complex64) * (1 + index),
            "float64": torch.arange(777, dtype=torch.float64) + index,
        }

    def _float32(self, index: int) -> torch.Tensor:
        return torch.arange(6001, dtype=torch.float32) + 10 * index

    def _bfloat16(self, index: int) -> torch.Tensor:
        return (torch.arange(5003) + 3 * index).to(torch.bfloat16)

    def _permuted(self, index: int) -> torch.Tensor:
        return (torch.arange(6000, dtype=torch.float32) + 10 * index).view(60, 100).t()

    def _array(self, index: int) -> np.ndarray:
        return np.arange(6001, dtype=np.int32) + 10 * index

    def _F_array(self, index: int) -> np.ndarray:
        return np.asfortranarray((np.arange(6000.0) + 10 * index).reshape(60, 100))


def _capsule(tensor: torch.Tensor) -> Any:
    return torch.utils.dlpack.to_dlpack(tensor)


def _values(tensor: Any) -> Any:
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def _view_of_bytes(thing: Any) -> memoryview:
    return memoryview(thing.numpy() if isinstance(thing, torch.Tensor) else thing)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.t().view(torch.uint8)


def _set(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor)


class _Keeper(torch.nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", tensor.detach())


def _cycle(thing: Any) -> list[Any]:
    held = [thing[1:]]
    held.append(held)
    return held


def _subclassed(tensor: torch.Tensor) -> torch.Tensor:
    class Sub(torch.Tensor):
        pass

    return tensor.as_subclass(Sub)


def _exported(array: np.ndarray) -> Any:
    return (ctypes.c_char * array.nbytes).from_buffer(array.reshape(-1, order="A").view(np.uint8))


TENSOR_WAYS: dict[str, Way] = {
    "itself": (lambda x: x, _values),
    "detach": (lambda x: x.detach(), _values),
    "data": (lambda x: x.data, _values),
    "view_as": (lambda x: x.view_as(x), _values),
    "slice": (lambda x: x[5:50], _values),
    "one item": (lambda x: x[7], _values),
    "flattened": (lambda x: x.t().flatten() if x.dim() > 1 else x.flatten(), _values),
    "other dtype": (_octets, _values),
    "split": (lambda x: x.split(9)[2], _values),
    "unbind": (lambda x: x.unbind()[3], _values),
    "iterated": (lambda x: next(iter(x)), _values),
    "parameter": (torch.nn.Parameter, _values),
    "parameter's data": (lambda x: torch.nn.Parameter(x).data, _values),
    "requires_grad": (lambda x: x.requires_grad_().view(-1) if x.dim() < 2 else x, _values),
    "module buffer": (lambda x: _Keeper(x).kept, _values),
    "untyped storage": (lambda x: x.untyped_storage(), storage_bytes),
    "storage's tensor": (
        lambda x: torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()),
        _values,
    ),
    "set_": (_set, _values),
    "subclass": (_subclassed, lambda held: _values(held.as_subclass(torch.Tensor))),
    "alias": (torch.ops.aten.alias, _values),
    "dlpack capsule": (_capsule, lambda held: _values(torch.utils.dlpack.from_dlpack(held))),
    "from_dlpack": (lambda x: torch.from_dlpack(x.detach()), _values),
    "numpy": (lambda x: _octets(x).numpy(), np.copy),
    "numpy slice": (lambda x: _octets(x).numpy()[3:40], np.copy),
    "numpy from_dlpack": (lambda x: np.from_dlpack(_octets(x)), np.copy),
    "tensor of numpy": (lambda x: torch.from_numpy(_octets(x).numpy()), _values),
    "memoryview": (lambda x: _view_of_bytes(_octets(x)), lambda held: held.tobytes()),
    "bytes of view": (lambda x: _view_of_bytes(_octets(x)).cast("B")[8:80], bytes),
    "frombuffer": (lambda x: np.frombuffer(_octets(x).numpy(), np.uint8), np.copy),
    "torch.frombuffer": (
        lambda x: torch.frombuffer(memoryview(_octets(x).numpy()), dtype=torch.uint8),
        _values,
    ),
    "cycle": (_cycle, lambda held: _values(held[0])),
    "shared": (lambda x: x.share_memory_(), _values),
    "pickled": (pickle.dumps, lambda held: _values(pickle.loads(held))),
}

ARRAY_WAYS: dict[str, Way] = {
    "itself": (lambda x: x, np.copy),
    "slice": (lambda x: x[5:50], np.copy),
    "view": (lambda x: x.view(), np.copy),
    "bytes view": (lambda x: x.T.view(np.uint8), np.copy),
    "reshaped": (lambda x: x.reshape(-1, order="A"), np.copy),
    "transposed": (lambda x: x.T, np.copy),
    "memoryview": (memoryview, lambda held: held.tobytes()),
    "part of memoryview": (lambda x: memoryview(x.T).cast("B")[8:80], bytes),
    "data": (lambda x: x.data, lambda held: held.tobytes()),
    "frombuffer": (lambda x: np.frombuffer(x.T, np.uint8), np.copy),
    "ctypes array": (_exported, bytes),
    "tensor": (torch.from_numpy, _values),
    "tensor's slice": (lambda x: torch.from_numpy(x)[3:9], _values),
    "as_tensor's numpy": (lambda x: torch.as_tensor(x).numpy()[1:], np.copy),
    "from_dlpack": (np.from_dlpack, np.copy),
    "strided": (lambda x: np.lib.stride_tricks.as_strided(x, writeable=False), np.copy),
    "broadcast": (lambda x: np.broadcast_to(x, (2, *x.shape)), np.copy),
    "flat": (lambda x: x.flat, np.array),
    "masked": (np.ma.array, lambda held: held.data.copy()),
    "subclass": (lambda x: x.view(np.recarray), np.array),
    "cycle": (_cycle, lambda held: np.copy(held[0])),
    "pickle buffer": (pickle.PickleBuffer, lambda held: held.raw().tobytes()),
}
