"""Batches that are copied to a device ahead of the program, against a scripted driver, in any order."""

import collections
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from robustness.processes import LONG
from scripted_driver import ScriptedDriver
from table_machine import grant, publish

from shmloader.codec.layout import (
    ARRAY,
    CODE_OF_TORCH_DTYPE,
    LONE_LEAF,
    TENSOR,
    Leaf,
    align,
    join_header,
    pack_row,
)
from shmloader.device import copies_ahead, guard, pinned
from shmloader.device.copies_ahead import DeviceBatches, plan_of, way_of
from shmloader.device.driver import DriverError, Event
from shmloader.device.guard import DeviceGuard
from shmloader.device.moving import is_plain, to_device
from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import Place, PlaceState, PlaceTable

UINT8 = CODE_OF_TORCH_DTYPE[torch.uint8]
NBYTES = 3000


def _header(leaves: list[Leaf], structure: bytes | None = None) -> bytes:
    marks = [pickle.PickleBuffer(bytearray(1)) for _ in leaves]
    found = structure or pickle.dumps(marks, 5, buffer_callback=lambda _: None)
    return join_header([found], [pack_row(*leaf) for leaf in leaves])


LONE = _header([Leaf(TENSOR, UINT8, 0, (NBYTES,))], LONE_LEAF)


def _begin(batches: DeviceBatches, *arguments):
    with batches.driver.captures.lock, batches.driver.on(batches.device):
        return batches.begin(*arguments)


def _sent(table: PlaceTable, place: Place, anchor: np.ndarray, header: bytes):
    """A batch on the device."""
    batches = DeviceBatches(table.guard, 0)
    with batches.driver.captures.lock, batches.driver.on(batches.device):
        return batches.begin(place, anchor, header)()


class DeviceMachine(RuleBasedStateMachine):
    """A program that takes batches, queues work on them, drops them, leaves epochs and begins again.

    The scripted allocator gives memory that was freed to the next batch of the same stream at once. Each
    batch is full of its number: a read of another number came too early or too late.
    """

    def __init__(self) -> None:
        super().__init__()
        pinned._registered.clear()
        self.driver = ScriptedDriver()
        self.other = self.driver.new_stream()
        self._wait_s, guard.MOST_WAIT_S = guard.MOST_WAIT_S, 0.0
        self.number = 0
        self.begin_loader()

    def begin_loader(self) -> None:
        self.table = PlaceTable(Segment(), 2, 8 * PAGE_NBYTES)
        self.table.guard_with(DeviceGuard(self.driver))
        self.batches = DeviceBatches(self.table.guard, 0)
        self.ahead: collections.deque = collections.deque()
        self.held: list = []

    @precondition(lambda self: len(self.ahead) < 3)
    @rule()
    def begin(self) -> None:
        self.number = self.number % 250 + 1
        place = grant(self.table)
        self.table.reserve(place, NBYTES)
        np.frombuffer(self.table.map(place).buffer, np.uint8)[:NBYTES] = self.number
        publish(self.table, place, place.nbytes, NBYTES)
        anchor, _ = self.table.take(place)
        copy = _begin(self.batches, place, anchor, LONE)
        assert (copy is not None) == (place.state is PlaceState.LEASED)
        if copy is not None:
            self.ahead.append((copy, self.number))

    @precondition(lambda self: self.ahead)
    @rule()
    def finish(self) -> None:
        copy, number = self.ahead.popleft()
        with self.batches.driver.captures.lock, self.batches.driver.on(0):
            self.held.append((copy(), number))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), drop=st.booleans())
    def work(self, which: int, drop: bool) -> None:
        """Queue a kernel that reads a batch, and may let the program drop it before it runs."""
        place = which % len(self.held)
        batch, number = self.held[place]
        address = batch.data_ptr()

        def kernel() -> None:
            found = set(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * NBYTES).from_address(address)))
            if found != {number}:
                self.driver.violations.append(f"a kernel read {found} instead of {number}")

        self.driver.launch(self.driver.current[0], kernel)
        if drop:
            del self.held[place]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        del self.held[which % len(self.held)]

    @precondition(lambda self: any(map(self.driver.can_advance, self.driver.streams)))
    @rule(which=st.integers(0, 99))
    def advance(self, which: int) -> None:
        ready = [number for number in self.driver.streams if self.driver.can_advance(number)]
        self.driver.advance(ready[which % len(ready)])

    @precondition(lambda self: not self.held)
    @rule()
    def change_the_current_stream(self) -> None:
        """The program holds nothing here: using a batch on two streams is its own responsibility."""
        self.driver.current[0] = self.other if self.driver.current[0] == 0 else 0

    @rule()
    def break_off(self) -> None:
        self.ahead.clear()

    @rule()
    def close(self) -> None:
        self.ahead.clear()
        self.table.close()
        self.begin_loader()

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.driver.violations == []

    def teardown(self) -> None:
        self.ahead.clear()
        self.table.close()
        self.driver.drain()
        self.nothing_is_violated()
        assert self.driver.registered == {}
        assert self.driver._events == 0
        guard.MOST_WAIT_S = self._wait_s


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=80 if LONG else 20, stateful_step_count=60, deadline=None)


