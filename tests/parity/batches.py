"""Every kind of batch that a dataset may make, by name; each call builds it anew."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import pathlib
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

import shmloader.store.memory  # noqa: F401 - torch's loader must work in programs with stores, too

from . import kinds as t

BIG = 3000  # elements: past any size at which a leaf would be sent in the message itself
FLOATS = (
    "bfloat16 float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "complex32 complex64 complex128"
).split()
FLOATS += [name for name in ["float8_e8m0fnu"] if hasattr(torch, name)]  # since torch 2.7
INTS = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64".split()
NUMPY = (
    "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 g F D G >i4 >f8 >c16 S7 U5 >U5 V3 M8[ns] M8[D] >M8[s] m8[us]"
).split()


def patterned(name: str, *shape: int) -> torch.Tensor:
    """A tensor of the named dtype with many different bit patterns, NaNs included."""
    dtype = getattr(torch, name)
    count = int(np.prod(shape))
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    octets = (torch.arange(count * dtype.itemsize) * 37 % 251).to(torch.uint8)
    return octets.view(dtype).reshape(shape)


def array(code: str, *shape: int) -> np.ndarray:
    """An ndarray of the given dtype code with many different values."""
    count = int(np.prod(shape))
    if code[-1] == "?":
        return (np.arange(count) % 3 == 0).reshape(shape)
    if code.lstrip("<>=|")[0] in "SUV":
        return np.array([b"%d" % (k % 997) for k in range(count)]).astype(code).reshape(shape)
    return (np.arange(count) % 251).astype(code).reshape(shape)


def grid(*shape: int) -> torch.Tensor:
    """A float32 tensor that counts up."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def twice(thing: Any) -> list[Any]:
    """One object in four places."""
    return [thing, {"again": thing}, (thing, [thing])]


def itself() -> list[Any]:
    """A list that holds itself."""
    made: list[Any] = [grid(BIG)]
    made.append(made)
    return made


def plain_itself() -> list[Any]:
    """A list that holds itself, and nothing that is a leaf."""
    made: list[Any] = ["text"]
    made.append(made)
    return made


def structured() -> np.ndarray:
    """An array of records with a nested field and padding."""
    inner = np.dtype([("a", "u1"), ("b", ">f4", (2,))])
    made = np.zeros(BIG, np.dtype([("id", "i8"), ("inner", inner), ("name", "S3")], align=True))
    made["id"], made["inner"]["b"][:, 1], made["name"] = np.arange(BIG), 0.5, b"xyz"
    return made


def readonly(made: np.ndarray) -> np.ndarray:
    """The same array, not writeable."""
    made.flags.writeable = False
    return made


def sparse(layout: str) -> torch.Tensor:
    """A mostly empty matrix in the given layout."""
    made = torch.zeros(40, 60)
    made[::7, ::9] = grid(6, 7)
    return made.to_sparse(layout=getattr(torch, layout), **_blocks(layout))


def _blocks(layout: str) -> dict[str, Any]:
    return {"blocksize": (4, 5)} if layout.startswith("sparse_bs") else {}


def uncoalesced() -> torch.Tensor:
    """A sparse tensor with a repeated index."""
    return torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (3,), check_invariants=True)


def packed() -> Any:
    """torch's PackedSequence of unsorted lengths."""
    rows = [grid(2, 3), grid(5, 3), grid(1, 3)]
    return torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)


def with_grad() -> torch.Tensor:
    """A parameter with a gradient, which torch does not send."""
    made = torch.nn.Parameter(grid(BIG))
    made.grad = torch.ones(BIG)
    return made


def with_attribute() -> torch.Tensor:
    """A plain tensor with an attribute, which torch does not send."""
    made = grid(BIG)
    made.tag = "lost"
    return made


