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


def _declare(name: str, meaning: str) -> type[PythonType]:
    """Make and register the type ``shmloader.<name>``, whose class is called after it."""
    said = {"NAME": f"shmloader.{name}", "__doc__": meaning, "__module__": __name__}
    kind = type(f"{_CLASS_NAMES.get(name, name.capitalize())}Type", (PythonType,), said)
    pa.register_extension_type(kind(pa.null()))
    return kind


_CLASS_NAMES = {"namedtuple": "NamedTuple", "ndarray": "Array"}

PathType = _declare("path", "Paths, as strings; ``kind`` is the class in ``pathlib``.")
TupleType = _declare("tuple", "tuples: a struct where all have one length, else a list.")
NamedTupleType = _declare("namedtuple", "namedtuples of the class ``python``, as a struct of their fields.")
DataclassType = _declare("dataclass", "Instances of the dataclass ``python``: attributes, as dicts are kept.")
EnumType = _declare("enum", "Members of the enum ``python``: positions in ``members``.")
SetType = _declare("set", "sets or frozensets (``kind``), as lists.")
DictType = _declare("dict", "dicts of any keys, as lists of the structs ``key`` and ``value``.")
KeysType = _declare("keys", "The keys that each of some dicts has: bit ``k`` stands for ``names[k]``.")
ScalarType = _declare("scalar", "NumPy scalars of ``dtype``: numbers, or items of bytes.")
DecimalType = _declare("decimal", "Decimals, as strings: these keep trailing zeros and NaN.")
UuidType = _declare("uuid", "UUIDs, as 16 bytes.")
PickleType = _declare("pickle", "Other objects, each pickled by itself; ``types`` names their classes.")
LinkType = _declare("link", "Row numbers in the column ``link`` of the same memory. In no file.")
DatetimeType = _declare(
    "datetime", "datetimes with a zone: microseconds in UTC; the zone is ``key`` (zoneinfo) or ``offset_s``."
)
ArrayType = _declare(
    "ndarray",
    """ndarrays of ``dtype``, or tensors with ``tensor``, the name of torch's dtype.

    With ``shape`` all have that shape, and the storage is a fixed-size list of the items of each. Else they
    have ``ndim`` dimensions: the storage is a list, and with more than one dimension a struct of it and of
    the shapes. Items of dtypes that Arrow lacks are bytes.
    """,
)


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