@pytest.fixture
def driver():
    pinned._registered.clear()
    driver = ScriptedDriver()
    yield driver
    driver.drain()
    assert driver.violations == []
    assert driver.registered == {}


@pytest.fixture
def table(driver: ScriptedDriver):
    table = PlaceTable(Segment(), 1, 4000 * PAGE_NBYTES)
    table.guard_with(DeviceGuard(driver))
    yield table
    table.close()


def _leaves(table: PlaceTable, *tensors: torch.Tensor, kinds: tuple[int, ...] = (), gap: int = 0):
    """A leased place with these leaves: the place, its anchor, its header."""
    rows, end = [], 0
    kinds = kinds or (TENSOR,) * len(tensors)
    for tensor, kind in zip(tensors, kinds, strict=True):
        rows.append(Leaf(kind, CODE_OF_TORCH_DTYPE[tensor.dtype], end, tuple(tensor.shape)))
        end = align(end + tensor.nbytes) + gap
    place = grant(table)
    extent = table.reserve(place, max(end, 1))
    for leaf, tensor in zip(rows, tensors, strict=True):
        if tensor.numel():
            memory = np.frombuffer(extent.buffer, np.uint8)[leaf.offset : leaf.offset + tensor.nbytes]
            memory[:] = tensor.reshape(-1).view(torch.uint8).numpy()
    publish(table, place, place.nbytes, end)
    return place, table.take(place)[0], _header(rows)


MIXED = (
    torch.arange(6, dtype=torch.float32).reshape(2, 3),
    torch.tensor(7),
    torch.zeros(0, 4, dtype=torch.int16),
    torch.zeros(3, 0),
    torch.arange(5, dtype=torch.int64),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([1 + 2j], dtype=torch.complex128),
    torch.tensor([True, False]),
)


