"""Neither advice nor a search for what to share runs code of the program's classes."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from caught_warnings import caught_warnings

from shmloader import DataLoader, share
from shmloader.store import base, unshared
from shmloader.store.graph import Graph
from shmloader.store.objects import estimate_nbytes

ran: list[str] = []
assert base.SharedObject  # loaded, as in a program that shares something


def note(*name: Any) -> None:
    ran.append(".".join(map(str, name)))


class Lazy:
    """A proxy, as those of many libraries: it opens when its class, or any attribute, is asked for."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        object.__setattr__(self, "_factory", factory)

    def _opened(self) -> Any:
        return object.__getattribute__(self, "_factory")()

    __class__ = property(lambda self: type(Lazy._opened(self)))  # type: ignore[assignment]
    __dict__ = property(lambda self: Lazy._opened(self).__dict__)  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        return getattr(Lazy._opened(self), name)


def raises() -> Any:
    note("opened, and raises")
    raise OSError("not there")


def opens() -> Any:
    note("opened")
    return [1, 2]


OWN = (
    "__len__ __iter__ __getitem__ __contains__ __sizeof__ __eq__ __hash__ __repr__ __str__ __bool__ "
    "__reversed__ __getattr__ __getattribute__ __reduce_ex__ __getstate__ __dir__ items values keys copy get"
).split()


def loud(base: type, *, slots: bool = False) -> type:
    """A subclass all of whose methods note that they were called."""

    def noting(name: str) -> Any:
        inherited = getattr(base, name, None)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            note(base.__name__, name)
            return inherited(self, *args, **named) if inherited else None

        return method

    class Meta(type(base)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            note("metaclass", "__instancecheck__")
            return False

        def __subclasscheck__(cls, other: Any) -> bool:
            note("metaclass", "__subclasscheck__")
            return False

        def __getattribute__(cls, name: str) -> Any:
            note("metaclass", name)
            return super().__getattribute__(name)

        def __eq__(cls, other: object) -> bool:
            note("metaclass", "__eq__")
            return cls is other

        def __hash__(cls) -> int:
            note("metaclass", "__hash__")
            return id(cls)

    names: dict[str, Any] = {name: noting(name) for name in OWN}
    names["nbytes"] = names["held"] = property(noting("a property"))
    names["__class__"] = property(noting("__class__"))
    if slots:
        names["__slots__"] = ("kept",)
    return Meta("Loud", (base,), names)


class Descriptor:
    def __get__(self, instance: Any, owner: Any) -> Any:
        note("descriptor")

    def __set__(self, instance: Any, value: Any) -> None:
        note("descriptor")


class Described:
    field = Descriptor()

    @property
    def computed(self) -> Any:
        note("property")


class LoudArray(np.ndarray[Any, Any]):
    def __array_finalize__(self, other: Any) -> None:
        note("__array_finalize__")

    nbytes = property(lambda self: note("array nbytes"))  # type: ignore[assignment]


class LoudTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, *args: Any) -> Any:
        note("__torch_function__", function)
        return super().__torch_function__(function, *args)


def made(kind: type, value: Any = None) -> Any:
    one = kind.__new__(kind) if value is None else type.__call__(kind, value)
    if hasattr(type(one), "kept"):
        type.__getattribute__(type(one), "kept").__set__(one, [1])
    return one


def rows() -> list[Any]:
    return [{"path": f"image-{n}", "label": n} for n in range(60_000)]


def objects() -> Any:
    array = np.empty(1000, object)
    array[0] = Lazy(raises)
    array[1:] = rows()[:999]
    return array


ODD: dict[str, Callable[[], Any]] = {
    "proxy": lambda: Lazy(opens),
    "broken-proxy": lambda: Lazy(raises),
    "list": lambda: made(loud(list), rows()),
    "dict": lambda: made(loud(dict), enumerate(rows())),
    "set": lambda: made(loud(set), range(60_000)),
    "deque": lambda: made(loud(collections.deque), rows()),
    "object": lambda: made(loud(object)),
    "slots": lambda: made(loud(object, slots=True)),
    "class": lambda: loud(object),
    "key": lambda: {made(loud(object)): rows()},
    "descriptors": Described,
    "array": lambda: np.zeros(1 << 20).view(LoudArray),
    "objects": objects,
    "tensor": lambda: torch.zeros(1 << 20).as_subclass(LoudTensor),
    "mapping": lambda: types.MappingProxyType(made(loud(dict), {1: rows()})),
    "partial": lambda: functools.partial(opens, Lazy(raises)),
    "inside": lambda: [(Lazy(opens), made(loud(list), [1, 2]))],
}


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> Iterator[Any]:
    value = ODD[request.param]()
    ran.clear()
    yield types.SimpleNamespace(odd=value, rows=[{"text": f"text {n}", "n": n} for n in range(60_000)])
    ran.clear()


def test_a_search_and_sizes_run_no_code(odd: Any) -> None:
    graph = Graph(odd)
    paths = [node.path for node in graph.nodes.values()]
    sizes = [estimate_nbytes(node.value, arrays=False) for node in graph.nodes.values()]
    assert ran == []
    assert len(paths) >= 3
    assert max(sizes) > 1 << 20


def test_sharing_what_lies_beside_runs_no_code(odd: Any) -> None:
    one = odd.odd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        shared = share(odd)
    assert [name for name in ran if name != "object.__hash__"] == []  # a key's, when its dict is copied
    assert type(shared.rows).__name__ == "RowStore"
    if type(one).__name__ in ("Lazy", "Loud"):
        assert shared.odd is one


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.proxy, self.broken = Lazy(opens), [Lazy(raises)]
        self.texts = made(loud(list), [f"text {n}" for n in range(300_000)])

    def __len__(self) -> int:
        return 300_000

    def __getitem__(self, index: int) -> int:
        return len(list.__getitem__(self.texts, index))


@pytest.mark.parametrize("share_dataset", [False, True])
def test_a_loader_opens_no_proxy_and_warns_all_the_same(
    monkeypatch: pytest.MonkeyPatch, share_dataset: bool
) -> None:
    monkeypatch.setattr(unshared, "LEAST_NBYTES", 12 << 20)
    dataset = Rows()
    ran.clear()
    with caught_warnings() as caught:
        loader = DataLoader(
            dataset,
            batch_size=2000,
            num_workers=1,
            multiprocessing_context="fork",
            share_dataset=share_dataset,
        )
        assert sum(map(len, loader)) == 300_000
    assert ran == []
    text = str(caught[-1].message)
    assert "Rows.texts, of type Loud, has about" in text
    assert "share_dataset=True does not move them" in text
