"""Random collate functions, run through slots in this process with placement and without.

A program is a text of random statements: torch's calls that may be placed, and all that programs do with
their results (change, view, keep, resize, throw away, convert, raise in the middle). Each is compiled, so
that each call has a place of its own in the code.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.codec import Decoder, Encoder
from shmloader.codec.slot_allocator import SlotAllocator, set_current_allocator
from shmloader.failures.bad_samples import Report
from shmloader.memory import Segment
from shmloader.worker.placement import Placement

BATCHES = 9
SLOT_NBYTES, MOST_NBYTES = 1 << 16, 1 << 26

# {a}, {b}: variables with a tensor; {n}: a small number; {d}: a dtype. `images` are tensors of one shape,
# `rows` tensors of several lengths, `arrays` NumPy's; `kept` lives from batch to batch.
MAKE = (
    "torch.stack(images)",
    "torch.stack(images)",
    "torch.stack(images, {n} % 3)",
    "torch.stack(tuple(images), dim=-1)",
    "torch.stack([image.T for image in images])",
    "torch.stack([image.to({d}) for image in images])",
    "torch.stack([image[None].to(memory_format=torch.channels_last) for image in many_channels])",
    "torch.stack([images[0], images[1].double()])",
    "torch.stack([image.clone().requires_grad_(image.is_floating_point()) for image in images])",
    "torch.stack(images, out=torch.empty(0, dtype=images[0].dtype))",
    "torch.cat(images)",
    "torch.cat([image[None] for image in images], 0)",
    "torch.cat(rows)",
    "torch.cat([many[None].to(memory_format=torch.channels_last) for many in many_channels])",
    "torch.cat([many_channels[0][None], many_channels[1][None].to(memory_format=torch.channels_last)])",
    "torch.stack([images[0], *(image.T.contiguous().T for image in images[1:])])",
    "torch.stack([images[0], *(one.clone().requires_grad_(one.is_floating_point()) for one in images)])",
    "torch.cat(images, dim=1)",
    "torch.concat(images, -1)",
    "torch.zeros(len(images), *images[0].shape)",
    "torch.zeros((len(images), 40, 40), dtype={d})",
    "torch.zeros(size=(len(images), 40, 40))",
    "torch.ones([len(images), 1600], dtype={d})",
    "torch.full((len(images), 40, 50), {n})",
    "torch.full((len(images), 40, 50), -1.5, dtype={d})",
    "torch.empty(len(images), 40, 40).fill_({n})",
    "torch.empty((len(images), 40, 40), dtype={d}).zero_()",
    "images[0].new_zeros(len(images), 40, 40)",
    "images[0].new_full((len(images), 2000), {n})",
    "images[0].new_ones((len(images), 40, 40), dtype={d})",
    "images[0].new_empty((len(images), 1600)).copy_(torch.stack(images).flatten(1))",
    "torch.tensor(np.stack(arrays))",
    "torch.tensor(np.stack(arrays).T)",
    "torch.tensor(np.array(arrays), dtype={d})",
    "torch.tensor(np.stack(arrays).astype('>f4'))",
    "torch.from_numpy(np.stack(arrays))",
    "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)",
    "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value={n})",
    "torch.nn.utils.rnn.pad_sequence(rows)",
    "torch.nn.utils.rnn.pad_sequence(rows, True, 0.5, 'left')",
    "torch.index_select(torch.cat(images), 0, torch.arange(60))",
    "torch.cat(images)[torch.arange(50)]",
    "default_collate(images)",
    "images[0].untyped_storage()._new_shared(len(images) * 6400)",
    "joined_by(torch.stack, images)",
    "captured_stack(images)",
)
CHANGE = (
    "{a}.add_({n})",
    "{a}[0] = {n}",
    "{a} *= 2",
    "{a} = {a}.float()",
    "{a} = {a} / 2",
    "{a} = {a}.clone()",
    "{a} = {a}.contiguous()",
    "{a} = {a}[1:]",
    "{a} = {a}[..., ::2]",
    "{a} = {a}.transpose(0, -1)",
    "{a} = {a}.reshape(-1)",
    "{a} = {a}[:, None]",
    "{a} = {a}.view(-1)[:100]",
    "{a}.resize_({n} + 1, 30000).fill_({n})",
    "{a}.resize_(2, 3)",
    "{a}.resize_as_({b}).fill_(1)",
    "if number > 4: {a}.resize_({n} + 1, 90000).fill_({n})",
    "if number > 5: {a}.untyped_storage().resize_(2 * {a}.untyped_storage().nbytes()).fill_(0)",
    "number > 4 and kept and kept[-1].resize_(200, 300).fill_(1)",
    "number > 4 and kept and torch.resize_as_(kept[0], {a}).fill_(1)",
    "{a}_alias = {a}.view(-1); {a}.resize_(300, 300).fill_(3); {a}_alias[:5] = 7",
    "{a}.numpy()[...] = {n}",
    "{a} = {a}.numpy()",
    "{a} = [{a}, {a}]",
    "{a} = ({a}, {b})",
    "{a} = copy.deepcopy({a})",
    "{a} = {a}.requires_grad_()",
    "{a} = torch.nn.Parameter({a}, requires_grad=False)",
    "{a} = list({a}.unbind())",
    "{a} = {a}.share_memory_().clone()",  # torch itself crashes if a shared tensor is resized
    "{a} = {a}.untyped_storage()",
    "{a} = torch.empty(0, dtype=torch.uint8).set_({a}.untyped_storage())",
    "kept.append({a})",
    "kept[:] = [{a}]",
    "kept and kept[-1].mul_(2)",
    "{a} = {b}",
    "{a} = None",
    "torch.add({b}, 1, out={b})",
    "torch.stack(images, out={a})",
    "torch.mul(torch.ones(90000), 2, out={a})",
    "if number == {n}: raise ValueError(f'number {{number}}')",
    "if number % 2: {a} = {a}[:1]",
    "if number % 3: {a} = torch.stack(images)",
    "if number == 6: images = images[:-1]",
    "{a} = pickle.loads(pickle.dumps({a}))",
    "functions.append(torch.stack); {a} = pickle.loads(pickle.dumps(functions))[0](images)",
    "{a} = functions[-1](images) if functions else {a}",
)
# What NumPy joins; and what programs do with it. A tensor that torch makes over such an array can be resized
# with placement, where torch raises; so none is.
MAKE_ARRAYS = (
    "np.stack(arrays)",
    "np.stack(arrays)",
    "np.stack(arrays, axis=0)",
    "np.stack(tuple(arrays), {n} % 3)",
    "np.stack(arrays, -1)",
    "np.stack(arrays, axis=0.0)",
    "np.stack([array.T for array in arrays])",
    "np.stack([array[:, ::2] for array in arrays])",
    "np.stack([array[None] for array in arrays])",
    "np.stack([array[:, None] for array in arrays])",
    "np.stack([np.asfortranarray(array) for array in arrays])",
    "np.stack([array.astype(('i4', 'f8', '>f4', 'c8', '?', 'u2', 'f2')[{n}]) for array in arrays])",
    "np.stack([arrays[0], *(array.astype('f8') for array in arrays[1:])])",
    "np.stack([arrays[0], *(array[:-1] for array in arrays[1:])])",
    "np.stack(arrays, dtype='f8')",
    "np.stack(arrays, out=np.empty((len(arrays), 40, 40), 'f4'))",
    "np.stack([array.view(Named) for array in arrays])",
    "np.stack([Passed(array) for array in arrays])",
    "np.stack(arrays=[Passed(array) for array in arrays])",
    "np.stack(axis=0, arrays=[Passed(array) for array in arrays])",
    "np.stack(axis=0, arrays=arrays)",
    "np.stack([image.numpy() for image in images])",
    "np.stack(images)",
    "np.stack([1.5] * 20000)",
    "np.concatenate(arrays)",
    "np.concatenate([array[: 20 + place % 9] for place, array in enumerate(arrays)])",
    "np.concatenate(arrays, axis=1)",
    "np.concatenate(arrays, None)",
    "np.concatenate([array[None] for array in arrays])",
    "np.array(arrays)",
    "np.array(tuple(arrays))",
    "np.array(arrays, dtype='f8')",
    "np.array(arrays, order='F')",
    "np.array([array.reshape(-1) for array in arrays])",
    "np.array([array.tolist() for array in arrays])",
    "np.array(arrays[0].repeat(20, axis=0))",
    "joined_by(np.stack, arrays)",
    "captured_np_stack(arrays)",
)
CHANGE_ARRAYS = (
    "{a}[0] = {n}",
    "{a} *= 2",
    "{a} = {a} / 2",
    "{a} = {a}.astype('f4')",
    "{a} = torch.from_numpy({a})",
    "{a} = torch.from_numpy({a}).float()",
    "{a} = torch.as_tensor({a})",
    "{a} = torch.tensor({a})",
    "{a} = torch.from_numpy({a}).permute(0, 2, 1)",
    "{a} = torch.from_numpy({a}).div_(3)",
    "{a} = np.ascontiguousarray({a})",
    "{a} = {a}.transpose()",
    "{a} = {a}[1:]",
    "{a} = {a}[..., ::2]",
    "{a} = {a}.view(Named)",
    "{a}.flags.writeable = False",
    "{a}.shape = -1",
    "{a} = memoryview({a})",
    "{a} = {a}.tobytes()",
    "{a} = copy.deepcopy({a})",
    "kept.append({a})",
    "kept[:] = [{a}]",
    "if number > 4 and kept: kept[-1][...] = {n}",
    "{a} = {b}",
    "{a} = None",
    "np.stack(arrays, out={a})",
    "np.add({b}, 1, out={b})",
    "if number == {n}: raise ValueError(f'number {{number}}')",
    "if number % 3: {a} = np.stack(arrays)",
    "if number == 6: arrays = arrays[:-1]",
    "{a} = pickle.loads(pickle.dumps({a}))",
    "functions.append(np.stack); {a} = pickle.loads(pickle.dumps(functions))[0](arrays)",
    "{a} = functions[-1](arrays) if functions else {a}",
)
AROUND = ("torch.no_grad()", "torch.inference_mode()", "torch.device('cpu')", "torch.autocast('cpu')")
RETURN = (
    "{a}",
    "[{a}, {b}]",
    "{{'a': {a}, 'b': {b}}}",
    "({a}, number)",
    "[{a}, {a}]",
    "({a}, {a}[1:], {b})",
    "[{a}[0], {b}, {a}]",
    "{{'a': {b}, 'rows': rows}}",
)
DTYPES = (
    "torch.uint8",
    "torch.int64",
    "torch.float16",
    "torch.bfloat16",
    "torch.float32",
    "torch.bool",
    "torch.complex64",
)

captured_stack = torch.stack
captured_np_stack = np.stack


class Named(np.ndarray[Any, Any]):
    """An array of a class of its own."""


class Passed:
    """An object to which NumPy passes calls on, and which looks at the function's name."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array_function__(self, function: Any, _: Any, arguments: Any, named: Any) -> Any:
        if function is not np.stack:
            raise TypeError(f"{function} is another function than {np.stack}")
        return function([one.array for one in arguments[0]], **named)


