"""The kinds of values that columns hold: each is one class, with both directions side by side.

A kind takes values of some Python types and writes them as an Arrow array; of an array it makes the function
that reads a row. The encoder asks the kind of ``type(value)`` (`kind_of_class`), all that reads the one
of ``array.type`` (`kind_of`). For Python's own types (paths, enums ...) that is the Arrow extension type
itself, which has the parameters; for Arrow's own types one object of the class.

An extension type is written as a name (``shmloader.path``) and a JSON object with a version. So a file with
such a column is an ordinary Arrow file: programs that do not know the name see the storage. Nothing in that
object is code. Classes are given by module and name; `ClassFinder` looks them up without importing anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa

from shmloader.codec.array_kinds import Array, ArrayKind
from shmloader.memory.mapping import address_of
from shmloader.store.columns.buffers import octets_of
from shmloader.store.columns.classes import ClassFinder
from shmloader.store.sealed_buffer import SharedBuffer

VERSION = 1
"""The version of the JSON object; files with a larger one are refused."""

FORM = b"shmloader"
"""Key of the metadata by which a schema tells what its rows are."""

COLUMN = {FORM: json.dumps({"rows": "column", "version": VERSION}).encode()}
"""Metadata of a schema whose one column has the rows."""

Reader = Callable[[int], Any]
"""Reads one row of a column, by its number in the column."""

United = Callable[[list[Any]], list[Any]]
"""Gives arrays of any types as arrays of one type."""

MakeView = Callable[[int, int], Any]
"""Makes the view of a large container whose items are those from one place on, up to another."""

MOST_BUILT = 1 << 15
"""The weight of the heaviest container inside a row that a read builds: about 0.2 ms."""


@dataclass(frozen=True)
class Origin:
    """The source of a column's values, and the way to read them."""

    memory: SharedBuffer | None = None  # where the buffers lie; None for any place
    finder: ClassFinder = field(default_factory=ClassFinder)  # of the classes that columns name
    links: Mapping[int, Reader] = field(default_factory=dict)  # readers of the columns that these lead to
    copy: bool = False  # whether arrays and tensors are private copies, which may be changed
    pickles: bool = True  # whether pickled values may be read
    source: str = ""  # the file; empty for data of this program
    views: Any = None  # makes views of large containers in rows, a `RowViews`; None to build all of them

    def octets(self, buffer: Any) -> tuple[Any, int]:
        """Memory whose slices are bytes, and the place where those of a buffer begin there.

        An mmap's slices are made quicker than those of a memoryview.
        """
        mapping = (
            self.memory.mapping if buffer and self.memory and self.memory.holds(buffer.address) else None
        )
        if mapping is None:
            return _SlicesAsBytes(memoryview(buffer or b"")), 0
        return mapping, buffer.address - address_of(mapping)


class _SlicesAsBytes:
    def __init__(self, memory: memoryview[Any]) -> None:
        self._memory = memory

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._memory[part])


class Block(NamedTuple):
    """All values of a column as one array, null rows included."""

    items: Array  # of bytes where values are bits
    kind: ArrayKind  # of the array that rows are gathered into
    rows: Callable[[Any], list[Any]]  # gives the rows of that array, or tensor, as they are read one by one
    stacks: bool = True  # whether many rows are given as that array, and not as a list
    bit: int | None = None  # the place of the first value in the bytes

    @property
    def has_python_numbers(self) -> bool:
        """Whether rows are numbers of Python, or lists of these: `kind` tells them from no other scalars."""
        return self.rows is np.ndarray.tolist


Weights = int | Array
"""The work of building each row: an array, or one int if all take the same.

A number counts 1, another value 16, a container 128 and its contents.
"""


class UnfitError(Exception):
    """Not all values fit into a column of their type; ``fits`` tells which do."""

    def __init__(self, fits: Callable[[Any], bool] = lambda value: False) -> None:
        super().__init__()
        self.fits = fits


