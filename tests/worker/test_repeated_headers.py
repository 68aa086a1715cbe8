"""A header is used again only for the very same placeholders in the same container."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shmloader.codec import Decoder, Encoder
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.memory import Segment


class Pair(NamedTuple):
    a: Any
    b: Any


class Name(str):
    __slots__ = ()


class Slot:
    """One slot, and an encoder that sees each batch in it."""

    def __init__(self) -> None:
        self.segment = Segment()
        self.allocator = SlotAllocator(self.segment)
        self.encoder = Encoder(self.allocator)
        self.nbytes = self.segment.reserve(0, 0, 1 << 16)
        self.pickled = 0
        dump = self.encoder._pickler.dump

        def counted(batch: Any) -> None:
            self.pickled += 1
            dump(batch)

        self.encoder._pickler.dump = counted  # type: ignore[method-assign]

    def outputs(self, *dtypes: torch.dtype, rows: int = 3) -> list[pickle.PickleBuffer]:
        """A new batch's placeholders: the value of each leaf is its place in the batch."""
        self.allocator.begin(0, self.nbytes, self.nbytes)
        placeholders = []
        for place, dtype in enumerate(dtypes):
            output = self.allocator.output(rows, (2,), dtype)
            assert output is not None
            output.tensor.fill_(place)
            placeholders.append(output.placeholder)
        return placeholders

    def arrives(self, batch: Any) -> Any:
        begin, end, spilled = self.encoder.encode(batch)
        assert spilled is None
        view = self.allocator.view()
        anchor = np.array(view)
        self.allocator.release()
        return Decoder().decode(anchor, bytes(view[begin:end]))


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot()
    yield slot
    slot.allocator.close()


FLOATS = torch.float32, torch.float32
FIRST = {"a": 0, "b": 1}  # the batch before: places of leaves
OTHERS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "another order of keys": ({"b": 0, "a": 1}, lambda a, b: {"b": a, "a": b}),
    "another order of leaves": ({"a": 1, "b": 0}, lambda a, b: {"a": b, "b": a}),
    "a leaf twice": ({"a": 0, "b": 0}, lambda a, _: {"a": a, "b": a}),
    "one leaf less": ({"a": 0}, lambda a, _: {"a": a}),
    "a number in its place": ({"a": 0, "b": 7}, lambda a, _: {"a": a, "b": 7}),
    "another key": ({"a": 0, "c": 1}, lambda a, b: {"a": a, "c": b}),
    "an equal key of another class": ({"a": 0, "b": 1}, lambda a, b: {"a": a, Name("b"): b}),
    "a list": ([0, 1], lambda a, b: [a, b]),
    "a tuple": ((0, 1), lambda a, b: (a, b)),
    "a named tuple": (Pair(0, 1), Pair),
    "a subclass of dict": (OrderedDict(a=0, b=1), lambda a, b: OrderedDict(a=a, b=b)),
    "a list around it": ([{"a": 0, "b": 1}], lambda a, b: [{"a": a, "b": b}]),
    "an empty list": ([], lambda *_: []),
    "a buffer of the program's": ({"a": 0, "b": bytearray(b"12")}, lambda a, _: {"a": a, "b": BUFFER}),
}
BUFFER = pickle.PickleBuffer(bytearray(b"12"))


def with_places(batch: Any) -> Any:
    """A batch with a number in place of each leaf, the one that all its items are."""
    if isinstance(batch, torch.Tensor):
        (number,) = set(batch.flatten().tolist())
        return int(number)
    if isinstance(batch, np.ndarray):
        return bytearray(batch.tobytes())
    if isinstance(batch, dict):
        return type(batch)((key, with_places(value)) for key, value in batch.items())
    if isinstance(batch, Pair):
        return Pair(*map(with_places, batch))
    return type(batch)(map(with_places, batch)) if isinstance(batch, list | tuple) else batch


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_what_is_not_the_same_batch_has_a_header_of_its_own(slot: Slot, name: str, kind: type) -> None:
    """Of the same slot, leaves and container before; and the first batch comes again after it."""
    expected, make = OTHERS[name]
    before: Any = FIRST if kind is dict else kind([0, 1])
    for _ in range(2):
        for _ in range(2):
            a, b = slot.outputs(*FLOATS)
            assert with_places(slot.arrives({"a": a, "b": b} if kind is dict else kind([a, b]))) == before
        got = with_places(slot.arrives(make(*slot.outputs(*FLOATS))))
        assert got == expected
        assert type(got) is type(expected)
        if isinstance(got, dict):
            assert list(map(type, got)) == list(map(type, make(0, 1)))
            assert list(got) == list(expected)


