"""Kinds of single values: None, numbers, texts, bytes, what is kept as these; pickles of everything else."""

from __future__ import annotations

import decimal
import enum
import functools
import io
import pathlib
import pickle
import uuid
from array import array
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types as arrow

from shmloader.codec.array_kinds import Array, ArrayKind, array_of_tensor, is_plain, kind_of_tensor
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.store.columns import buffers
from shmloader.store.columns.kind import Block, Kind, Origin, PythonType, Reader, UnfitError, United
from shmloader.store.sealed_buffer import SharedBuffer

_SAMPLED_TEXTS = 256
_MOST_WORDS = 4096  # different texts of a column that are kept once each
_MOST_NAMED = 8
_CODES = {pa.from_numpy_dtype(code): code for code in "bhiqBHIQfd"}
KIND_OF_SCALAR: dict[type, ArrayKind] = {
    kind: ArrayKind(np.dtype(code), 0)
    for kind, code in ((int, np.int64), (float, np.float64), (bool, np.bool_))
}
"""The arrays that numbers of Python are gathered into."""


class Nulls(Kind, arrow=[pa.null()]):
    """None alone; beside other values it is Arrow's null."""

    takes = (NoneType,)
    is_number = True
    nullable = False

    @classmethod
    def write(cls, values: list[None], encoder: Any, depth: int) -> Any:
        return pa.nulls(len(values))

    def getter(self, column: Any, origin: Origin) -> Reader:
        return lambda i: None


class _Castable(Kind):
    """Values whose types Arrow casts to the widest."""

    WIDE: Any

    def form(self, kind: Any) -> Hashable:
        return type(self).__name__

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        kinds = {part.type for part in parts}
        return [part.cast(self.WIDE if len(kinds) > 1 else part.type) for part in parts]


class _Numbers(_Castable):
    """Numbers, whose memory a memoryview reads."""

    is_number = True

    def items(self, column: Any) -> memoryview[Any]:
        return buffers.numbers_of(column, 1, _CODES[column.type], len(column))

    def block(self, column: Any, memory: SharedBuffer | None) -> Block | None:
        items: Array = np.asarray(self.items(column))
        if items.dtype == np.uint64:
            if items.size and items.max() >> np.uint64(63):  # NumPy gives Python's int no dtype for these
                return None
            items = items.view(np.int64)
        return Block(items, KIND_OF_SCALAR[self.takes[0]], np.ndarray.tolist)