def _tensors() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    for name in FLOATS + INTS:
        made[f"tensor {name}"] = lambda name=name: [
            patterned(name, *shape) for shape in ((), (0,), (3,), (4, 0, 2), (50, 60))
        ]
    return made | {
        "nan and -0": lambda: torch.tensor([float("nan"), -0.0, float("-inf")] * BIG),
        "transposed": lambda: grid(30, 100).T,
        "permuted": lambda: grid(10, 20, 30).permute(2, 0, 1),
        "channels_last": lambda: grid(2, 3, 32, 32).to(memory_format=torch.channels_last),
        "channels_last_3d": lambda: grid(2, 3, 8, 8, 8).to(memory_format=torch.channels_last_3d),
        "strides of size one": lambda: [grid(BIG, 1).T, grid(1, 1, BIG).transpose(0, 2)],
        "grey channels_last": lambda: grid(4, 1, 40, 40).to(memory_format=torch.channels_last),
        "empty strided": lambda: [torch.empty(0, 3).T, torch.empty(2, 0, 3).permute(2, 0, 1)],
        "one of expanded": lambda: torch.ones(1).expand(5)[2],
        "every second": lambda: grid(60, 100)[::2, ::3],
        "slice": lambda: grid(BIG * 3)[BIG : 2 * BIG],
        "expanded": lambda: grid(BIG, 1).expand(BIG, 4),
        "overlapping": lambda: grid(BIG).unfold(0, 5, 2),
        "diagonal": lambda: grid(100, 100).diagonal(),
        "size one": lambda: grid(BIG)[None, :, None],
        "requires_grad": lambda: grid(BIG).requires_grad_(),
        "requires_grad strided": lambda: grid(30, 100).t().requires_grad_(True),
        "parameter": lambda: torch.nn.Parameter(grid(BIG)),
        "frozen parameter": lambda: torch.nn.Parameter(grid(BIG), requires_grad=False),
        "parameter with grad": with_grad,
        "in shared memory": lambda: grid(BIG).share_memory_(),
        "buffer": lambda: torch.nn.Buffer(grid(BIG)),
        "module": lambda: torch.nn.BatchNorm1d(900),
        "result of max": lambda: torch.max(grid(50, 60), 0),
        "state_dict": lambda: torch.nn.BatchNorm1d(900).state_dict(),
        "subclass": lambda: t.tagged(grid(BIG), "kept"),
        "attribute": with_attribute,
        "imag": lambda: patterned("complex64", BIG).imag,
        "untyped storage": lambda: grid(BIG).untyped_storage(),
        "typed storage": lambda: grid(BIG)._typed_storage(),
        "coo": lambda: sparse("sparse_coo"),
        "coo uncoalesced": uncoalesced,
        "coo grad": lambda: sparse("sparse_coo").requires_grad_(),
        "csr": lambda: sparse("sparse_csr"),
        "csc": lambda: sparse("sparse_csc"),
        "bsr": lambda: sparse("sparse_bsr"),
        "bsc": lambda: sparse("sparse_bsc"),
        "nested": lambda: torch.nested.nested_tensor([grid(3, 2), grid(5, 2)]),
        "meta": lambda: torch.empty(5, 6, device="meta"),
        "packed": packed,
        "size and dtypes": lambda: (grid(2, 3).shape, torch.float8_e5m2, torch.device("cpu")),
        "generator state": lambda: torch.Generator().manual_seed(3).get_state(),
    }


def _arrays() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    for code in NUMPY:
        made[f"array {code}"] = lambda code=code: [
            array(code, *shape) for shape in ((), (0,), (3,), (4, 0, 2), (50, 60))
        ]
    if hasattr(np.dtypes, "StringDType"):  # NumPy 2
        made["StringDType"] = lambda: np.array(["é", "long" * 40], dtype=np.dtypes.StringDType())
    scalars = (np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.float16("nan"))
    times = (np.datetime64("2020-01-02T03:04:05"), np.timedelta64(5, "D"), np.str_("é"))
    return made | {
        "F order": lambda: np.asfortranarray(array("f4", 30, 100)),
        "array transposed": lambda: array("f8", 10, 20, 30).transpose(2, 0, 1),
        "array every second": lambda: array("i4", 60, 100)[::2, ::3],
        "array backwards": lambda: array("i4", BIG)[::-1],
        "array broadcast": lambda: np.broadcast_to(array("f4", BIG), (3, BIG)),
        "read-only": lambda: readonly(array("f4", BIG)),
        "structured": structured,
        "record": lambda: structured()[3],
        "recarray": lambda: structured().view(np.recarray),
        "subarray": lambda: np.zeros(BIG, dtype="3i4"),
        "NaT": lambda: np.array(["NaT", "2020-01-01"] * BIG, "M8[s]"),
        "objects": lambda: np.array([grid(BIG), None, "text", [1], {2: 3.0}], dtype=object),
        "one object": lambda: np.array({"a": 1}, dtype=object),
        "objects F": lambda: np.asfortranarray(np.array([[1, "a"], [None, 2.5]], dtype=object)),
        "record with object": lambda: np.array([(1, "a")], dtype=[("n", "i4"), ("o", "O")]),
        "masked": lambda: np.ma.masked_greater(array("f4", BIG), 100),
        "read-only subclass": lambda: readonly(array("f4", BIG).view(t.TaggedArray)),
        "strided subclass": lambda: array("f4", 60, 50)[::2, ::3].view(t.TaggedArray),
        "arrow table": lambda: pa.table({"a": range(BIG), "b": ["text"] * BIG}),
        "arrow array": lambda: pa.array([1, None, 3] * BIG),
        "matrix-like subclass": lambda: array("f4", 60, 60).view(t.TaggedArray),
        "dtype metadata": lambda: np.zeros(BIG, np.dtype("f4", metadata={"unit": "m"})),
        "scalars": lambda: [*scalars, *times, np.bytes_(b"a"), np.longdouble(2.5)],
        "void scalar": lambda: np.void(b"abc"),
        "dtype itself": lambda: np.dtype([("a", ">i4")]),
        "numpy generator": lambda: np.random.default_rng(3).bit_generator.state,
    }