def test_leaves_come_as_they_are(driver: ScriptedDriver, table: PlaceTable) -> None:
    place, anchor, header = _leaves(table, *MIXED)
    batch = _sent(table, place, anchor, header)
    del anchor
    driver.drain()
    for found, expected in zip(batch, MIXED, strict=True):
        assert (found.dtype, found.shape, found.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        assert torch.equal(found, expected)
    assert len(driver.copied) == 1
    table.collect()
    assert place.state is PlaceState.FREE  # freed by the copy's own event


def test_leaves_are_tensors_of_their_own_for_autograd(driver: ScriptedDriver, table: PlaceTable) -> None:
    """Views of one tensor would share its version: writing to one would make the others' gradients fail."""
    place, anchor, header = _leaves(table, torch.ones(4), torch.ones(4))
    first, second = _sent(table, place, anchor, header)
    del anchor
    driver.drain()
    weight = torch.ones(4, requires_grad=True)
    product = (weight * first).sum()
    second.zero_()
    product.backward()
    assert torch.equal(weight.grad, torch.ones(4))
    assert not first._is_view()


def test_a_large_leaf_has_memory_of_its_own(driver: ScriptedDriver, table: PlaceTable) -> None:
    """A program that keeps the labels does not keep the images."""
    images = torch.zeros(copies_ahead.LARGE_NBYTES, dtype=torch.uint8)
    place, anchor, header = _leaves(table, torch.ones(4), images, torch.ones(5), torch.ones(6))
    batch = _sent(table, place, anchor, header)
    del anchor
    assert [tensor.untyped_storage().nbytes() for tensor in batch][:2] == [16, images.nbytes]
    assert batch[2].untyped_storage().data_ptr() == batch[3].untyped_storage().data_ptr()
    assert len(driver.copied) == 3
    assert driver.copied[1] == images.nbytes


def test_small_leaves_far_apart_are_copied_apart(driver: ScriptedDriver, table: PlaceTable) -> None:
    place, anchor, header = _leaves(table, torch.ones(4), torch.ones(4), gap=2 * PAGE_NBYTES)
    _begin(DeviceBatches(table.guard, 0), place, anchor, header)
    del anchor
    assert driver.copied == [16, 16]


def test_one_copy_takes_no_more_than_its_limit() -> None:
    rows = [Leaf(TENSOR, UINT8, place << 17, (1 << 17,)) for place in range(200)]
    plan = plan_of(b"".join(pack_row(*leaf) for leaf in rows))
    assert max(run.nbytes for run in plan.runs) == copies_ahead.MOST_RUN_NBYTES
    assert sum(len(run.places) for run in plan.runs) == 200


def test_plans_of_many_shapes_are_not_kept(driver: ScriptedDriver, table: PlaceTable) -> None:
    """They would be hundreds of MB, and shapes that differ from batch to batch do not come again."""
    plan_of.cache_clear()
    way_of.cache_clear()
    for leaves in (10, 1500):
        place, anchor, header = _leaves(table, *map(torch.ones, range(leaves)))
        batch = _sent(table, place, anchor, header)
        del anchor
        driver.drain()
        assert [len(tensor) for tensor in batch] == list(range(leaves))
    assert plan_of.cache_info().currsize == way_of.cache_info().currsize == 1


def test_arrays_stay_and_are_guarded(driver: ScriptedDriver, table: PlaceTable) -> None:
    """The program may begin copies of them itself."""
    place, anchor, header = _leaves(table, torch.ones(4), torch.arange(4), kinds=(TENSOR, ARRAY))
    tensor, array = _sent(table, place, anchor, header)
    del anchor
    assert type(array) is np.ndarray
    driver.drain()
    table.collect()
    assert place.state is PlaceState.LEASED
    assert array.tolist() == [0, 1, 2, 3]
    driver.launch(0, lambda: None)
    del array
    table.collect()
    assert place.state is PlaceState.GUARDED
    assert torch.equal(tensor, torch.ones(4))


def test_a_slot_that_was_sent_is_guarded_the_next_time(driver: ScriptedDriver, table: PlaceTable) -> None:
    """One batch needs no guard for its lease; the slot's next one does."""
    place, anchor, header = _leaves(table, torch.ones(4))
    _begin(DeviceBatches(table.guard, 0), place, anchor, header)
    del anchor
    driver.drain()
    table.collect()
    again, anchor, _ = _leaves(table, torch.ones(4))
    assert again is place
    driver.read_late(0, anchor.ctypes.data, 1, 0)
    del anchor
    table.collect()
    assert place.state is PlaceState.GUARDED


def test_a_spilled_batch_is_not_sent_and_leaves_the_slot_guarded(
    driver: ScriptedDriver, table: PlaceTable
) -> None:
    """Its place holds another batch by now. A copy of memory that is not locked would wait for the device."""
    place, anchor, header = _leaves(table, torch.ones(4))
    private = anchor.copy()
    assert _begin(DeviceBatches(table.guard, 0), place, private, header) is None
    assert driver.copied == []
    assert not table.guard._let_go


def test_a_batch_whose_slot_is_not_locked_is_not_sent(driver: ScriptedDriver, table: PlaceTable) -> None:
    driver.refuse = 1
    place, anchor, header = _leaves(table, torch.ones(4))
    assert _begin(DeviceBatches(table.guard, 0), place, anchor, header) is None
    assert driver.copied == []


def _use_memory_meanwhile(driver: ScriptedDriver) -> None:
    """Let the program write to new memory before the copies are done: they must go to another place."""
    tensor = driver.allocate((16,), torch.uint8, 0)
    tensor.fill_(9)
    driver.drain()
    assert tensor.tolist() == [9] * 16


def test_memory_of_a_batch_that_nobody_takes_is_kept_for_its_copy(
    driver: ScriptedDriver, table: PlaceTable
) -> None:
    """Otherwise the copy would overwrite the program's next tensor."""
    place, anchor, header = _leaves(table, torch.ones(4))
    _begin(DeviceBatches(table.guard, 0), place, anchor, header)
    del anchor
    _use_memory_meanwhile(driver)
    table.collect()
    copied_to = driver.allocate((16,), torch.uint8, 0)
    assert copied_to.view(torch.float32).tolist() == [1] * 4  # it is used again after the copy


def test_memory_is_kept_for_copies_that_an_interrupt_has_left_alone(
    driver: ScriptedDriver, table: PlaceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = driver.copy

    def interrupted(*arguments: int) -> None:
        copy(*arguments)
        raise KeyboardInterrupt

    place, anchor, header = _leaves(table, torch.ones(4))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driver, "copy", interrupted)
        _begin(DeviceBatches(table.guard, 0), place, anchor, header)
    del anchor
    _use_memory_meanwhile(driver)
    table.collect()
    driver.drain()
    table.collect()
    assert place.state is PlaceState.FREE


def test_an_interrupt_counts_more_than_what_fails_after_it(
    driver: ScriptedDriver, table: PlaceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: int) -> None:
        driver.failed = True
        raise KeyboardInterrupt

    place, anchor, header = _leaves(table, torch.ones(4))
    monkeypatch.setattr(driver, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _begin(DeviceBatches(table.guard, 0), place, anchor, header)
    driver.failed = False


def test_where_no_event_can_be_recorded_nothing_waits_for_one(
    driver: ScriptedDriver, table: PlaceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are copied then, without a second's wait for each."""
    record, calls = driver.record, []

    def fail_at_the_second(stream: int, device: int) -> Event:
        calls.append(stream)
        if len(calls) == 2:
            raise DriverError("cuEventCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)", 2)
        return record(stream, device)

    place, anchor, header = _leaves(table, torch.ones(4))
    monkeypatch.setattr(driver, "record", fail_at_the_second)
    with pytest.raises(DriverError):
        _begin(DeviceBatches(table.guard, 0), place, anchor, header)
    assert not table.guard.is_busy()


class Point(NamedTuple):
    x: object
    y: object


def test_batches_with_classes_of_their_own_move_themselves(table: PlaceTable) -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    header = join_header([pickle.dumps(Point(1, 2))], [])
    place, anchor, _ = _leaves(table, torch.ones(4))
    assert _begin(DeviceBatches(table.guard, 0), place, anchor, header) is None
    calls = []

    class Own:
        def to(self, device: torch.device, non_blocking: bool = False) -> str:
            calls.append((device, non_blocking))
            return "moved"

    class Old:
        def to(self, device: torch.device) -> str:
            calls.append((device, None))
            return "moved too"

    device = torch.device("meta")
    batch = to_device(
        {"p": Point(torch.ones(1), "x"), "own": [Own(), Old()], "packed": packed, "n": range(2), "b": b""},
        device,
    )
    assert batch["own"] == ["moved", "moved too"]
    assert calls == [(device, True), (device, None)]
    assert batch["p"].x.device.type == "meta"
    assert batch["p"].y == "x"
    assert (batch["n"], batch["b"]) == ([0, 1], b"")
    assert batch["packed"].data.device.type == "meta"
    assert batch["packed"].batch_sizes.device.type == "cpu"


def test_what_is_plain() -> None:
    tensor = torch.ones(2)
    assert is_plain({"a": [tensor, (1, "x", None, np.ones(2))], "b": {}})
    others = (
        Point(tensor, tensor),
        torch.nn.Parameter(tensor),
        tensor.to_sparse(),
        tensor.to("meta"),
        object(),
    )
    assert not any(map(is_plain, others))