def joined_by(function: Callable[..., Any], parts: list[Any]) -> Any:
    return function(parts)


def program_text(seed: int) -> str:
    """The source of a function ``collate(number, images, rows, arrays, many_channels, kept, functions)``."""
    choose = random.Random(seed)
    make, change = (MAKE_ARRAYS, CHANGE_ARRAYS) if seed % 4 == 3 else (MAKE, CHANGE)

    def filled(template: str) -> str:
        a, b = choose.choice(names), choose.choice(names)
        return template.format(a=a, b=b, n=choose.randrange(6), d=choose.choice(DTYPES))

    names: list[str] = []
    lines = ["def collate(number, images, rows, arrays, many_channels, kept, functions):"]
    for _ in range(choose.randint(1, 4)):
        name = f"x{len(names)}"
        lines.append(
            f"    {name} = " + choose.choice(make).format(n=choose.randrange(6), d=choose.choice(DTYPES))
        )
        if choose.random() < 0.12:
            lines[-1] = f"    with {choose.choice(AROUND)}: {lines[-1].strip()}"
        names.append(name)
        lines += [f"    {filled(choose.choice(change))}" for _ in range(choose.choice((0, 0, 0, 1, 1, 2)))]
    lines.append(f"    return {filled(choose.choice(RETURN))}")
    return "\n".join(lines)


