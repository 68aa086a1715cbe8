"""Classes that columns name: which can be kept as columns, and how their instances are made again."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

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
    """The function that makes dataclasses as pickle does; ValueError if that may run code."""
    if not (is_plain_dataclass(kind) and {*names} <= {*kind.__dataclass_fields__}):
        raise ValueError(
            f"values with {', '.join(names)} become no instances of {kind.__module__}.{kind.__qualname__}: "
            "it has other fields, or making, filling or ending one may run code of its own. Open the file "
            "without this column (columns=[...]), or where that class is not imported"
        )
    make_empty: Any = kind.__new__
    set_attribute = object.__setattr__  # frozen dataclasses let nothing else through

    def make(state: dict[str, Any]) -> Any:
        instance: Any = make_empty(kind)
        for name, value in state.items():  # by its __dict__, attributes would be slower to read
            set_attribute(instance, name, value)
        return instance

    return make


class ClassFinder:
    """Finds the classes that columns name: some were given by a process that knows them, with the memory."""

    def __init__(self, given: Classes | None = None) -> None:
        self.found: dict[str, type] = dict(given or {})

    def find(self, kind: Any) -> Any:
        """The class that a kind names; ValueError if no such class is loaded, or it is another one by now."""
        name = kind.parameters["python"]
        found = self.found.get(name, loaded_class(name))
        if found is not None and kind.is_for(found):
            return self.found.setdefault(name, found)
        module, _, path = name.partition(":")
        raise ValueError(
            f"values are of the class {path!r} of the module {module!r}, which is not loaded, or has another "
            "class of this name. Import it first: opening a file imports nothing. Or open the file without "
            "this column (columns=[...])"
        )

    def find_all(self, kinds: Iterable[Any]) -> None:
        """Find the class of each kind that names one; see `find`."""
        for kind in kinds:
            if "python" in getattr(kind, "parameters", ()):
                self.find(kind)

    def given(self) -> dict[str, type]:
        """The classes that other processes find by their names too."""
        return {name: kind for name, kind in self.found.items() if loaded_class(name) is kind}
