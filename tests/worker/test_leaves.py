"""Leaves arrive as torch's transport would bring them, through one slot in this process."""

from __future__ import annotations

import operator
import pickle
import platform
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.compare import assert_same
from torch.utils.data import default_collate

import shmloader
from shmloader import DataLoader
from shmloader.codec import Decoder, Encoder, decoder
from shmloader.codec.layout import ARRAY, LONE_LEAF, join_header, pack_row
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.memory import Segment


def arrives(batch: Any, output: torch.Tensor | None = None, times: int = 4) -> Any:
    """A batch after its way through a slot; an ``output`` of collation is item 3 of a tuple.

    It is decoded several times, since the decoder remembers another way for what comes again.
    """
    segment = Segment()
    allocator = SlotAllocator(segment)
    allocator.begin(0, segment.reserve(0, 0, 1 << 16), 1 << 20)
    if output is not None:
        made = allocator.output(len(output), tuple(output.shape[1:]), output.dtype)
        assert made is not None
        made.tensor.copy_(output)
        batch = (*batch[:3], made.placeholder, *batch[3:])
    header_begin, header_end, spilled = Encoder(allocator).encode(batch)
    assert spilled is None
    header = bytes(allocator.view()[header_begin:header_end])
    extent = segment.map(0, allocator.nbytes)
    allocator.release()
    segment.close()
    reader, anchor = Decoder(), np.ndarray(extent.nbytes, np.uint8, extent.buffer)
    for _ in range(times):
        arrived = reader.decode(anchor, header)
    return arrived


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "plain": np.arange(12.0).reshape(3, 4),
    "none": np.ones((0, 3)),
    "one": np.array(2.5, np.float32),
    "big-endian": np.arange(12, dtype=">i4"),
    "big-endian, apart": np.arange(12, dtype=">i4")[::2],
    "read-only": read_only(np.arange(12)),
    "read-only, none": read_only(np.ones(0)),
    "Fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "permuted": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "apart": np.arange(24).reshape(4, 6)[::2, ::3],
    "backwards": np.arange(5)[::-1],
    "strings": np.array(["a", "bcd"]),
    "records": np.zeros(3, [("a", "u1"), ("b", ">f8", (2,))]),
    "dates": np.array(["2020-01-01", "NaT"], "M8[s]"),
    "objects": np.array([None, "text", 3], object),
    "nothing": np.zeros(3, "V0"),
}


@pytest.mark.in_ci(12)
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives_as_by_pickles_default_protocol(
    name: str, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle, "DEFAULT_PROTOCOL", protocol)
    array = ARRAYS[name]
    expected = pickle.loads(pickle.dumps(array, protocol))
    got = arrives([array, {"again": array}])
    assert got[0] is got[1]["again"]
    assert_same(got[0], expected)
    assert got[0].dtype.byteorder == expected.dtype.byteorder
    assert got[0].strides == expected.strides


LARGE = [bytes([number]) * 50_000 for number in range(3)]


@pytest.mark.parametrize(
    "batch",
    [
        LARGE[0],
        LARGE,
        tuple(LARGE),
        [LARGE[0], b"short", "text", LARGE[0]],
        [(LARGE[0], 1), (LARGE[1], 2)],
        [{"jpg": LARGE[0], "label": 1}, {"jpg": b"", "label": torch.ones(2)}],
        {"jpg": list(LARGE), "label": torch.arange(3)},
        {"jpg": [LARGE], "deep": [[[LARGE[0]]]]},
        [bytearray(LARGE[0]), LARGE[1]],
    ],
)
def test_large_bytes_arrive_as_bytes(batch: Any) -> None:
    got = arrives(batch)
    assert_same(got, batch)