class Kind:
    """One kind of value."""

    takes: ClassVar[tuple[type[Any], ...]] = ()  # the Python types whose values it writes
    is_leaf: ClassVar[bool] = True  # whether values are small and hold no others: no gain to keep each once
    nests: ClassVar[bool] = False  # whether a value may be reached from itself; such a kind is no leaf
    is_number: ClassVar[bool] = False  # whether its values are made as quickly as numbers
    nullable: bool = True  # whether a column can have nulls beside its values
    EXACT: ClassVar[Any] = None  # the only type of Arrow's with its id that it reads; None if it reads all

    def __init_subclass__(
        cls, arrow: Iterable[Any] = (), where: Callable[[type], bool] | None = None
    ) -> None:
        """Make a kind known, by Arrow's types that it reads: of types with parameters any one, see `fits`.

        It may write the values of types ``where`` that holds, if no kind ``takes`` them.
        """
        cls.is_leaf = cls.is_leaf and not cls.nests
        _TAKES.update(dict.fromkeys(vars(cls).get("takes", ()), cls))
        _TAKES_WHERE.extend([(where, cls)] if where else [])
        _BY_ID.update({kind if kind is None else kind.id: cls() for kind in arrow})

    def fits(self, kind: Any) -> bool:
        """Whether it reads a type of Arrow's that has the id of its own."""
        return self.EXACT is None or bool(kind == self.EXACT)

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        """The column of values, at least one, all of one type that it takes; `UnfitError` if it cannot be.

        The `ColumnEncoder` is for values inside of these, in so many containers, ``depth``.
        """
        raise UnfitError

    def check(self, column: Any) -> None:
        """Raise ValueError if a column cannot be read: its type contradicts itself or its storage."""

    def getter(self, column: Any, origin: Origin) -> Reader:
        """The function that reads a row that is not null."""
        read: Reader = self.items(column).__getitem__
        return read

    def items(self, column: Any) -> Any:
        """Values that need no function to be read, to be indexed by row; None if there is no such thing."""
        return None

    def form(self, kind: Any) -> Hashable:
        """The form that types have in common whose arrays `unite` takes."""
        return str(kind)

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        """Arrays of one form as arrays of one type."""
        return parts

    def block(self, column: Any, memory: SharedBuffer | None) -> Block | None:
        """The column as one array, null rows too; None if its values have not all one shape and dtype."""
        return None

    def weights(self, column: Any) -> Weights:
        """The work of building each row."""
        return 1 if self.is_number else 16 if self.is_leaf else 128

    def describe(self, kind: Any) -> str:
        """The type for people."""
        return str(kind)


_TAKES: dict[type, type[Kind]] = {}
_TAKES_WHERE: list[tuple[Callable[[type], bool], type[Kind]]] = []
_BY_ID: dict[int | None, Kind] = {}
_OTHER = None  # the key of the kind of all other types


def kind_of(kind: Any) -> Kind:
    """The kind of the values of an Arrow type."""
    if isinstance(kind, PythonType):
        return kind
    found = _BY_ID.get(kind.id)
    return _BY_ID[_OTHER] if found is None or not found.fits(kind) else found


def kind_of_class(kind: type) -> type[Kind]:
    """The kind of the values that are exactly of a Python type."""
    return _TAKES.get(kind) or next((one for where, one in _TAKES_WHERE if where(kind)), _TAKES[object])


def takes_too(python_type: type, kind: type[Kind]) -> None:
    """Let a kind write the values of another type: they are read as those of its own."""
    _TAKES[python_type] = kind


class PythonType(Kind, pa.ExtensionType):  # type: ignore[misc]
    """Base of the kinds that are types of Python, as extension types of Arrow's."""

    NAME: ClassVar[str]
    OVER: ClassVar[Any]
    parameters: dict[str, Any]  # beside the storage; plain JSON

    def __init_subclass__(cls, name: str = "", over: Any = Kind, **options: Any) -> None:
        """Make a kind known, under a name in files, over storage of some kinds."""
        super().__init_subclass__(**options)
        if name:  # else it is a base of others
            cls.NAME, cls.OVER = f"shmloader.{name}", over
            pa.register_extension_type(cls(pa.null()))

    def __init__(self, storage: Any, **parameters: Any) -> None:
        self.parameters = parameters
        super().__init__(storage, self.NAME)

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps({"version": VERSION, **self.parameters}, sort_keys=True).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Self:
        # Arrow calls this at each look at a type whose first instance is gone. A cache of what was made would
        # end the process: comparing types inside of types drops entries that are in use.
        found = json.loads(serialized)
        version = found.pop("version")
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(f"{cls.NAME} has version {version!r}, and this shmloader knows {VERSION}")
        return cls(storage, **found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PythonType) or type(self) is not type(other):
            return False
        return bool(self.storage_type == other.storage_type) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash((self.NAME, str(self.storage_type)))

    @classmethod
    def around(cls, storage: Any, **parameters: Any) -> Any:
        """An array of this kind, over an array of its storage."""
        return cls(storage.type, **parameters).wrap_array(storage)

    def rewrap(self, storage: Any) -> Any:
        """An array of a type with these parameters, over any storage."""
        return self.around(storage, **self.parameters)

    @property
    def nullable(self) -> bool:  # type: ignore[override]
        return kind_of(self.storage_type).nullable

    def check(self, column: Any) -> None:
        if not isinstance(kind_of(self.storage_type), self.OVER):
            raise ValueError(f"{self.NAME} over {self.storage_type} means nothing")  # noqa: TRY004 - of a file

    def getter(self, column: Any, origin: Origin) -> Reader:
        make, read = self.maker(origin), reader_of(column.storage, origin, nulls=False)
        return lambda i: make(read(i))

    def maker(self, origin: Origin) -> Callable[[Any], Any]:
        """The function that makes a value of what it is kept as: its type, of several the one of ``kind``."""
        types = {one.__name__: one for one in self.takes}
        return types[self.parameters.get("kind", self.takes[0].__name__)]

    def form(self, kind: Any) -> Hashable:
        storage = self.storage_type
        return self.NAME, json.dumps(self.parameters, sort_keys=True), kind_of(storage).form(storage)

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        return [self.rewrap(storage) for storage in united([part.storage for part in parts])]

    def weights(self, column: Any) -> Weights:
        return weights_of(column.storage) if self.nests else super().weights(column)

    def describe(self, kind: Any) -> str:
        said = self.parameters
        parts = [str(said[key]) for key in ("python", "dtype", "shape", "kind") if key in said]
        return " ".join([self.NAME.removeprefix("shmloader."), *parts])


