"""What an object costs from one process to another: `shmloader.Queue`, torch's queue, a pipe, and others.

Run with `python -m benchmarks.queues`; with `--peers` also iceoryx2 and Ray, where they are installed. The
producer makes each object anew from one that it keeps: a tensor that torch's queue has moved to shared memory
before would cost it nothing more. The transports take turns.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import shmloader
from benchmarks import queue_peers
from benchmarks.options import whole_number
from benchmarks.queue_objects import KINDS, MAXSIZE, WARM, Kind

Ends = tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], Any]]  # put, get, close


def ours() -> Ends:
    queue = shmloader.Queue(MAXSIZE)
    return queue.put, queue.get, queue.close


def torchs() -> Ends:
    queue: Any = torch.multiprocessing.Queue(MAXSIZE)
    return queue.put, queue.get, queue.close


def pipe() -> Ends:
    reader, writer = torch.multiprocessing.Pipe(duplex=False)
    return writer.send, reader.recv, reader.close


def produce(kind: Kind, put: Callable[[Any], None], made_in_it: bool, done: Any) -> None:
    torch.set_num_threads(1)
    queue: Any = getattr(put, "__self__", None) if made_in_it else None
    for _ in range(kind.count + WARM):
        put(kind.make_in(queue) if made_in_it else kind.make())
    done.wait()  # torch's queue needs the producer until all is received


def stream_us(kind: Kind, make_ends: Callable[[], Ends], made_in_it: bool = False) -> tuple[float, float]:
    """Microseconds per object while one process puts as fast as it can and another gets.

    Returns: Time by the clock, and processor time of both processes with the producer's start.
    """
    put, get, close = make_ends()
    cpu_s = processor_s()
    done = multiprocessing.Event()
    producer = multiprocessing.Process(target=produce, args=(kind, put, made_in_it, done))
    producer.start()
    for _ in range(WARM):
        get()
    began_s = time.perf_counter()
    for _ in range(kind.count):
        get()
    us = (time.perf_counter() - began_s) / kind.count * 1e6
    done.set()
    producer.join()
    close()
    return us, (processor_s() - cpu_s) / (kind.count + WARM) * 1e6


def processor_s() -> float:
    """Seconds of processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def answer(get: Callable[[], Any], put: Callable[[Any], None], count: int, done: Any) -> None:
    for _ in range(count):
        put(get())
    done.wait()


def round_trip_us(make_ends: Callable[[], Ends], count: int) -> float:
    """Microseconds for a small object there and back."""
    (put, other_get, close), (other_put, get, other_close) = make_ends(), make_ends()
    done = multiprocessing.Event()
    other = multiprocessing.Process(target=answer, args=(other_get, other_put, count + 1, done))
    other.start()
    put(b"0123456789abcdef")
    get()
    began_s = time.perf_counter()
    for _ in range(count):
        put(b"0123456789abcdef")
        get()
    us = (time.perf_counter() - began_s) / count * 1e6
    done.set()
    other.join()
    close()
    other_close()
    return us


def alone_us(kind: Kind) -> str:
    """Microseconds in one process to make an object, and to copy it to memory that was written before."""
    targets = [kept.clone() for kept in kind.kept]
    made, copied = [], []
    for _ in range(12):
        began_s = time.perf_counter()
        kind.make()
        made_s = time.perf_counter()
        for target, kept in zip(targets, kind.kept, strict=True):
            target.copy_(kept)
        made.append((made_s - began_s) * 1e6)
        copied.append((time.perf_counter() - made_s) * 1e6)
    return "".join(f"{statistics.median(us):12,.0f}" for us in (made, copied)) if kind.kept else ""


Times = dict[str, list[tuple[float, float]]]


def measure(kind: Kind, names: list[str], rounds: int, ray: queue_peers.RayAside | None) -> Times:
    """Times by transport; they take turns."""
    times: Times = {name: [] for name in names}
    flat = len(kind.kept) <= 1  # iceoryx2 knows no others
    ways: dict[str, Callable[[], tuple[float, float]] | None] = {
        "Queue": lambda: stream_us(kind, ours),
        "new_empty": (lambda: stream_us(kind, ours, made_in_it=True)) if kind.kept else None,
        "torch": lambda: stream_us(kind, torchs),
        "pipe": lambda: stream_us(kind, pipe),
        "iceoryx2": (lambda: stream_us(kind, queue_peers.iceoryx2)) if flat else None,
    }
    if ray is not None:
        for name in queue_peers.RAY_WAYS:
            ways[name] = functools.partial(lambda way: (ray.us(way, kind), 0.0), name)
    for _ in range(rounds):
        for name in names:
            if (way := ways[name]) is not None:
                times[name].append(way())
    return times


def peers_installed() -> list[str]:
    """The names of peers that are here; prints the versions, and what is not."""
    names = []
    for package, its in (("iceoryx2", ["iceoryx2"]), ("ray", list(queue_peers.RAY_WAYS))):
        version = queue_peers.version_of(package)
        print(f"{package} {version}" if version else f"{package} is not installed: left out")
        names += its if version else []
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queues", description=__doc__)
    parser.add_argument("--rounds", type=whole_number(1), default=5)
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="only this one")
    parser.add_argument("--peers", action="store_true", help="also what other packages would do")
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    names = ["Queue", "new_empty", "torch", "pipe", *(peers_installed() if options.peers else [])]
    print(f"microseconds per object, medians of {rounds} rounds, and (processor time); queues of {MAXSIZE}")
    print(f"{'':14}" + "".join(f"{name:>18}" for name in names) + f"{'made':>12}{'copied':>12}")
    ray = queue_peers.RayAside() if set(queue_peers.RAY_WAYS) & set(names) else None
    for kind in [kind for kind in KINDS if options.kind in {None, kind.name}]:
        print_row(kind.name, measure(kind, names, rounds, ray), alone_us(kind))
    if ray is not None:
        ray.close()
    back: Times = {name: [] for name in names}
    ends = {"Queue": ours, "torch": torchs, "pipe": pipe, "iceoryx2": queue_peers.iceoryx2}
    for _ in range(rounds):
        for name in names:
            if name in ends:
                back[name].append((round_trip_us(ends[name], 2000), 0.0))
    print_row("there and back", back, "")


def print_row(name: str, times: Times, last: str) -> None:
    cells = []
    for measured in times.values():
        clock, cpu = ([one[part] for one in measured] for part in (0, 1))
        text = f"{statistics.median(clock):,.0f}" if measured else ""
        cells.append(f"{text} ({statistics.median(cpu):,.0f})" if any(cpu) else text)
    print(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells) + last, flush=True)


if __name__ == "__main__":
    main()