def run_program(seed: int, *, places: bool) -> list[Any]:
    """The program's batches and errors on the other side of a slot, and what it has kept at its end."""
    names: dict[str, Any] = {
        "captured_stack": captured_stack,
        "captured_np_stack": captured_np_stack,
        "joined_by": joined_by,
        "Named": Named,
        "Passed": Passed,
        "default_collate": default_collate,
    }
    names |= {"torch": torch, "np": np, "copy": __import__("copy"), "pickle": __import__("pickle")}
    exec(compile(program_text(seed), f"<program {seed}>", "exec"), names)
    program, kept, functions = names["collate"], [], []
    torch.manual_seed(seed)
    segment = Segment()
    allocator = SlotAllocator(segment)
    placement = Placement(allocator, is_on=places)
    collate = placement.around(lambda samples: program(*samples, kept, functions))
    outcomes: list[Any] = []
    slots, hint = {0: 0, 1: 0}, 0
    try:
        for number in range(BATCHES):
            slot = number % 2
            slots[slot] = slots[slot] or segment.reserve(slot, 0, SLOT_NBYTES)
            allocator.begin(slot, slots[slot], MOST_NBYTES, hint)
            samples = _samples(number)
            set_current_allocator(allocator)
            try:
                batch = collate(samples)
                batch = placement.with_news(batch) if placement.has_news else batch
            except Exception as error:
                outcomes.append((type(error), str(error)))
                placement.drop()
                allocator.restart()
                continue
            finally:
                set_current_allocator(None)
            if type(batch) is Report:
                batch = batch.batch
            leaves: list[tuple[int, int]] | None = [] if placement.is_on else None
            try:
                encoded = Encoder(allocator).encode(batch, leaves)
            except Exception as error:
                outcomes.append((type(error), str(error).split(" at 0x")[0]))
                placement.drop()
                del error
                allocator.restart()
                continue
            finally:
                del batch
            assert encoded.spilled is None
            if leaves is not None:
                placement.settle(leaves, encoded.header_end)
            hint = encoded.header_end
            header = bytes(allocator.view()[encoded.header_begin : encoded.header_end])
            if allocator.release():
                placement.note_kept()
            slots[slot] = allocator.nbytes
            extent = segment.map(slot, allocator.nbytes)
            arrived = Decoder().decode(np.ndarray(extent.nbytes, np.uint8, extent.buffer), header)
            outcomes.append(description(arrived))
            _write(arrived)  # which is to change no other leaf, wherever both lie
            outcomes.append(description(arrived))
            del arrived, extent
            # Another batch is written over it: what the program keeps must survive that.
            overwritten = segment.map(slot, slots[slot])
            np.ndarray(overwritten.nbytes, np.uint8, overwritten.buffer)[:] = 0xDB
        return [*outcomes, ("kept", description(list(kept)))]
    finally:
        allocator.close()


