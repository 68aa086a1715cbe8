"""Arrow extension types for what is Python's: each says what the values of its storage stand for.

A type is written as a name (``shmloader.path``) and a JSON object with a version. So a file with such a
column is an ordinary Arrow file: programs that do not know the name see the storage. Nothing in that object
is code. Classes are given by module and name; `ClassFinder` looks them up without importing anything.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

import pyarrow as pa

VERSION = 1
"""Of the JSON object; files with a larger one are refused."""


class PythonType(pa.ExtensionType):  # type: ignore[misc]
    """Base of the types below.

    Attributes:
        parameters: What the type says beside its storage; plain JSON.
    """

    NAME: ClassVar[str]

    def __init__(self, storage: Any, **parameters: Any) -> None:
        self.parameters = parameters
        super().__init__(storage, self.NAME)

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps({"version": VERSION, **self.parameters}, sort_keys=True).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Self:
        found = json.loads(serialized)
        version = found.pop("version")
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(f"{cls.NAME} has version {version!r}, and this shmloader knows {VERSION}")
        return cls(storage, **found)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        assert isinstance(other, PythonType)
        return bool(self.storage_type == other.storage_type) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash((self.NAME, str(self.storage_type)))

    def __reduce__(self) -> Any:
        return _make_type, (type(self), self.storage_type, self.parameters)

    def wrap(self, storage: Any) -> Any:
        """An array of this type, over an array of its storage."""
        return pa.ExtensionArray.from_storage(self, storage)

    def over(self, storage: Any) -> Any:
        """The same type over another storage."""
        return type(self)(storage, **self.parameters)


def _make_type(kind: type[PythonType], storage: Any, parameters: dict[str, Any]) -> PythonType:
    return kind(storage, **parameters)


class PathType(PythonType):
    """Paths, as strings; ``kind`` is the class in ``pathlib``."""

    NAME = "shmloader.path"


class TupleType(PythonType):
    """tuples: a struct where all have one length, else a list."""

    NAME = "shmloader.tuple"


class NamedTupleType(PythonType):
    """namedtuples of the class ``python``, as a struct of their fields."""

    NAME = "shmloader.namedtuple"


class DataclassType(PythonType):
    """Instances of the dataclass ``python``: their attributes, as dicts are kept."""

    NAME = "shmloader.dataclass"


class EnumType(PythonType):
    """Members of the enum ``python``: positions in ``members``."""

    NAME = "shmloader.enum"


class SetType(PythonType):
    """sets or frozensets (``kind``), as lists."""

    NAME = "shmloader.set"


class DictType(PythonType):
    """dicts of any keys, as lists of the structs ``key`` and ``value``."""

    NAME = "shmloader.dict"


class KeysType(PythonType):
    """The keys that each of some dicts has, beside their fields: bit ``k`` stands for ``names[k]``."""

    NAME = "shmloader.keys"


class ScalarType(PythonType):
    """NumPy scalars of ``dtype``: numbers, or items of bytes."""

    NAME = "shmloader.scalar"


class ArrayType(PythonType):
    """ndarrays of ``dtype``, or tensors with ``tensor``, the name of torch's dtype.

    With ``shape`` all have that shape, and the storage is a fixed-size list of the items of each. Else they
    have ``ndim`` dimensions: the storage is a list, and with more than one dimension a struct of it and of
    the shapes. Items of dtypes that Arrow lacks are bytes.
    """

    NAME = "shmloader.ndarray"


class DatetimeType(PythonType):
    """datetimes with a time zone: microseconds in UTC, and the zone by ``key`` (zoneinfo) or ``offset_s``."""

    NAME = "shmloader.datetime"


class DecimalType(PythonType):
    """Decimals, as strings: these keep trailing zeros and NaN."""

    NAME = "shmloader.decimal"


class UuidType(PythonType):
    """UUIDs, as 16 bytes."""

    NAME = "shmloader.uuid"


class PickleType(PythonType):
    """Any other objects, pickled, each by itself; ``types`` names their classes."""

    NAME = "shmloader.pickle"


class LinkType(PythonType):
    """Row numbers in other columns of the same memory: ``link`` says in which. In no file."""

    NAME = "shmloader.link"


_TYPES: tuple[type[PythonType], ...] = (
    PathType,
    TupleType,
    NamedTupleType,
    DataclassType,
    EnumType,
    SetType,
    DictType,
    KeysType,
    ScalarType,
    ArrayType,
    DatetimeType,
    DecimalType,
    UuidType,
    PickleType,
    LinkType,
)

for _kind in _TYPES:
    pa.register_extension_type(_kind(pa.null()))


def storage_of(column: Any) -> Any:
    """The values that a column of a Python type is kept as; any other column itself."""
    return column.storage if isinstance(column.type, pa.ExtensionType) else column


def dictionary_outside(column: Any) -> Any:
    """A column whose dictionary is outermost: Arrow puts a Python type over its dictionary."""
    kind = column.type
    if not (isinstance(kind, PythonType) and pa.types.is_dictionary(kind.storage_type)):
        return column
    words = column.storage.dictionary
    return pa.DictionaryArray.from_arrays(column.storage.indices, kind.over(words.type).wrap(words))


def children_of(kind: Any) -> list[Any]:
    """The types inside of a type."""
    if isinstance(kind, PythonType):
        return [kind.storage_type]
    if pa.types.is_dictionary(kind):
        return [kind.value_type]
    return [kind.field(number).type for number in range(kind.num_fields)]


def find_types(kind: Any, wanted: type[PythonType], path: str = "") -> list[tuple[str, PythonType]]:
    """The place in a type where a Python type occurs, by the names of fields."""
    if isinstance(kind, wanted):
        return [(path, kind)]
    if pa.types.is_struct(kind) and not path.endswith("]"):
        named = [(f"{path}.{field.name}".lstrip("."), field.type) for field in kind]
    else:
        named = [(path, child) for child in children_of(kind)]
    return [found for name, child in named for found in find_types(child, wanted, name)]
