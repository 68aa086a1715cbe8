"""Arrow extension types for Python's types: each gives the meaning of the values in its storage.

A type is written as a name (``shmloader.path``) and a JSON object with a version. So a file with such a
column is an ordinary Arrow file: programs that do not know the name see the storage. Nothing in that object
is code. Classes are given by module and name; `ClassFinder` looks them up without importing anything.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, Self

import pyarrow as pa

VERSION = 1
"""The version of the JSON object; files with a larger one are refused."""


class PythonType(pa.ExtensionType):  # type: ignore[misc]
    """Base of the types below.

    Attributes:
        parameters: The type's parameters beside its storage; plain JSON.
    """

    NAME: ClassVar[str]

    def __init__(self, storage: Any, **parameters: Any) -> None:
        self.parameters = parameters
        super().__init__(storage, self.NAME)

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps({"version": VERSION, **self.parameters}, sort_keys=True).encode()

    @classmethod
    @functools.lru_cache(maxsize=128)  # Arrow calls it at each look at a type whose first instance is gone
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
PackedType = _declare("packed", "Numbers (``code``) at ``offset`` of each of some records. In no file.")
RecordsType = _declare(
    "records",
    """Records of the ``numbers`` of structs, as bytes: code and offset by name. In no file.

    ``order`` names all fields of the structs.
    """,
)
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


ONLY_IN_MEMORY = (LinkType, PackedType, RecordsType)
"""Types that refer to other columns of the same memory; no file has them."""


def is_text(kind: Any) -> bool:
    """Whether a type is that of texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_octets(kind: Any) -> bool:
    """Whether a type is that of bytes, of any lengths."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_list(kind: Any) -> bool:
    """Whether a type is that of lists, of any lengths."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


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


def dictionary_inside(column: Any) -> Any:
    """The reverse: Arrow writes no dictionaries inside of a Python type that is itself in a dictionary."""
    kind = column.type
    if not (pa.types.is_dictionary(kind) and isinstance(kind.value_type, PythonType)):
        return column
    places = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.storage)
    return kind.value_type.over(places.type).wrap(places)


def mask_of(column: Any) -> Any:
    """The rows of a column that are null; None if none are."""
    return column.is_null() if column.null_count else None


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


def find_types(
    kind: Any, wanted: type[PythonType] | tuple[type[PythonType], ...], path: str = ""
) -> list[tuple[str, PythonType]]:
    """The place in a type where a Python type occurs, by the names of fields."""
    if isinstance(kind, wanted):
        return [(path, kind)]
    if pa.types.is_struct(kind) and not path.endswith("]"):
        named = [(f"{path}.{field.name}".lstrip("."), field.type) for field in kind]
    else:
        named = [(path, child) for child in children_of(kind)]
    return [found for name, child in named for found in find_types(child, wanted, name)]


# --- classes that columns name

Classes = Mapping[str, type]
"""Classes by the names that columns have them under."""

_MAKES_AND_PICKLES = "__setattr__ __new__ __reduce__ __reduce_ex__ __getstate__ __setstate__".split()
_MAKES_AND_PICKLES += "__getnewargs_ex__ __getnewargs__ __getattribute__ __del__".split()
_OWN_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)  # of __dict__ and of slots


def name_of_class(kind: type) -> str | None:
    """Module and name of a class; None if it is not found there."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if loaded_class(name) is kind else None


def loaded_class(name: str) -> type | None:
    """The class of a name in a module that is loaded; nothing is imported, and no module's own code runs."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not by getattr or isinstance: a module that loads itself when it is first used has its own of these.
        owner: Any = next((kind for kind in (type, ModuleType) if issubclass(type(found), kind)), None)
        found = owner and owner.__getattribute__(found, "__dict__").get(part)
    return found if issubclass(type(found), type) else None