_DECODES = """
import resource
import numpy as np
from shmloader.codec import Decoder, Encoder
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.memory import Segment

segment = Segment()
allocator, decoder = SlotAllocator(segment), Decoder()
allocator.begin(0, segment.reserve(0, 0, 1 << 23), 1 << 23)
begin, end, _ = Encoder(allocator).encode([bytes([number]) * 100_000 for number in range(64)])
header = bytes(allocator.view()[begin:end])
for number in range(20):
    batch = decoder.decode(np.frombuffer(allocator.view(), np.uint8), header)
    del batch
    if number == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.in_ci
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps have other rules")
def test_the_memory_of_large_bytes_is_used_again() -> None:
    command = [sys.executable, "-c", _DECODES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 15 * 100, "a batch has 1,600 pages"


def test_large_bytes_are_leaves_and_one_object_in_two_places_stays_one() -> None:
    segment = Segment()
    allocator = SlotAllocator(segment)
    allocator.begin(0, segment.reserve(0, 0, 1 << 16), 1 << 20)
    begin, end, _ = Encoder(allocator).encode([(LARGE[0], 1), (LARGE[1], 2)])
    assert end - begin < 1000, "they are not in the header"
    allocator.close()
    first, second = arrives([LARGE[0], LARGE[0]])
    assert first is second
    column = [LARGE[0], LARGE[1]]
    one, other = arrives([column, column])
    assert one is other


class Holder:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


SAMPLE = {"jpg": LARGE[0], "label": 1}
IN_ITSELF: list[Any] = [SAMPLE]
IN_ITSELF.append(IN_ITSELF)


@pytest.mark.parametrize(
    ("batch", "pair"),
    [
        ({"samples": [SAMPLE], "first": SAMPLE}, lambda got: (got["samples"][0], got["first"])),
        ([SAMPLE, Holder(best=SAMPLE)], lambda got: (got[0], got[1].best)),
        ([SAMPLE, [[[[SAMPLE]]]]], lambda got: (got[0], got[1][0][0][0][0])),
        ([LARGE[0], Holder(jpg=LARGE[0])], lambda got: (got[0], got[1].jpg)),
        (IN_ITSELF, lambda got: (got, got[1])),
    ],
    ids=["at two depths", "in an object", "deeper", "bytes in an object", "a list in itself"],
)
def test_one_object_stays_one_beside_large_bytes(batch: Any, pair: Callable[[Any], Any]) -> None:
    one, other = pair(arrives(batch))
    assert one is other


class Buffered:
    """An object whose own reduction leaves its bytes out of the pickle."""

    def __init__(self, buffer: Any) -> None:
        self.contents = bytes(buffer)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Buffered, (pickle.PickleBuffer(self.contents),)


class Writable:
    """Pickles itself as PEP 574 shows: its bytearray is a buffer that may be written to."""

    def __init__(self, contents: Any) -> None:
        self.contents = contents

    @classmethod
    def make(cls, buffer: Any) -> Writable:
        return cls(bytearray(buffer) if buffer else None)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.make, (pickle.PickleBuffer(self.contents) if protocol >= 5 else self.contents,)


class Keeps(Writable):
    """Keeps the buffer that it is made of."""

    @classmethod
    def make(cls, buffer: Any) -> Keeps:
        return cls(buffer)


def test_a_buffer_of_an_objects_own_reduction_arrives_as_a_memoryview() -> None:
    full, empty = arrives([Writable(bytearray(b"abc")), Writable(bytearray())])
    assert (full.contents, empty.contents) == (bytearray(b"abc"), None)
    written, read = arrives([Keeps(bytearray(b"abc")), Keeps(b"abc")])
    written.contents[0] = ord("x")
    assert written.contents == b"xbc"
    assert read.contents.readonly
    assert read.contents == b"abc"


def test_leaves_of_all_origins_keep_their_order() -> None:
    batch = (
        [Buffered(b"first"), torch.arange(3.0)],
        np.arange(6).reshape(1, 2, 3),
        torch.nn.Parameter(torch.ones(2, 2)),
        Buffered(b"second"),
        {"none": torch.ones(2, 0), "one": torch.tensor(5)},
        torch.arange(120.0).view(2, 3, 4, 5).permute(0, 3, 1, 2),
        torch.arange(4, dtype=torch.uint8).untyped_storage(),
    )
    output = torch.arange(8).reshape(4, 2)
    got = arrives(batch, output)
    assert_same((got[0][1], *got[1:3], got[3], *got[5:7]), (batch[0][1], *batch[1:3], output, *batch[4:6]))
    assert (got[0][0].contents, got[4].contents) == (b"first", b"second")
    assert got[7].tolist() == [0, 1, 2, 3]


def test_a_buffer_that_is_released_meanwhile_keeps_its_memory() -> None:
    contents = bytearray(b"A" * 200_000)
    buffer = pickle.PickleBuffer(contents)

    class Lends:
        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return bytes, (buffer,)

    class Releases:
        def __reduce__(self) -> tuple[Any, ...]:
            buffer.release()
            with pytest.raises(BufferError, match="exports"):
                contents.clear()
            return str, ("released",)

    assert arrives([Lends(), Releases()]) == [b"A" * 200_000, "released"]


def test_views_of_one_storage_arrive_as_copies() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    batch = arrives([whole, whole[1], whole[:, 1:3], whole])
    assert_same(batch, [whole, whole[1], whole[:, 1:3].clone(), whole])
    assert batch[3] is batch[0]
    batch[0].zero_()
    assert_same(batch[1:3], [whole[1], whole[:, 1:3].clone()])


def test_tensors_without_gaps_arrive_with_their_strides() -> None:
    base = torch.arange(120.0)
    tensors = {
        "permuted": base.view(2, 3, 4, 5).permute(0, 3, 1, 2),
        "expanded": base[:6].expand(4, 6),
        "windows": base.unfold(0, 5, 2),
        "grey, channels last": base.view(4, 1, 5, 6).to(memory_format=torch.channels_last),
    }
    got = arrives(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].stride() == tensor.stride(), name
        assert got[name].untyped_storage().nbytes() <= tensor.nbytes, name


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(6).reshape(2, 3),
        5,
        (torch.arange(4), 3),
        [torch.arange(4), torch.ones(2), torch.ones(2, 0)],
        {"x": torch.arange(4), "5": np.ones(2), "y": {"z": 1.5}},
        {"x": torch.arange(4), "5": torch.ones(2, dtype=torch.bfloat16)},
        {"x": torch.arange(4), "name": "a"},
        "text",
        OrderedDict(x=torch.arange(3), y=torch.ones(2)),
    ],
    ids=repr,
)
def test_a_header_that_comes_again_gives_the_same_in_new_containers(sample: object) -> None:
    """A header is read in another way from its third time on."""
    expected = default_collate([sample, sample])
    batches = list(DataLoader([sample] * 10, batch_size=2, num_workers=1))
    for batch in batches:
        assert_same(batch, expected)
    assert len({id(batch) for batch in batches}) == 5


def test_a_header_whose_table_was_forgotten_is_learnt_later(monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = np.zeros(64, np.uint8)
    mark = pickle.PickleBuffer(bytearray(1))

    def header(size: int, text: str = "") -> bytes:
        structure = pickle.dumps([mark, text], 5, buffer_callback=lambda _: None)
        return join_header((structure,), (pack_row(ARRAY, 0, 0, (size,)),))

    read: list[bytes] = []
    rows_of = decoder.rows_of

    def count(table: bytes) -> list[Any]:
        read.append(table)
        return rows_of(table)

    monkeypatch.setattr(decoder, "rows_of", count)
    decodes = Decoder()
    decodes.decode(anchor, header(3))
    for size in range(300):  # their long headers are not remembered, but their tables are
        decodes.decode(np.zeros(400, np.uint8), header(4 + size, "x" * 5000))
    for _ in range(2):
        decodes.decode(anchor, header(3))
    read.clear()
    assert decodes.decode(anchor, header(3))[0].shape == (3,)
    assert read == []


def test_a_header_that_comes_again_calls_nothing_of_the_program() -> None:
    """A class that is made of a leaf is never made of another object."""
    batches = list(DataLoader([OfALeaf(torch.arange(3))] * 5, None, num_workers=1, collate_fn=_as_it_is))
    assert [batch.leaf.tolist() for batch in batches] == [[0, 1, 2]] * 5


class AnItem:
    """It is pickled as tensors in slots are: by a call of ``operator.getitem``."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self.items, 0)


