"""Batches for a CUDA device: are they right, and how fast do they come?

Run from a checkout, on a machine with a GPU:

    python -m benchmarks.device [--part NAME]... [--workers N] [--seconds S] [--json FILE]

The parts, all of them by default:

* guard: pinned batches are copied on a busy side stream without waiting, dropped, and the next one is taken;
  also around graph captures, in this thread and in another one. Every batch is compared on the device.
* guard-off: the same with slots granted again at once. It has to show wrong batches, or `guard` is no proof.
* copy: batches of 64, 8 and 1 MB, with ``device="cuda"`` and pinned, second by second, relative to a plain
  ``copy_`` of a pinned tensor in a loop; page faults of the workers, and memory registered or given back.
* torch: the same batches, beside torch's loader with ``pin_memory=True``: throughput, and processor time.
* calls: what the guard asks the driver: is a graph captured, and an event behind all work; on an idle device
  and beside copies.
* leaves: batches of 500 small tensors, beside torch's; and with one copy for each tensor.
* resnet: training ResNet-18 on uint8 images: how much longer a step takes than on a batch that is on the
  device.
* leak: 1,000 loaders, one after the other: memory that stays registered, mapped, or allocated.

Workers stamp a batch with its number, once in each 4,096 bytes, and otherwise leave the memory as it is. So
`copy` and `torch` measure the transport of the bytes, not how fast workers can write them. Exit status: 0 if
all is as it should be, 1 if not, 2 if there is no CUDA device, 3 if results could not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import resource
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import psutil
import torch

import shmloader
from benchmarks import device_copies
from benchmarks.machine import CpuMeter, describe, describe_in_words
from benchmarks.made_data import Numbers
from benchmarks.options import NOT_MEASURED, NOT_WRITTEN, finite_number, whole_number
from benchmarks.resnet import resnet18
from benchmarks.result_files import result_file, write_json
from benchmarks.tables import render_table

PAGE = 4096
STAMPS = 251  # batches are told apart by their number modulo this prime
GUARDED_BATCHES = 1000
LOADERS = 1000
LEAVES = 500
MOST_WARM_UPS = 50


class Figure(NamedTuple):
    """One line of the result.

    Attributes:
        part: The part that it belongs to.
        what: Name of the measurement.
        value: The figure; NaN if it could not be measured, which is null in JSON.
        unit: Its unit.
        good: Whether it reaches its target; None if it has none.
    """

    part: str
    what: str
    value: float
    unit: str
    good: bool | None = None


def shared_empty(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a batch in a worker of torch's loader, which sends it without a copy.

    Torch's ``default_collate`` stacks samples in such memory.
    """
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # noqa: SLF001
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


class Stamped:
    """A collate function: a batch of `nbytes` bytes, stamped with its number."""

    def __init__(self, nbytes: int, *, in_slot: bool = True) -> None:
        self.nbytes = nbytes
        self.in_slot = in_slot

    def __call__(self, samples: list[int]) -> torch.Tensor:
        make = shmloader.empty if self.in_slot else shared_empty
        batch: torch.Tensor = make((self.nbytes,), dtype=torch.uint8)
        batch[::PAGE] = samples[0] % STAMPS
        return batch