def _write(batch: Any) -> None:
    """Change the first leaf of a batch in place."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    with contextlib.suppress(RuntimeError, ValueError):  # expanded, read-only, or without memory
        if isinstance(batch, torch.Tensor):
            batch.detach().fill_(3)
        elif isinstance(batch, np.ndarray):
            batch[...] = 3


def _samples(number: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(number)
    images = [torch.rand(40, 40, generator=generator) for _ in range(48)]
    rows = [torch.arange(300 + 37 * ((place + number) % 11)) for place in range(48)]
    arrays = [np.full((40, 40), place + number, np.float32) for place in range(48)]
    many_channels = [torch.rand(3, 20, 20, generator=generator) for _ in range(40)]
    return number, images, rows, arrays, many_channels


def description(item: Any) -> Any:
    """Everything that a program can see of a value: class, dtype, shape, strides, gradient, bytes."""
    if isinstance(item, torch.Tensor):
        if item.untyped_storage().nbytes() < item.numel() * item.element_size():
            return "torch raised while it was resized, and left it without memory"
        values = item.detach().contiguous().view(-1)
        octets = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
        facts = (
            type(item),
            item.dtype,
            tuple(item.shape),
            item.stride(),
            item.requires_grad,
            item.is_inference(),
        )
        return (*facts, octets)
    if isinstance(item, np.ndarray):
        return type(item), item.dtype.str, item.shape, item.strides, item.flags.writeable, item.tobytes()
    if isinstance(item, (list, tuple)):
        return type(item), [description(part) for part in item]
    if isinstance(item, dict):
        return {key: description(part) for key, part in item.items()}
    if isinstance(item, torch.TypedStorage):
        return type(item), item.dtype, description(item.untyped())
    if isinstance(item, torch.UntypedStorage):
        return type(item), torch.empty(0, dtype=torch.uint8).set_(item).numpy().tobytes()
    return item


def differences(seed: int) -> str:
    """What placement changes for a program; empty if nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, placed = run_program(seed, places=False), run_program(seed, places=True)
    for number, (expected, got) in enumerate(zip(plain, placed, strict=True)):
        if expected != got:
            return (
                f"batch {number} of program {seed}:\n{program_text(seed)}\n{_short(expected)}\n{_short(got)}"
            )
    return ""


def _short(outcome: Any) -> str:
    return repr(outcome)[:600]