TENSOR = torch.arange(6).reshape(2, 3)
AS_WITHOUT_SLOTS: dict[str, tuple[Any, Any]] = {
    "an item of a tensor": (AnItem(TENSOR), TENSOR[0]),
    "an item of a permuted tensor": (AnItem(TENSOR.t()), TENSOR[:, 0]),
    "an item of a list": (AnItem([TENSOR]), TENSOR),
    "an item of a list of two": (AnItem([TENSOR, TENSOR + 1]), TENSOR),
    "one tensor twice": ({"a": TENSOR, "b": TENSOR}, {"a": TENSOR, "b": TENSOR}),
    "one list twice": ([[TENSOR]] * 2, [[TENSOR]] * 2),
    "permuted, in a list": ([TENSOR.t()], [TENSOR.t()]),
    "a tuple as key": ({("a", 1): TENSOR}, {("a", 1): TENSOR}),
}


@pytest.mark.in_ci(6)
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("name", AS_WITHOUT_SLOTS)
def test_batches_that_look_like_leaves_arrive_as_what_they_are(name: str, times: int) -> None:
    batch, expected = AS_WITHOUT_SLOTS[name]
    assert_same(arrives(batch, times=times), expected)


def test_batches_that_cannot_be_made_of_mere_objects_arrive() -> None:
    ((key, value),) = arrives({TENSOR: TENSOR}).items()
    assert key is value
    assert_same(value, TENSOR)
    ((key, value),) = arrives({("a", TENSOR): 5}).items()
    assert_same(key, ("a", TENSOR))
    (member,) = arrives({TENSOR.t()})
    assert_same(member, TENSOR.t())
    assert bytes(*arrives([pickle.PickleBuffer(b"abc")])) == b"abc"