class Ints(_Numbers, arrow=map(pa.from_numpy_dtype, "bhiqBHIQ")):
    """Integers, in as few bits as all need."""

    takes = (int,)

    @classmethod
    def write(cls, values: list[int], encoder: Any, depth: int) -> Any:
        try:
            wide = np.frombuffer(array("q", values), np.int64)
        except OverflowError:
            raise UnfitError(lambda value: -(1 << 63) <= value < 1 << 63) from None
        least, most = int(wide.min()), int(wide.max())
        code = next(code for code in "bBhHiIq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
        return buffers.numbers_to_arrow(wide.astype(code))

    def form(self, kind: Any) -> Hashable:
        # No type has all of uint64 and a sign.
        return str(kind) if kind == pa.uint64() else "int"

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        kinds = {part.type for part in parts}
        bits = max(kind.bit_width << arrow.is_unsigned_integer(kind) for kind in kinds)
        kind = kinds.pop() if len(kinds) == 1 else pa.from_numpy_dtype(f"i{bits // 8}")
        return [part.cast(kind) for part in parts]


class Floats(_Numbers, arrow=[pa.float32(), pa.float64()]):
    """Floats."""

    takes = (float,)
    WIDE = pa.float64()

    @classmethod
    def write(cls, values: list[float], encoder: Any, depth: int) -> Any:
        return buffers.numbers_to_arrow(np.frombuffer(array("d", values), np.float64))


class Bools(Kind, arrow=[pa.bool_()]):
    """Truth values, a bit each."""

    is_number = True
    takes = (bool,)

    @classmethod
    def write(cls, values: list[bool], encoder: Any, depth: int) -> Any:
        return buffers.numbers_to_arrow(np.frombuffer(bytes(values), np.bool_))

    def getter(self, column: Any, origin: Origin) -> Reader:
        bits, offset = buffers.octets_of(column, 1), column.offset

        def read(i: int) -> bool:
            i += offset
            return bool(bits[i >> 3] >> (i & 7) & 1)

        return read

    def block(self, column: Any, memory: SharedBuffer | None) -> Block:
        bits = buffers.bits_of(column, 1)
        return Block(bits, KIND_OF_SCALAR[bool], np.ndarray.tolist, bit=column.offset & 7)


class Texts(_Castable, arrow=[pa.string(), pa.large_string()]):
    """Texts in UTF-8; each once, in a dictionary, if there are few."""

    takes = (str,)
    WIDE = pa.large_string()

    @classmethod
    def write(cls, values: list[str], encoder: Any, depth: int) -> Any:
        return _each_once(unicode_to_arrow(values))

    def getter(self, column: Any, origin: Origin) -> Reader:
        memory, begin = origin.octets(column.buffers()[2])
        ends = buffers.ends_of(column)
        return lambda i: memory[begin + ends[i] : begin + ends[i + 1]].decode()


class Octets(_Castable, arrow=[pa.binary(), pa.large_binary()]):
    """Bytes of any length; each once, in a dictionary, if there are few."""

    takes = (bytes,)
    WIDE = pa.large_binary()

    @classmethod
    def write(cls, values: list[bytes], encoder: Any, depth: int) -> Any:
        return _each_once(buffers.octets_to_arrow(values))

    def getter(self, column: Any, origin: Origin) -> Reader:
        memory, begin = origin.octets(column.buffers()[2])
        ends = buffers.ends_of(column)
        return lambda i: memory[begin + ends[i] : begin + ends[i + 1]]


class FixedOctets(Kind, arrow=[pa.binary(1)]):
    """Bytes of one length, of other programs."""

    def getter(self, column: Any, origin: Origin) -> Reader:
        octets, width = buffers.octets_of(column, 1), column.type.byte_width
        octets = octets[column.offset * width : (column.offset + len(column)) * width]
        return lambda i: octets[i * width : i * width + width].tobytes()


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates, which Arrow refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def unicode_to_arrow(texts: list[str]) -> Any:
    """The column of the texts of some values; `UnfitError` where one has surrogates."""
    try:
        return buffers.texts_to_arrow(texts)
    except UnicodeEncodeError:
        raise UnfitError(lambda value: is_unicode(str(value))) from None


def _each_once(column: Any) -> Any:
    """Texts as a dictionary, where there are few different ones."""
    step = max(1, len(column) // _SAMPLED_TEXTS)
    sample = column.take(buffers.numbers_to_arrow(np.arange(0, len(column), step)))
    if len(column) < 16 or len(sample.unique()) * 4 > len(sample):
        return column
    found = column.dictionary_encode()
    if len(found.dictionary) > min(_MOST_WORDS, len(column) // 4):
        return column
    places = found.indices.cast(pa.int8() if len(found.dictionary) < 128 else pa.int16())
    return pa.DictionaryArray.from_arrays(places, found.dictionary)


class Decimals(PythonType, name="decimal", over=Texts):
    """Decimals, as strings: these keep trailing zeros and NaN."""

    takes = (decimal.Decimal,)

    @classmethod
    def write(cls, values: list[decimal.Decimal], encoder: Any, depth: int) -> Any:
        return cls.around(buffers.texts_to_arrow(list(map(str, values))))


class Paths(PythonType, name="path", over=Texts):
    """Paths, as strings; ``kind`` is the class in ``pathlib``."""

    takes = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)

    @classmethod
    def write(cls, values: list[pathlib.PurePath], encoder: Any, depth: int) -> Any:
        return cls.around(unicode_to_arrow(list(map(str, values))), kind=type(values[0]).__name__)


class Uuids(PythonType, name="uuid", over=FixedOctets):
    """UUIDs, as 16 bytes."""

    takes = (uuid.UUID,)

    @classmethod
    def write(cls, values: list[uuid.UUID], encoder: Any, depth: int) -> Any:
        kinds = {value.is_safe for value in values}
        if len(kinds) > 1:
            raise UnfitError(lambda value: value.is_safe is uuid.SafeUUID.unknown)
        said = {} if kinds == {uuid.SafeUUID.unknown} else {"safe": kinds.pop().value}
        return cls.around(fixed_to_arrow([value.bytes for value in values], 16), **said)

    def maker(self, origin: Origin) -> Callable[[Any], Any]:
        safe = uuid.SafeUUID(self.parameters.get("safe"))
        return lambda octets: uuid.UUID(bytes=octets, is_safe=safe)


class Enums(PythonType, name="enum", over=Ints, where=lambda kind: issubclass(kind, enum.Enum)):
    """Members of the enum ``python``: positions in ``members``."""

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        kind: Any = type(values[0])
        members = list(kind.__members__)
        places = {id(kind.__members__[name]): place for place, name in reversed(list(enumerate(members)))}
        numbers = np.array([places.get(id(value), -1) for value in values], np.int32)
        if (numbers < 0).any():  # combined flags
            raise UnfitError
        numbers = numbers.astype(np.int8 if len(members) < 128 else np.int32)
        return cls.around(buffers.numbers_to_arrow(numbers), python=encoder.name_of(kind), members=members)

    def is_for(self, found: Any) -> bool:
        """Whether a class is still the one of the name."""
        return issubclass(found, enum.Enum) and set(self.parameters["members"]) <= found.__members__.keys()

    def maker(self, origin: Origin) -> Callable[[Any], Any]:
        found = origin.finder.find(self)
        return [found[name] for name in self.parameters["members"]].__getitem__


def fixed_to_arrow(values: list[bytes], nbytes: int) -> Any:
    """A column of bytes of one length."""
    return buffers.numbers_to_arrow(np.array(values, f"V{nbytes}"), pa.binary(nbytes))


class Pickles(PythonType, name="pickle", over=Octets):
    """Other objects, each pickled by itself; ``types`` names their classes."""

    takes = (object,)  # and all that no other kind takes
    is_leaf = False

    @classmethod
    def write(cls, values: list[Any], encoder: Any = None, depth: int = 0) -> Any:
        """A column of any objects but None, one pickle for each; raises what pickling raises."""
        octets = buffers.octets_to_arrow(list(map(pickled_value, values)))
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in set(map(type, values))}
        return cls.around(octets, types=sorted(kinds)[:_MOST_NAMED])

    def maker(self, origin: Origin) -> Callable[[Any], Any]:
        if not origin.pickles:
            raise pickle.UnpicklingError("pickled values are not read from this file")
        return pickle.loads

    def form(self, kind: Any) -> Hashable:
        return self.NAME

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        names = sorted({name for part in parts for name in part.type.parameters["types"]})
        return [self.around(storage, types=names) for storage in united([part.storage for part in parts])]


class _ObjectPickler(pickle.Pickler):
    """Pickles tensors as their bytes: torch's own way is slow, and drags whole storages along.

    NumPy's own way with a part of an array drops the byte order; for its way with scalars see
    `_reduced_scalar`.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return _reduced_scalar(value)
        if type(value) is np.ndarray and not value.dtype.isnative and not value.flags.forc:
            return value.copy().__reduce_ex__(5)
        if type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        if value.layout is torch.sparse_coo and value.is_coalesced():
            # torch's own way keeps every such tensor that pickle.loads makes alive for good: it expects
            # torch.load to check them.
            return _make_sparse, (value.indices(), value.values(), tuple(value.shape))
        kind = kind_of_tensor(value)
        if kind is None:
            if not (value.is_quantized or value.dtype in CODE_OF_TORCH_DTYPE or _is_read_back(value.dtype)):
                raise pickle.PicklingError(
                    f"torch cannot read a tensor of {value.dtype} from a pickle. Share its bytes, "
                    "tensor.view(torch.uint8)"
                )
            return NotImplemented
        return _make_tensor, (array_of_tensor(value, kind.dtype), CODE_OF_TORCH_DTYPE[value.dtype])


def _reduced_scalar(value: Any) -> Any:
    """A scalar by its own type. NumPy's way gives that of the dtype, and drops zeros at the end of texts."""
    kind, dtype = type(value), value.dtype
    is_reduced_by_numpy = (kind.__reduce__, kind.__reduce_ex__) == _REDUCED_BY_NUMPY
    is_kept = kind is dtype.type and dtype.char not in "qQSU"
    if is_kept or not is_plain(dtype) or not is_reduced_by_numpy:
        return NotImplemented
    # By the built-in types' own methods: the subclass may have others of these names.
    if dtype.kind in "SU":
        plain: Any = (bytes if dtype.kind == "S" else str).__getitem__(value, slice(None))
    else:
        plain = np.asarray(value).item() if dtype.kind in "iu" else np.asarray(value)[()]
    if kind is dtype.type:
        return kind, (plain,)
    return _make_scalar, (dtype.type, kind, plain, getattr(value, "__dict__", {}))


_REDUCED_BY_NUMPY: Any = np.generic.__reduce__, np.generic.__reduce_ex__


def _make_scalar(base: Any, kind: type, plain: Any, attributes: dict[str, Any]) -> Any:
    """A scalar of a subclass of one of NumPy's types, which has a ``__setstate__`` that drops attributes."""
    scalar = base.__new__(kind, plain)
    if attributes:
        vars(scalar).update(attributes)
    return scalar


@functools.cache
def _is_read_back(dtype: torch.dtype) -> bool:
    """Whether torch can pickle tensors of a dtype that has no kind, and can read what it has pickled."""
    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype)))
    except Exception:  # noqa: BLE001 - they differ from dtype to dtype
        return False
    return True


def _make_tensor(array: Any, code: int) -> torch.Tensor:
    return wrap_tensor(array, DTYPES[code].torch_dtype)


def _make_sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def pickled_value(value: Any) -> bytes:
    """The pickle of one value."""
    file = io.BytesIO()
    try:
        _ObjectPickler(file, 5).dump(value)
    except RecursionError as error:
        error.add_note(
            f"shmloader: a {type(value).__qualname__} is nested too deeply for pickle, such as rows of which "
            "each holds the one before. Let rows refer to others by their row numbers"
        )
        raise
    except Exception as error:
        error.add_note(
            f"shmloader: this was raised while pickling a {type(value).__qualname__}, as values "
            "are kept that no type of column holds. Its class must be found by name in a module, and its "
            "contents must be picklable: leave out or convert what is not."
        )
        raise
    return file.getvalue()