def _containers() -> dict[str, Callable[[], Any]]:
    def leaf() -> torch.Tensor:
        return grid(BIG)

    made: dict[str, Callable[[], Any]] = {
        "numbers": lambda: [0, -1, 2**200, 1.5, -0.0, float("nan"), 1j, True, None, Ellipsis],
        "strings": lambda: ["", "é\0\ud800", "x" * 100_000, b"", b"\0" * 100_000, bytearray(b"ab")],
        "none": lambda: None,
        "empty": lambda: [[], (), {}, set(), frozenset(), "", b""],
        "bare string": lambda: "text",
        "bare number": lambda: 7,
        "nested": lambda: {"a": [leaf(), (leaf().numpy(), {"b": {3: leaf(), (4, 5): None}})]},
        "key types": lambda: {1: leaf(), "1": 1, (1, 2): 2, None: 3, 2.5: 4, t.Colour.RED: 5},
        "insertion order": lambda: dict.fromkeys("zyxabc", 1),
        "sets": lambda: [{1, 2, "a"}, frozenset({3, (4, 5)})],
        "namedtuple": lambda: t.Point(leaf(), t.Point([leaf()], None)),
        "ordered": lambda: OrderedDict(b=leaf(), a=leaf()),
        "ordered subclass": lambda: t.TaggedOrderedDict(b=leaf(), a=1),
        "defaultdict": lambda: defaultdict(list, a=leaf()),
        "counter": lambda: Counter("hello"),
        "tagged dict": lambda: t.TaggedDict(a=leaf(), tag="kept"),
        "user dict": lambda: t.Encoding(a=leaf(), b=[1]),
        "custom mapping": lambda: t.FrozenMapping({"a": leaf(), 3: "b"}),
        "list subclass": lambda: t.TaggedList([leaf(), 1]),
        "tuple subclass": lambda: t.TaggedTuple([leaf(), 1]),
        "deque": lambda: deque([leaf(), 2], maxlen=5),
        "dataclass": lambda: t.Pair(leaf(), [leaf()], [1]),
        "frozen dataclass": lambda: t.FrozenPair(leaf(), leaf().numpy()),
        "slotted dataclass": lambda: t.SlottedPair(leaf(), None),
        "batch class": lambda: t.PlainBatch([leaf(), leaf() + 1]),
        "setstate": lambda: t.StatefulBatch(leaf()),
        "reduce": lambda: t.ReducedBatch(leaf().numpy(), leaf()),
        "refers to itself": lambda: t.SelfReferring(leaf()),
        "newargs": lambda: t.NewArgs(leaf()),
        "slots": lambda: t.SlottedBatch(leaf()),
        "same tensor": lambda: twice(leaf()),
        "same array": lambda: twice(leaf().numpy()),
        "same list": lambda: twice([leaf()]),
        "same dict": lambda: twice({"a": leaf()}),
        "same plain list": lambda: twice([1, "a"]),
        "same empty list": lambda: twice([]),
        "same plain dict": lambda: twice({"a": [None]}),
        "same strings": lambda: twice(["a", "b"]),
        "same parameter": lambda: twice(torch.nn.Parameter(leaf())),
        "same object array": lambda: twice(np.array([None, leaf()], dtype=object)),
        "itself": itself,
        "plain itself": plain_itself,
        "many leaves": lambda: {f"k{k}": torch.tensor([k] * (k % 50)) for k in range(400)},
        "deep": lambda: _deep(100),
        "exceptions": lambda: [ValueError("a", 1), KeyError("k"), OSError(2, "no", "file")],
        "range and slice": lambda: [range(0, 9, 2), slice(1, None, 2), memoryview],
        "enum": lambda: [t.Colour.RED, t.Colour.BLUE, t.Colour],
        "dates": lambda: [dt.date(2020, 1, 2), dt.timedelta(1, 2, 3)],
        "exact numbers": lambda: [decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
        "paths": lambda: [pathlib.PurePosixPath("a/b"), uuid.UUID(int=5)],
        "functions": lambda: [grid, len, t.Point, np.sum],
    }
    return made


def _deep(levels: int) -> Any:
    made: Any = grid(BIG)
    for level in range(levels):
        made = [made] if level % 2 else {"down": made}
    return made


CASES = _tensors() | _arrays() | _containers()


class Cases(Dataset):
    """The key is a case's name; the batch is the case."""

    def __len__(self) -> int:
        return len(CASES)

    def __getitem__(self, name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's notes that some kinds of tensor are new
            return CASES[name]()
