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
