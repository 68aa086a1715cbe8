"""Columns of numbers: int, float, bool, None, and NumPy's scalars."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.columns import NoArrowTypeError, Scope, arrow_buffer, if_valid
from shmloader.store.parts import first_offset


def append_validity(values: list[Any], out: BufferBuilder) -> int:
    """Append Arrow's validity bitmap of a list with None in it."""
    return out.append(np.packbits([value is not None for value in values], bitorder="little"))


class Nones(NamedTuple):
    """Nothing but None."""

    rows: int

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        return "None"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        return pa.nulls(self.rows)


class Numbers(NamedTuple):
    """int (in as few bits as the chunk's numbers need) or float, with or without None.

    Attributes:
        rows: How many.
        code: Type of the numbers: ``b``, ``h``, ``i``, ``q`` or ``d``.
        offset: Of the numbers.
        validity: Of the bitmap, or -1.
    """

    rows: int
    code: str
    offset: int
    validity: int

    @property
    def without_none(self) -> bool:
        """Whether no row is None."""
        return self.validity < 0

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        numbers = scope.items(self.offset, self.rows, self.code)
        return if_valid(scope, self.validity, self.rows, f"{numbers}[i]")

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        kind = pa.from_numpy_dtype(np.dtype(self.code))
        bits = arrow_buffer(memory, self.validity, (self.rows + 7) // 8)
        data = arrow_buffer(memory, self.offset, self.rows * kind.bit_width // 8)
        return pa.Array.from_buffers(kind, self.rows, [bits, data])


def encode_numbers(values: list[Any], floats: bool, out: BufferBuilder, nullable: bool) -> Numbers:
    """Encode int or float, with None if ``nullable``; OverflowError for int beyond 64 bits."""
    numbers = array(
        "d" if floats else "q", [0 if value is None else value for value in values] if nullable else values
    )
    validity = append_validity(values, out) if nullable else -1
    if floats:
        return Numbers(len(values), "d", out.append(numbers), validity)
    wide = np.frombuffer(numbers, np.int64)
    least, most = int(wide.min()), int(wide.max())
    code = next(code for code in "bhiq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
    return Numbers(len(values), code, out.append(wide.astype(code, copy=False)), validity)


class Bools(NamedTuple):
    """bool, one bit each, with or without None; offsets of the bits and of the validity bitmap."""

    rows: int
    offset: int
    validity: int

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        bits = scope.items(self.offset, (self.rows + 7) // 8, "B")
        return if_valid(scope, self.validity, self.rows, f"({bits}[i >> 3] >> (i & 7) & 1 == 1)")

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        nbytes = (self.rows + 7) // 8
        buffers = [arrow_buffer(memory, at, nbytes) for at in (self.validity, self.offset)]
        return pa.Array.from_buffers(pa.bool_(), self.rows, buffers)


def encode_bools(values: list[Any], out: BufferBuilder, nullable: bool) -> Bools:
    """Encode bool, with None if ``nullable``."""
    validity = append_validity(values, out) if nullable else -1
    bits = np.packbits(np.array(values, np.bool_), bitorder="little")  # None is False here
    return Bools(len(values), out.append(bits), validity)


class NumpyScalars(NamedTuple):
    """NumPy scalars of one dtype, such as ``np.int64(3)``; what is read is a scalar of that dtype too."""

    rows: int
    dtype: np.dtype[Any]
    offset: int

    def array(self, memory: SharedBuffer) -> np.ndarray[Any, Any]:
        """All of them."""
        return np.frombuffer(memory.view, self.dtype, self.rows, self.offset - first_offset(memory))

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        return f"{scope.bind(self.array(scope.memory))}[i]"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        try:
            return pa.array(self.array(memory))
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise NoArrowTypeError(f"NumPy's {self.dtype} has no Arrow type") from error


def encode_numpy_scalars(values: list[Any], dtype: np.dtype[Any], out: BufferBuilder) -> NumpyScalars:
    """Encode scalars that all have this dtype."""
    return NumpyScalars(len(values), dtype, out.append(np.array(values, dtype).view(np.uint8)))