class Small:
    """A collate function: a dict of small float32 tensors."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves

    def __call__(self, samples: list[int]) -> dict[str, torch.Tensor]:
        return {str(leaf): torch.full((16, 4), float(samples[0])) for leaf in range(self.leaves)}


class Images:
    """A collate function: uint8 images of 3 x 224 x 224, and labels."""

    def __init__(self, *, in_slot: bool = True) -> None:
        self.in_slot = in_slot

    def __call__(self, samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        make = shmloader.empty if self.in_slot else shared_empty
        images = make((len(samples), 3, 224, 224), dtype=torch.uint8)
        images.view(-1)[::PAGE] = samples[0] % STAMPS
        return images, torch.tensor(samples) % 1000


def make(kind: Any, batches: int, collate: Callable[..., Any], workers: int, **options: Any) -> Any:
    """A loader whose batches have one sample each, unless `batch_size` is given."""
    size = options.pop("batch_size", 1)
    return kind(Numbers(batches * size), batch_size=size, num_workers=workers, collate_fn=collate, **options)


def wrong_batches(workers: int, batches: int, nbytes: int, *, guarded: bool, captures: bool) -> int:
    """Copies pinned batches on a busy side stream and drops them; counts those with wrong bytes."""
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    capturing = _Captures() if captures else None
    begins = contextlib.nullcontext() if capturing is None else capturing.begins
    with make(shmloader.DataLoader, batches, Stamped(nbytes), workers, pin_memory=True) as loader:
        iterator = iter(loader)
        if not guarded:
            leave_unguarded(iterator.table)
        for number in range(batches):  # not to the end: that would close the table while copies are queued
            with begins:
                batch = next(iterator)
            if not batch.is_pinned():
                raise RuntimeError(f"batch {number} is not pinned: see what the loader has warned of")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)  # noqa: SLF001 - a kernel that keeps the stream busy
                copied = batch.to("cuda", non_blocking=True)
                wrong += (copied[::PAGE] != number % STAMPS).any()
                copied.record_stream(side)
            del batch, copied
            if capturing is not None and number % 50 == 0:
                capturing.capture(in_thread=number % 100 == 0)
        torch.cuda.synchronize()
    if capturing is not None:
        capturing.replay()
    return int(wrong)


def leave_unguarded(table: Any) -> None:
    """Make a table grant its places again as soon as their leases have ended."""
    table.guard.pass_on = lambda ended, at_once: ended


class _Captures:
    """Captures small graphs, in this thread or another one that runs beside it, and replays all at the end.

    Attributes:
        begins: A lock, held while a capture begins; hold it around ``next()`` (see docs/gpu.md).
    """

    def __init__(self) -> None:
        self.begins = threading.Lock()
        self._value = torch.ones(1000, device="cuda")
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []

    def capture(self, *, in_thread: bool) -> None:
        """Capture one."""
        if in_thread:
            self._threads.append(threading.Thread(target=self._capture, args=(0.05,)))
            self._threads[-1].start()
        else:
            for thread in self._threads:  # torch captures one graph at a time
                thread.join()
            self._capture(0.0)

    def _capture(self, open_s: float) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with contextlib.ExitStack() as stack:
                with self.begins:
                    stack.enter_context(torch.cuda.graph(graph, capture_error_mode="thread_local"))
                self._value.mul_(2)
                time.sleep(open_s)
                self._value.mul_(0.5)
        except Exception as error:  # noqa: BLE001 - raised by `replay`, also a thread's
            self._errors.append(error)
        self._graphs.append(graph)

    def replay(self) -> None:
        """Replay all; raises if one is invalid, or if a capture failed."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        for graph in self._graphs:
            graph.replay()
        torch.cuda.synchronize()


def guard(arguments: argparse.Namespace, *, guarded: bool = True) -> Iterator[Figure]:
    """See the module: `guard` and `guard-off`."""
    part = "guard" if guarded else "guard-off"
    for captures in (False, True) if guarded else (False,):
        wrong = wrong_batches(
            min(arguments.workers, 8), GUARDED_BATCHES, 8 << 20, guarded=guarded, captures=captures
        )
        what = f"wrong batches of {GUARDED_BATCHES:,}{', around graph captures' if captures else ''}"
        yield Figure(part, what, wrong, "", wrong == 0 if guarded else wrong > 0)


def rate_of(batches: Iterable[Any], seconds: float, step: Callable[[Any], object]) -> tuple[float, float]:
    """Batches per second, and processor time per batch of all processes, after the last slot was page-locked.

    The further the device is behind, the more slots come into use; each is page-locked at its first use.
    """
    from shmloader.device import pinned

    iterator, locked_nbytes = iter(batches), -1
    for _ in range(MOST_WARM_UPS):
        if locked_nbytes == pinned.pinned_nbytes():
            break
        locked_nbytes = pinned.pinned_nbytes()
        for batch in itertools.islice(iterator, 20):
            step(batch)
    torch.cuda.synchronize()
    meter, began_s, count = CpuMeter(), time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        step(next(iterator))
        count += 1
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    return count / took_s, meter.read()[0] / count