def is_plain_namedtuple(kind: type) -> bool:
    """Whether ``kind`` is a namedtuple class whose instances are nothing but their items."""
    return (
        issubclass(kind, tuple)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and not kind.__dictoffset__
        and not hasattr(kind, "__del__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )


def is_plain_dataclass(kind: Any) -> bool:
    """Whether a class is a dataclass whose instances are their ``__dict__`` or slots, and run no code."""
    if "__dataclass_fields__" not in vars(kind):
        return False
    fields = kind.__dataclass_fields__
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    if slots and (kind.__dictoffset__ or sorted(slots) != sorted(fields)):
        return False
    found = [inspect.getattr_static(kind, name, None) for name in ("__dict__", *fields)]
    if any(inspect.isdatadescriptor(one) and not isinstance(one, _OWN_DESCRIPTORS) for one in found):
        return False
    params: Any = vars(kind).get("__dataclass_params__")
    # The __setattr__ of frozen classes is dataclass's.
    names = _MAKES_AND_PICKLES[bool(params and params.frozen) :]
    return all(_is_own(getattr(kind, name, None), getattr(object, name, None)) for name in names)


def _is_own(found: Any, usual: Any) -> bool:
    """Whether a method is Python's: also that which ``dataclass`` writes for frozen classes with slots."""
    return found is usual or getattr(found, "__globals__", None) is vars(dataclasses)


def state_of(value: Any) -> dict[str, Any]:
    """The values from which a plain dataclass is restored; AttributeError if a slot is empty."""
    kind: Any = type(value)
    if kind.__dictoffset__:
        state: dict[str, Any] = vars(value)
        return state
    return {name: getattr(value, name) for name in kind.__dataclass_fields__}


def maker_of(kind: Any, names: Collection[str]) -> Callable[[dict[str, Any]], Any]:
    """The function that makes dataclasses or namespaces as pickle does; ValueError if that may run code."""
    is_made_up = kind is SimpleNamespace
    is_fit = is_made_up or (is_plain_dataclass(kind) and {*names} <= {*kind.__dataclass_fields__})
    if not is_fit:
        raise ValueError(
            f"values with {', '.join(names)} become no instances of {kind.__module__}.{kind.__qualname__}: "
            "it has other fields, or making, filling or ending one may run code of its own. Open the file "
            "without this column (columns=[...]), or where that class is not imported"
        )
    make_empty: Any = kind.__new__
    set_slot = object.__setattr__  # frozen dataclasses let nothing else through

    def make(state: dict[str, Any]) -> Any:
        instance: Any = make_empty(kind)
        instance.__dict__.update(state)
        return instance

    def make_with_slots(state: dict[str, Any]) -> Any:
        instance: Any = make_empty(kind)
        for name, value in state.items():
            set_slot(instance, name, value)
        return instance

    return make if kind.__dictoffset__ else make_with_slots


class ClassFinder:
    """Finds the classes that columns name.

    Args:
        given: Classes that came with the memory, from a process that knows them.
    """

    def __init__(self, given: Classes | None = None) -> None:
        self.found: dict[str, type] = dict(given or {})

    def find(self, kind: PythonType) -> Any:
        """The class that a type names, or one made up in its place if it is no longer there."""
        name = kind.parameters["python"]
        found = self.found.get(name, loaded_class(name))
        if found is not None and _fits(found, kind):
            return self.found.setdefault(name, found)
        return _made_for(kind)

    def given(self) -> dict[str, type]:
        """The classes that other processes find by their names too."""
        return {name: kind for name, kind in self.found.items() if loaded_class(name) is kind}

    def find_all(self, schema: Any) -> None:
        """Find the classes that a schema's columns name."""
        for field in schema:
            for _, kind in find_types(field.type, (NamedTupleType, DataclassType, EnumType)):
                self.find(kind)


def _fits(found: Any, kind: PythonType) -> bool:
    """Whether a class is still the one that a type names."""
    if isinstance(kind, NamedTupleType):
        return is_plain_namedtuple(found) and list(found._fields) == _fields_of(kind)
    if isinstance(kind, DataclassType):
        return "__dataclass_fields__" in vars(found)
    return issubclass(found, enum.Enum) and set(kind.parameters["members"]) <= found.__members__.keys()


def _made_for(kind: PythonType) -> Any:
    """A class of the same name and fields, or members; a namespace for the attributes of a dataclass."""
    if isinstance(kind, DataclassType):
        return SimpleNamespace
    name = kind.parameters["python"].rpartition(":")[2].rpartition(".")[2]
    name = name if name.isidentifier() else "Unknown"
    if isinstance(kind, NamedTupleType):
        return _made_namedtuple(name, tuple(_fields_of(kind)))
    return _made_enum(name, tuple(kind.parameters["members"]))


def _fields_of(kind: PythonType) -> list[str]:
    return [field.name for field in kind.storage_type]


@functools.cache
def _made_namedtuple(name: str, fields: tuple[str, ...]) -> type:
    """A namedtuple class whose instances can be pickled without it."""
    make: Any = collections.namedtuple  # noqa: PYI024 - its fields are those of a file
    kind: type = make(name, fields, rename=True)
    return type(name, (kind,), {"__slots__": (), "__reduce__": _reduce_tuple})


def _reduce_tuple(made: Any) -> Any:
    return _remake_tuple, (type(made).__name__, made._fields, tuple(made))


def _remake_tuple(name: str, fields: tuple[str, ...], items: tuple[Any, ...]) -> Any:
    return tuple.__new__(_made_namedtuple(name, fields), items)


@functools.cache
def _made_enum(name: str, members: tuple[str, ...]) -> Any:
    """An enum whose members can be pickled without it."""
    make: Any = enum.Enum
    kind = make(name, members)
    kind.__reduce_ex__ = lambda member, _: (_member_of, (name, members, member.name))
    return kind


def _member_of(name: str, members: tuple[str, ...], member: str) -> Any:
    return _made_enum(name, members)[member]