def test_the_same_batch_is_pickled_once_for_each_slot_shape_and_dtype(slot: Slot) -> None:
    for _ in range(3):
        a, b = slot.outputs(*FLOATS)
        assert with_places(slot.arrives({"a": a, "b": b})) == FIRST
    assert slot.pickled == 1
    for _ in range(3):
        a, b = slot.outputs(*FLOATS, rows=2)
        got = slot.arrives({"a": a, "b": b})
        assert (with_places(got), got["a"].shape) == (FIRST, (2, 2))
    assert slot.pickled == 2
    for _ in range(3):
        a, b = slot.outputs(torch.float32, torch.float16)
        got = slot.arrives({"a": a, "b": b})
        assert (with_places(got), got["b"].dtype) == (FIRST, torch.float16)
    assert slot.pickled == 3


def test_other_batches_in_between_do_not_end_it(slot: Slot) -> None:
    for _ in range(2):
        for others in (["text"], []):
            slot.arrives([*others, *slot.outputs(*FLOATS), 7])
            a, b = slot.outputs(*FLOATS)
            assert with_places(slot.arrives({"a": a, "b": b})) == FIRST
    assert slot.pickled == 5


def test_values_beside_the_leaves_are_those_of_each_batch(slot: Slot) -> None:
    for number in range(4):
        a, b = slot.outputs(*FLOATS)
        tensor = torch.full((2,), 7.0, requires_grad=number % 2 == 1)
        got = slot.arrives({"a": a, "n": number, "t": tensor, "b": b, "s": [str(number)]})
        assert with_places(got) == {"a": 0, "n": number, "t": 7, "b": 1, "s": [str(number)]}
        assert got["t"].requires_grad is (number % 2 == 1)


TENSORS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "of other shapes": lambda: (torch.zeros(7), torch.ones(2, 3, 4)),
    "of another dtype": lambda: (torch.zeros(3), torch.ones(3, dtype=torch.bfloat16)),
    "empty": lambda: (torch.zeros(0, 3), torch.ones(5)),
    "one twice": lambda: (torch.zeros(3),) * 2,
    "a view of the other": lambda: (whole := torch.zeros(3), whole[1:]),
    "with a gradient": lambda: (torch.zeros(3), torch.ones(3, requires_grad=True)),
    "turned": lambda: (torch.zeros(3), torch.arange(6.0).view(2, 3).t()),
    "with a stride of its own": lambda: (torch.zeros(3), torch.ones(8).as_strided((2, 1, 4), (4, 1, 1))),
    "conjugated": lambda: (torch.zeros(3), torch.ones(3, dtype=torch.complex64).conj()),
    "sparse": lambda: (torch.zeros(3), torch.eye(3).to_sparse()),
    "a parameter": lambda: (torch.zeros(3), torch.nn.Parameter(torch.ones(3))),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_tensors_of_a_form_that_came_before_arrive_as_they_are(slot: Slot, name: str, kind: type) -> None:
    """The pickled structure is that of the first batch, where it is certain to be the same."""

    def arrived(tensors: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        slot.outputs()
        batch: Any = dict(zip("ab", tensors, strict=True)) if kind is dict else kind(tensors)
        got = slot.arrives(batch)
        assert type(got) is kind
        assert kind is not dict or list(got) == ["a", "b"]
        return list(got.values()) if isinstance(got, dict) else list(got)

    def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
        strides = None if tensor.layout is not torch.strided else tensor.stride()
        return type(tensor), tensor.dtype, tensor.layout, strides, tensor.requires_grad, str(tensor)

    usual = torch.zeros(4, 2), torch.ones(3)
    for tensors in (usual, TENSORS[name](), usual):
        got = arrived(tensors)
        assert list(map(facts, got)) == list(map(facts, tensors))
        assert (got[0] is got[1]) == (tensors[0] is tensors[1])


def test_tensors_are_pickled_once_for_each_form(slot: Slot) -> None:
    for size in (2, 3, 4):
        for make in (list, tuple, lambda both: {"a": both[0], "b": both[1]}, lambda both: both[0]):
            slot.outputs()
            slot.arrives(make([torch.zeros(size), torch.ones(size)]))
    assert slot.pickled == 3


def test_tensors_have_the_names_of_their_batch(slot: Slot) -> None:
    for names in ("ab", "ba", "xy", "ab"):
        slot.outputs()
        got = slot.arrives(dict(zip(names, (torch.zeros(2), torch.ones(2)), strict=True)))
        assert [(name, int(leaf[0])) for name, leaf in got.items()] == [(names[0], 0), (names[1], 1)]