def keep(batch: Any) -> None:
    """A step that does nothing: the batch is on the device already."""


def to_cuda(batch: Any) -> Any:
    """The step with torch's loader: every tensor is copied without waiting."""
    if isinstance(batch, dict):
        return {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
    return batch.to("cuda", non_blocking=True)


def in_turns(
    turns: int, contests: dict[str, Callable[[], tuple[float, float]]]
) -> dict[str, tuple[float, float]]:
    """Runs all in turn, several times; the medians of their results.

    A contest that raises has NaN for its result, and the others go on: torch's loader needs a large /dev/shm
    and many open files.
    """
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contests}
    failed: set[str] = set()
    for turn in range(turns):
        for name in sorted(contests.keys() - failed, reverse=bool(turn % 2)):
            try:
                runs[name].append(contests[name]())
            except Exception:  # noqa: BLE001 - any loader may raise anything
                traceback.print_exc()
                print(f"{name} has failed, see above", file=sys.stderr)
                failed.add(name)
                runs[name] = [(math.nan, math.nan)]
    return {
        name: (statistics.median(one for one, _ in found), statistics.median(two for _, two in found))
        for name, found in runs.items()
    }


def measured(
    kind: Any,
    collate: Callable[..., Any],
    workers: int,
    seconds: float,
    step: Callable[[Any], object],
    **options: Any,
) -> tuple[float, float]:
    """The rate of one loader; see `rate_of`."""
    loader = make(kind, 1 << 30, collate, workers, **options)
    try:
        return rate_of(loader, seconds, step)
    finally:
        if kind is shmloader.DataLoader:
            loader.close()


def copy(arguments: argparse.Namespace) -> Iterator[Figure]:
    """See the module."""
    for figure in device_copies.copy(arguments, Stamped):
        yield Figure("copy", *figure)


def torchs(arguments: argparse.Namespace) -> Iterator[Figure]:
    """See the module: `torch`."""
    nbytes, workers, seconds = 64_000_000, min(arguments.workers, 8), arguments.seconds
    ours = functools.partial(measured, shmloader.DataLoader, Stamped(nbytes), workers, seconds)
    theirs = functools.partial(
        measured, torch.utils.data.DataLoader, Stamped(nbytes, in_slot=False), workers, seconds
    )
    rates = in_turns(
        3,
        {
            "shmloader device='cuda'": lambda: ours(keep, device="cuda"),
            "shmloader pin_memory=True": lambda: ours(to_cuda, pin_memory=True),
            "torch pin_memory=True": lambda: theirs(to_cuda, pin_memory=True),
        },
    )
    for name, (rate, cpu_s) in rates.items():
        yield Figure("torch", name, rate, "batches/s")
        yield Figure("torch", name, cpu_s * 1e3, "ms of processor time per batch")
    (ours_rate, ours_cpu_s), _, (rate, cpu_s) = rates.values()
    yield Figure("torch", "throughput, times torch", ours_rate / rate, "", ours_rate >= 3 * rate)
    yield Figure(
        "torch", "processor time, of torch's", 100 * ours_cpu_s / cpu_s, "%", 3 * ours_cpu_s <= cpu_s
    )


def calls(arguments: argparse.Namespace) -> Iterator[Figure]:
    """See the module."""
    from shmloader.device.driver import CudaDriver, open_driver

    driver = open_driver()
    if not isinstance(driver, CudaDriver):
        raise TypeError(driver)
    for figure in device_copies.calls(driver, arguments.seconds):
        yield Figure("calls", *figure)


