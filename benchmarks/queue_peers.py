"""What other transports of a host do with the objects of `benchmarks.queues`; none of them is required.

iceoryx2: bytes between a publisher and a subscriber, who sleeps on an event. Ray: its buffered channel from
the program to an actor, and its object store, from an actor's generator to the program.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.queue_objects import MAXSIZE, WARM, Kind

_RETRY_S = 0.001
_MOST_WAIT_MS = 100

_numbers = itertools.count()


def version_of(package: str) -> str:
    """The version of a package that is installed, or ""."""
    if importlib.util.find_spec(package) is None:
        return ""
    return importlib.metadata.version(package)


class Iceoryx2:
    """One direction: each process makes its port when it first puts or gets."""

    def __init__(self) -> None:
        self._name = f"shmloader-{os.getpid()}-{next(_numbers)}"
        self._sender: Any = None
        self._receiver: Any = None

    def _services(self) -> tuple[Any, Any, Any]:
        iox2: Any = importlib.import_module("iceoryx2")
        iox2.set_log_level(iox2.LogLevel.Error)
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        name = iox2.ServiceName.new(self._name)
        objects = (
            node.service_builder(name)
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(MAXSIZE)
            .open_or_create()
        )
        return node, objects, node.service_builder(name).event().open_or_create()

    def put(self, obj: Any) -> None:
        """Send a tensor's bytes, or bytes; waits for the other process's port before the first."""
        iox2: Any = importlib.import_module("iceoryx2")
        if isinstance(obj, torch.Tensor):
            address, nbytes = obj.data_ptr(), obj.nbytes
        else:
            address, nbytes = ctypes.cast(ctypes.c_char_p(obj), ctypes.c_void_p).value or 0, len(obj)
        if self._sender is None:
            node, objects, event = self._services()
            strategy = iox2.BackpressureStrategy.RetryUntilDelivered
            publisher = objects.publisher_builder().initial_max_slice_len(nbytes)
            publisher = publisher.backpressure_strategy(strategy).create()
            while not objects.dynamic_config.number_of_subscribers:
                time.sleep(_RETRY_S)
            self._sender = publisher, event.notifier_builder().create(), node
        publisher, notifier, _ = self._sender
        while True:
            sample = publisher.loan_slice_uninit(nbytes)
            ctypes.memmove(sample.payload_ptr, address, nbytes)
            if sample.assume_init().send():  # to so many subscribers
                break
            time.sleep(_RETRY_S)
        notifier.notify()

    def get(self) -> Any:
        """A tensor over what was sent, with the sample that keeps it."""
        iox2: Any = importlib.import_module("iceoryx2")
        if self._receiver is None:
            node, objects, event = self._services()
            listener = event.listener_builder().create()
            self._receiver = objects.subscriber_builder().create(), listener, node
        subscriber, listener, _ = self._receiver
        while (sample := subscriber.receive()) is None:
            listener.timed_wait(iox2.Duration.from_millis(_MOST_WAIT_MS))
        tensor: Any = torch.frombuffer(sample.payload().as_memory_view(), dtype=torch.uint8)
        tensor.sample = sample
        return tensor

    def close(self) -> None:
        """Give up this process's ports."""
        self._sender = self._receiver = None


def iceoryx2() -> tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], Any]]:
    """The ends of one direction, as `benchmarks.queues` takes them."""
    queue = Iceoryx2()
    return queue.put, queue.get, queue.close


class RayAside:
    """A Ray of this host in a process of its own: its threads here would break the forks of others."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_run_ray, args=(theirs,))
        self._process.start()

    def us(self, way: str, kind: Kind) -> float:
        """Microseconds per object of a kind, by a way of `RAY_WAYS`."""
        self._orders.send((way, kind))
        found: float = self._orders.recv()
        return found

    def close(self) -> None:
        """End it."""
        self._orders.send(None)
        self._process.join()


def _run_ray(orders: Any) -> None:
    ray: Any = importlib.import_module("ray")
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=6 << 30)
    for way, kind in iter(orders.recv, None):
        orders.send(RAY_WAYS[way](kind))
    ray.shutdown()


def ray_channel_us(kind: Kind) -> float:
    """Microseconds per object through a buffered channel of Ray, from this process to an actor."""
    ray: Any = importlib.import_module("ray")
    channels: Any = importlib.import_module("ray.experimental.channel.shared_memory_channel")

    class Reader:
        def read(self, channel: Any, count: int) -> float:
            for _ in range(WARM):
                channel.read()
            began_s = time.perf_counter()
            for _ in range(count):
                channel.read()
            return (time.perf_counter() - began_s) / count * 1e6

    reader = ray.remote(Reader).remote()
    where = [(reader, ray.get_runtime_context().get_node_id())]
    most_nbytes = sum(kept.nbytes for kept in kind.kept) + (1 << 20)
    channel = channels.BufferedSharedMemoryChannel(None, where, MAXSIZE, most_nbytes)
    us = reader.read.remote(channel, kind.count)
    for _ in range(kind.count + WARM):
        channel.write(kind.make())
    found: float = ray.get(us)
    channel.close()
    ray.kill(reader)
    return found


def ray_store_us(kind: Kind) -> float:
    """Microseconds per object through Ray's object store, from an actor's generator to this process."""
    ray: Any = importlib.import_module("ray")

    class Producer:
        def make(self, kind: Kind) -> Iterator[Any]:
            for _ in range(kind.count + WARM):
                yield kind.make()

    producer = ray.remote(Producer).remote()
    options = {"num_returns": "streaming", "_generator_backpressure_num_objects": MAXSIZE}
    references = producer.make.options(**options).remote(kind)
    for _ in range(WARM):
        ray.get(next(references))
    began_s = time.perf_counter()
    for _ in range(kind.count):
        ray.get(next(references))
    us = (time.perf_counter() - began_s) / kind.count * 1e6
    ray.kill(producer)
    return us


RAY_WAYS = {"Ray's channel": ray_channel_us, "Ray's store": ray_store_us}