def reader_of(column: Any, origin: Origin, *, nulls: bool = True) -> Reader:
    """The function that reads a row of a column, an Arrow array. Null is None; ``nulls``: if any are read.

    ValueError if the column cannot be read: its type contradicts itself or its storage.
    """
    column = dictionary_outside(column)
    kind = kind_of(column.type)
    kind.check(column)
    read = kind.getter(column, origin)
    storage = storage_of(column)
    if not nulls or not kind.nullable or not storage.null_count:
        return read
    bits, offset = octets_of(storage, 0), storage.offset

    def read_or_none(i: int) -> Any:
        place = i + offset
        return read(i) if bits[place >> 3] >> (place & 7) & 1 else None

    return read_or_none


def items_of(column: Any, *, nulls: bool = True) -> Any:
    """See `Kind.items`; None also where rows are null, if these will be read."""
    kind = _kind_if_plain(column, nulls=nulls)
    return None if kind is None else kind.items(column)


def block_of(column: Any, memory: SharedBuffer | None, *, nulls: bool = True) -> Block | None:
    """See `Kind.block`; None also where rows are null, if that matters."""
    kind = _kind_if_plain(column, nulls=nulls)
    return None if kind is None else kind.block(column, memory)


def _kind_if_plain(column: Any, *, nulls: bool) -> Kind | None:
    """The kind of a column, which was checked; None if it has a dictionary, or nulls that matter."""
    storage, kind = storage_of(column), kind_of(column.type)
    if (nulls and storage.null_count) or pa.types.is_dictionary(storage.type):
        return None
    kind.check(column)
    return kind


def weights_of(column: Any) -> Weights:
    """The work of building each row of a column."""
    column = dictionary_outside(column)
    return kind_of(column.type).weights(column)


def weights_at(weights: Weights, places: Array) -> Weights:
    """The weights of the rows at some places, which a damaged file may have outside of the column."""
    if isinstance(weights, int):
        return weights
    return weights.take(places.astype(np.int64, copy=False), mode="clip") if len(weights) else 0


def storage_of(column: Any) -> Any:
    """The values that a column of a Python type is kept as; any other column itself."""
    return column.storage if isinstance(column.type, pa.ExtensionType) else column


def type_name(kind: Any) -> str:
    """A type for people: of shmloader's own without the storage."""
    return kind_of(kind).describe(kind)


def dictionary_outside(column: Any) -> Any:
    """A column whose dictionary is outermost: Arrow puts a Python type over its dictionary."""
    kind = column.type
    if not (isinstance(kind, PythonType) and pa.types.is_dictionary(kind.storage_type)):
        return column
    words = column.storage.dictionary
    return pa.DictionaryArray.from_arrays(column.storage.indices, kind.rewrap(words))


def dictionary_inside(column: Any) -> Any:
    """The reverse: Arrow writes no dictionaries inside of a Python type that is itself in a dictionary."""
    kind = column.type
    if not (pa.types.is_dictionary(kind) and isinstance(kind.value_type, PythonType)):
        return column
    return kind.value_type.rewrap(pa.DictionaryArray.from_arrays(column.indices, column.dictionary.storage))


def children_of(kind: Any) -> list[Any]:
    """The types inside of a type."""
    if isinstance(kind, PythonType):
        return [kind.storage_type]
    if pa.types.is_dictionary(kind):
        return [kind.value_type]
    return [kind.field(number).type for number in range(kind.num_fields)]


def types_in(kind: Any) -> list[Any]:
    """A type, and all types inside of it."""
    return [kind, *(found for child in children_of(kind) for found in types_in(child))]


def find_types(kind: Any, wanted: type[PythonType], path: str = "") -> list[tuple[str, PythonType]]:
    """The place in a type where a Python type occurs, by the names of fields."""
    if isinstance(kind, wanted):
        return [(path, kind)]
    if pa.types.is_struct(kind) and not path.endswith("]"):
        named = [(f"{path}.{field.name}".lstrip("."), field.type) for field in kind]
    else:
        named = [(path, child) for child in children_of(kind)]
    return [found for name, child in named for found in find_types(child, wanted, name)]