def leaves(arguments: argparse.Namespace) -> Iterator[Figure]:
    """See the module."""
    from shmloader.device import copies_ahead

    workers, seconds, collate = min(arguments.workers, 8), arguments.seconds, Small(LEAVES)

    def forget() -> None:
        copies_ahead.way_of.cache_clear()
        copies_ahead.plan_of.cache_clear()

    def ours(large_nbytes: int) -> tuple[float, float]:
        before, copies_ahead.LARGE_NBYTES = copies_ahead.LARGE_NBYTES, large_nbytes
        forget()
        try:
            return measured(shmloader.DataLoader, collate, workers, seconds, keep, device="cuda")
        finally:
            copies_ahead.LARGE_NBYTES = before
            forget()

    torch_loader = torch.utils.data.DataLoader
    rates = in_turns(
        3,
        {
            "one copy": lambda: ours(copies_ahead.LARGE_NBYTES),
            "one copy per leaf": lambda: ours(0),
            "torch": lambda: measured(torch_loader, collate, workers, seconds, to_cuda, pin_memory=True),
        },
    )
    for name, (rate, _) in rates.items():
        yield Figure("leaves", f"{LEAVES} leaves, {name}", rate, "batches/s")
    ratio = rates["one copy"][0] / rates["torch"][0]
    yield Figure("leaves", "times torch", ratio, "", ratio >= 10)


def pinned_ring(batches: Iterable[Any], size: int = 4) -> Iterator[Any]:
    """Batches through a ring of pinned memory, copied on a stream of its own, as DALI does."""
    stream = torch.cuda.Stream()
    ring: list[Any] = [None] * size
    events = [torch.cuda.Event() for _ in ring]
    waiting: list[Any] = []
    for number, batch in enumerate(batches):
        place = number % size
        events[place].synchronize()
        if ring[place] is None:
            ring[place] = [tensor.pin_memory() for tensor in batch]
        for memory, tensor in zip(ring[place], batch, strict=True):
            memory.copy_(tensor)
        with torch.cuda.stream(stream):
            moved = [memory.to("cuda", non_blocking=True) for memory in ring[place]]
            events[place].record(stream)
        waiting.append((moved, events[place]))
        if len(waiting) > 1:
            ready, event = waiting.pop(0)
            torch.cuda.current_stream().wait_event(event)
            for tensor in ready:
                tensor.record_stream(torch.cuda.current_stream())
            yield ready


def spdl_batches(workers: int, size: int) -> Iterable[Any] | None:
    """Batches of SPDL's loader, if that is installed; they are on the CPU."""
    from benchmarks import peers  # noqa: F401 - registers them
    from benchmarks.loaders import LOADERS as REGISTERED

    loader = REGISTERED.get("spdl-arena")
    if loader is None or loader.missing() is not None:
        return None
    batches: Iterable[Any] = loader.build(Numbers(1 << 20), size, workers, 2, collate_fn=Images())
    return batches