LEAVES = st.sampled_from(
    [
        TENSOR,
        TENSOR.t(),
        TENSOR[:1].expand(4, 3),
        TENSOR[:, ::2],
        torch.zeros(3, 0),
        torch.tensor(5.0, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        np.arange(4),
        np.arange(6).reshape(2, 3).T,
        AnItem(TENSOR.t()),
        OrderedDict(a=TENSOR),
        "text",
        None,
        (),
    ]
)
"""An object that is drawn twice stands twice in the batch."""
BATCHES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", 5, ("a", None)]), inner)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(BATCHES)
def test_any_batch_that_comes_again_arrives_as_at_first(batch: Any) -> None:
    assert_same(arrives(batch, times=4), arrives(batch, times=1))


class OfALeaf:
    def __init__(self, leaf: torch.Tensor) -> None:
        assert isinstance(leaf, torch.Tensor)
        self.leaf = leaf

    def __reduce__(self) -> tuple[Any, ...]:
        return OfALeaf, (self.leaf,)


def _as_it_is(batch: Any) -> Any:
    return batch


class Sub(torch.Tensor):
    """Is pickled by torch's reduction."""


def with_attribute() -> torch.Tensor:
    tensor = torch.arange(3.0)
    tensor.note = 1  # type: ignore[attr-defined]
    return tensor


LONE: dict[str, torch.Tensor] = {
    "plain": torch.arange(12.0).reshape(3, 4),
    "empty": torch.ones(0, 3),
    "of no dimensions": torch.tensor(7),
    "bfloat16": torch.ones(4, 2, dtype=torch.bfloat16),
    "conjugate": (torch.arange(3.0) + 2j).conj(),
    "negative": torch._neg_view(torch.arange(3.0)),
    "negative number": torch.tensor(1 + 2j).conj().imag,
    "a row": torch.arange(12.0).reshape(3, 4)[1],
    "every other": torch.arange(12.0)[::2],
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "expanded": torch.ones(1, 3).expand(4, 3),
    "one channel, channels last": torch.ones(2, 1, 3, 3).to(memory_format=torch.channels_last),
    "requiring grad": torch.ones(3, requires_grad=True),
    "many dimensions": torch.arange(2.0).reshape((1,) * 40 + (2,)),
    "many dimensions of two": torch.zeros((0,) + (2,) * 40),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, 2, device="meta"),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "subclass": torch.ones(3, 2).as_subclass(Sub),
    "with an attribute": with_attribute(),
}


@pytest.mark.in_ci(8)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", LONE)
def test_a_tensor_alone_arrives_as_inside_a_list(name: str) -> None:
    alone, (inside,) = arrives(LONE[name]), arrives([LONE[name]])
    assert form_of(alone) == form_of(inside)
    if alone.is_meta:
        return
    assert_same(alone, inside)
    assert torch.equal(alone.to_dense(), LONE[name].to_dense())


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All but its items."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, vars(tensor)
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, strides, *bits


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_alone_arrive() -> None:
    arrived = arrives(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert [len(part) for part in arrived.unbind()] == [2, 3]


@pytest.mark.parametrize(("name", "is_so"), [("plain", True), ("bfloat16", True), ("transposed", False)])
def test_a_plain_tensor_alone_needs_no_pickler(name: str, is_so: bool) -> None:
    segment = Segment()
    allocator = SlotAllocator(segment)
    allocator.begin(0, segment.reserve(0, 0, 1 << 16), 1 << 20)
    begin, end, _ = Encoder(allocator).encode(LONE[name])
    assert bytes(allocator.view()[begin:end]).startswith(LONE_LEAF) is is_so
    allocator.close()


def negative(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    first = shmloader.empty(len(samples), 4).fill_(1)
    return first, shmloader.empty(-1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_negative_size_in_the_slot_is_refused_as_by_torch(num_workers: int) -> None:
    """NumPy would infer it from the rest of the slot, over other leaves."""
    iterator = iter(DataLoader(range(4), batch_size=2, num_workers=num_workers, collate_fn=negative))
    with pytest.raises(RuntimeError, match="negative dimension -1"):
        next(iterator)
