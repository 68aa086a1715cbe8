"""Lists of samples for default_collate and default_convert, by name; some cannot be collated."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from . import kinds as t
from .batches import FLOATS, INTS, array, grid, patterned, sparse, structured

SCALARS = [np.float32, np.float64, np.int8, np.uint8, np.int64, np.bool_, np.complex64, np.uint16]


def three(make: Callable[[int], Any]) -> Callable[[], list[Any]]:
    """Three samples, each made from its number."""
    return lambda: [make(number) for number in range(3)]


def _sent() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    meta = torch.empty(5, device="meta")
    if meta.untyped_storage()._new_shared(5, device=meta.device).device == meta.device:
        made["meta"] = three(lambda k: meta.clone())  # workers of torch 2.6 cannot collate this; these can
    for name in FLOATS[:-3] + INTS + ["complex64", "complex128"]:
        made[f"tensors {name}"] = three(
            lambda k, name=name: [patterned(name, *shape) for shape in ((), (0,), (50, 70))]
        )
    for scalar in SCALARS:
        made[f"scalars {scalar.__name__}"] = three(lambda k, scalar=scalar: scalar(k))
    for code in "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 F D M8[s] S3 U3 O V4 >i4".split():
        made[f"arrays {code}"] = three(lambda k, code=code: array(code, 40, 30))
        made[f"0-d arrays {code}"] = three(lambda k, code=code: array(code, 1).reshape(()))
    return made


def _plain() -> dict[str, Callable[[], Any]]:
    return {
        "int": three(int),
        "float": three(float),
        "bool": three(bool),
        "str": three(str),
        "bytes": three(lambda k: b"%d" % k),
        "complex": three(complex),
        "none": three(lambda k: None),
        "big int": three(lambda k: 2**70 + k),
        "int then float": lambda: [1, 2.5],
        "float then int": lambda: [2.5, 1],
        "str then int": lambda: ["a", 1],
        "enum": three(lambda k: t.Colour.RED),
        "object": three(lambda k: object()),
        "no samples": list,
        "one sample": lambda: [grid(50, 70)],
        "transposed": three(lambda k: grid(50, 70).T + k),
        "channels_last": three(lambda k: grid(1, 3, 8, 8).to(memory_format=torch.channels_last)[0]),
        "slices": three(lambda k: grid(5, 5000)[:, k : 4000 + k]),
        "views of one": lambda: list(grid(3, 4000)),
        "expanded": three(lambda k: torch.tensor(float(k)).expand(4000)),
        "unequal": three(lambda k: grid(k + 1)),
        "unequal rank": lambda: [grid(2, 2), grid(4)],
        "mixed dtypes": lambda: [grid(4000), grid(4000).double()],
        "mixed dtypes narrow": lambda: [grid(4000).double(), grid(4000)],
        "int then float tensors": lambda: [torch.arange(4000), grid(4000)],
        "requires_grad": three(lambda k: grid(4000).requires_grad_()),
        "parameters": three(lambda k: torch.nn.Parameter(grid(4000))),
        "subclass": three(lambda k: t.tagged(grid(4000), str(k))),
        "sparse": three(lambda k: sparse("sparse_coo")),
        "csr": three(lambda k: sparse("sparse_csr")),
        "nested tensor": three(lambda k: torch.nested.nested_tensor([grid(2), grid(3)])),
        "storage": three(lambda k: grid(5).untyped_storage()),
        "one tensor many times": lambda: [grid(4000)] * 3,
    }


def _containers() -> dict[str, Callable[[], Any]]:
    def leaf(number: int) -> torch.Tensor:
        return grid(50, 70) + number

    return {
        "tuple": three(lambda k: (leaf(k), k, str(k))),
        "list": three(lambda k: [leaf(k), k]),
        "dict": three(lambda k: {"x": leaf(k), "y": {"z": [k, leaf(k).numpy()]}}),
        "dict orders": lambda: [{"a": 1, "b": leaf(1)}, {"b": leaf(2), "a": 2}],
        "dict lacks": lambda: [{"a": 1}, {"b": 2}],
        "dict with more": lambda: [{"a": 1}, {"a": 2, "b": 2}],
        "key types": three(lambda k: {1: k, (2, 3): leaf(k), None: "text"}),
        "namedtuple": three(lambda k: t.Point(leaf(k), (k, t.Point(k, leaf(k))))),
        "ordered": three(lambda k: OrderedDict(b=leaf(k), a=k)),
        "defaultdict": three(lambda k: defaultdict(list, b=leaf(k))),
        "user dict": three(lambda k: UserDict(b=leaf(k))),
        "tagged dict": three(lambda k: t.TaggedDict(b=leaf(k), tag=str(k))),
        "encoding": three(lambda k: t.Encoding(b=leaf(k))),
        "frozen mapping": three(lambda k: t.FrozenMapping({"b": leaf(k)})),
        "list subclass": three(lambda k: t.TaggedList([leaf(k)])),
        "tuple subclass": three(lambda k: t.TaggedTuple([leaf(k)])),
        "range": three(lambda k: range(k, k + 3)),
        "deque": three(lambda k: deque([leaf(k)])),
        "set": three(lambda k: {k}),
        "dataclass": three(lambda k: t.Pair(leaf(k), k)),
        "empty containers": three(lambda k: ([], {}, ())),
        "uneven lists": three(lambda k: [1] * k),
        "list of lists": three(lambda k: [[k, k + 1], [float(k), leaf(k)]]),
        "structured": three(lambda k: structured()),
        "record": three(lambda k: structured()[k]),
        "datetime": three(lambda k: np.datetime64(k, "s")),
        "np.str_": three(np.str_),
        "np.str_ in dicts": three(lambda k: {"a": np.str_(k), "b": (np.str_(k), np.bytes_(k)), "c": b"x"}),
        "subclassed array": three(lambda k: array("f4", 60, 60).view(t.TaggedArray)),
        "read-only array": three(lambda k: np.broadcast_to(array("f4", 60), (60, 60))),
        "F order": three(lambda k: np.asfortranarray(array("f4", 60, 50))),
        "backwards": three(lambda k: array("f4", 4000)[::-1]),
        "special": three(lambda k: t.SlottedBatch(leaf(k))),
        "many leaves": three(lambda k: {f"k{n}": torch.full((n,), k) for n in range(150)}),
    }


SAMPLES = _sent() | _plain() | _containers()


class Samples(Dataset):
    """The key is a name; the sample is the list to be collated."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, name: str) -> list[Any]:
        return SAMPLES[name]()


def collate_special(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    """A collate function for a class of one's own."""
    return torch.stack([sample.tensor for sample in batch]) * 2


def collate_backwards(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    """A collate function that takes the place of torch's for tensors."""
    return torch.stack(batch[::-1])


@functools.wraps(collate_tensor_fn)
def collate_wrapped(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    """The same, with the names of the function whose place it takes."""
    return collate_backwards(batch)


def register_special(worker_id: int) -> None:
    """A worker_init_fn that teaches default_collate a class."""
    default_collate_fn_map[t.SlottedBatch] = collate_special


def register_backwards(worker_id: int) -> None:
    """A worker_init_fn that changes how default_collate stacks tensors."""
    default_collate_fn_map[torch.Tensor] = collate_backwards


def register_wrapped(worker_id: int) -> None:
    """A worker_init_fn that wraps the function by which default_collate stacks tensors."""
    default_collate_fn_map[torch.Tensor] = collate_wrapped