class Training:
    """A ResNet-18 on the device, and its step on a batch of uint8 images."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        network: Any = resnet18()  # torch does not declare memory_format for modules
        self.network = network.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9)

    def step(self, batch: Any) -> None:
        """Queue one step, without waiting for it."""
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        images = images.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(self.device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.network(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def resnet(arguments: argparse.Namespace) -> Iterator[Figure]:
    """See the module."""
    torch.backends.cudnn.benchmark = True
    workers, seconds, size = arguments.workers, arguments.seconds, 256
    training = Training()
    resident = tuple(tensor.cuda() for tensor in Images()(list(range(size))))

    def through(wrap: Callable[[Any], Any], **options: Any) -> tuple[float, float]:
        kind = options.pop("kind", shmloader.DataLoader)
        images = Images(in_slot=kind is shmloader.DataLoader)
        loader = make(kind, 1 << 20, images, workers, batch_size=size, **options)
        try:
            return rate_of(wrap(loader), seconds, training.step)
        finally:
            if kind is shmloader.DataLoader:
                loader.close()

    def same(loader: Any) -> Any:
        return loader

    torch_loader = torch.utils.data.DataLoader
    contests: dict[str, Callable[[], tuple[float, float]]] = {
        "a batch that is there": lambda: rate_of(itertools.repeat(resident), seconds, training.step),
        "shmloader device='cuda'": lambda: through(same, device="cuda"),
        "shmloader pin_memory=True": lambda: through(same, pin_memory=True),
        "shmloader, pinned ring": lambda: through(pinned_ring),
        "torch pin_memory=True": lambda: through(same, kind=torch_loader, pin_memory=True),
    }
    if (found := spdl_batches(workers, size)) is not None:
        contests["SPDL, pinned ring"] = lambda: rate_of(pinned_ring(found), seconds, training.step)
    rates = in_turns(3, contests)
    best = rates["a batch that is there"][0]
    for name, (rate, _) in rates.items():
        yield Figure("resnet", f"{name}, {workers} workers", rate * size, "images/s")
        wait = 100 * (1 - rate / best)
        good = wait < 1 if name == "shmloader device='cuda'" else None
        yield Figure("resnet", f"{name}: the loop waits", wait, "%", good)


def leak(arguments: argparse.Namespace) -> Iterator[Figure]:
    """See the module."""
    from shmloader.device import pinned

    process = psutil.Process()

    def run(loaders: int) -> tuple[int, int, int]:
        for number in range(loaders):
            option = {"device": "cuda"} if number % 2 else {"pin_memory": True}
            with make(shmloader.DataLoader, 4, Stamped(1 << 20), 1, **option) as loader:
                for batch in loader:
                    keep(batch)
            del batch
        torch.cuda.synchronize()
        return (
            process.memory_info().rss,
            torch.cuda.memory_reserved(),
            len(process.memory_maps(grouped=False)),
        )

    before = run(LOADERS // 10)
    after = run(LOADERS)
    yield Figure(
        "leak", "registered after close()", pinned.pinned_nbytes(), "bytes", not pinned.pinned_nbytes()
    )
    grown = after[0] - before[0]
    yield Figure("leak", f"growth over {LOADERS:,} loaders", grown / 1e6, "MB", grown < 20e6)
    yield Figure("leak", "growth on the device", after[1] - before[1], "bytes", after[1] == before[1])
    yield Figure("leak", "further mappings", after[2] - before[2], "", after[2] - before[2] < 10)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "guard": guard,
    "guard-off": functools.partial(guard, guarded=False),
    "copy": copy,
    "torch": torchs,
    "calls": calls,
    "leaves": leaves,
    "resnet": resnet,
    "leak": leak,
}


def figures_of(names: Iterable[str], arguments: argparse.Namespace) -> Iterator[Figure]:
    """The figures of the parts; one may fail (torch needs a large /dev/shm, say), the others continue."""
    for name in names:
        try:
            yield from PARTS[name](arguments)
        except Exception as error:  # noqa: BLE001 - any part may raise anything
            traceback.print_exc()
            yield Figure(name, f"it raised {type(error).__name__}, see above", 1, "", good=False)


def report(figures: list[Figure]) -> str:
    """The table of figures."""
    judged = {True: "yes", False: "NO", None: ""}
    rows = [[one.part, one.what, f"{one.value:,.4g} {one.unit}".strip(), judged[one.good]] for one in figures]
    return render_table([["part", "what", "measured", "as wanted"], *rows], 2)


def main() -> int:
    """Measure, and print a table; see the module for the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, metavar="NAME")
    parser.add_argument("--workers", type=whole_number(1), default=8)
    parser.add_argument("--seconds", type=finite_number(0.05), default=2.0)
    parser.add_argument("--json", type=result_file, metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was measured", file=sys.stderr)
        return NOT_MEASURED
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # torch sends each tensor as a file
    print(f"{torch.cuda.get_device_name()}\n{describe_in_words(describe())}")
    figures: list[Figure] = []
    for part in arguments.part or PARTS:
        for figure in figures_of([part], arguments):
            print(report([figure]).splitlines()[-1], flush=True)
            figures.append(figure)
        rows = [[None if item != item else item for item in one] for one in figures]  # noqa: PLR0124 - JSON has no NaN
        results = {"device": torch.cuda.get_device_name(), "machine": describe(), "figures": rows}
        if arguments.json is not None and not write_json(arguments.json, results):  # after each part
            return NOT_WRITTEN
    print(report(figures))
    return int(any(one.good is False for one in figures))


if __name__ == "__main__":
    sys.exit(main())
