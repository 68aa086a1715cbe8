"""Counterparts of the exchange in the protocol's model: memory as a byte array, workers as scripts, a device.

Nothing here waits or has a process. `Workers` notes the exchange's calls. When the real one would sleep, it
lets `protocol_main.Main` continue its script.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from shmloader.errors import LoaderError
from shmloader.indices.packed_indices import pack_index_batch
from shmloader.memory import whole_pages
from shmloader.slots import Guard, Place
from shmloader.wire.records import INLINE_NBYTES, SPIN_NS, MakeBatch, unpack_request

WORKERS = 2
LONG = "x" * INLINE_NBYTES  # an index batch that does not fit in a record

Event = tuple[Any, ...]


class Sleeper(Protocol):
    """The part of the main process that the workers need."""

    segment: "Segment"

    def wake(self) -> int | None: ...

    def overwrite_granted(self) -> None: ...

    def has_left(self, worker_id: int) -> None: ...


class _Memory:
    """A slot's memory, with the part of `segment.Extent` that the table uses."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer = bytearray(nbytes)
        self.view = memoryview(self.buffer)


class Segment:
    """Slots in private memory."""

    def __init__(self) -> None:
        self.memory: dict[int, _Memory] = {}

    def reserve(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        return whole_pages(nbytes)

    def map(self, slot: int, nbytes: int) -> _Memory:
        memory = self.memory.get(slot)
        if memory is None or memory.nbytes != nbytes:
            memory = self.memory[slot] = _Memory(nbytes)
        return memory

    def discard(self, slot: int, nbytes: int, kept_nbytes: int = 0) -> None:
        if not kept_nbytes:
            self.memory.pop(slot, None)

    def close(self) -> None:
        self.memory.clear()


class Device(Guard):
    """The guard of a device that reads each batch when the user drops it, until the script says otherwise.

    It is asked for two batches together, unless they are needed at once.

    Attributes:
        reading: The slots that it reads.
    """

    active = True

    def __init__(self) -> None:
        self.reading: set[int] = set()
        self._ended: list[Place] = []

    def pass_on(self, ended: Sequence[Place], *, at_once: bool) -> list[Place]:
        self._ended += ended
        if not at_once and len(self._ended) < 2:
            return []
        done = [place for place in self._ended if place.number not in self.reading]
        self._ended = [place for place in self._ended if place not in done]
        return done


class _Worker:
    """A worker as the exchange sees it; its records go through `Workers`."""

    pid = 0
    place = "pid 0"

    def __init__(self, workers: "Workers", worker_id: int) -> None:
        self._workers = workers
        self.worker_id = worker_id
        self.says: deque[bytes | None] = deque()  # the next result of `receive`; then nothing
        self.dead = False

    def send(self, record: bytes) -> None:
        self._workers.send(self.worker_id, record)

    def receive(self) -> bytes | None:
        return self.says.popleft() if self.says else None if self.dead else b""

    def has_begun(self, unanswered: int) -> bool:
        return True  # the model's workers die at their tasks

    def is_dead(self) -> bool:
        return self.dead


class Workers:
    """All workers as the exchange sees them. Instead of waiting, it continues the script."""

    interrupted = False
    closed_because = ""
    look_again_ns = SPIN_NS
    same_pipe = False  # a planted bug: a new process's records come through the pipe of the old one

    def __init__(self, main: Sleeper) -> None:
        self._main = main
        self.events: list[Event] = []
        self.workers = [_Worker(self, worker_id) for worker_id in range(WORKERS)]

    def wait(self, timeout_s: float | None) -> list[_Worker]:
        worker_id = self._main.wake()
        return [] if worker_id is None else [self.workers[worker_id]]

    def ready(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.says]

    def send(self, worker_id: int, record: bytes) -> None:
        task = unpack_request(record)
        there = True
        if type(task) is MakeBatch and task.payload_nbytes > INLINE_NBYTES:
            lies = self._main.segment.memory[task.slot].buffer[: task.payload_nbytes]
            there = lies == pack_index_batch(LONG)
        self.events.append(("send", worker_id, record, there))

    def restart(self, worker_id: int, *, has_left: bool = False) -> _Worker:
        if has_left:
            self._main.has_left(worker_id)
        self.events.append(("restart", worker_id, self.same_pipe))
        self._main.overwrite_granted()
        fresh = self.workers[worker_id] = _Worker(self, worker_id)
        return fresh

    def stack_of(self, worker_id: int) -> str:
        return ""

    def died(self, *args: object, **kwargs: object) -> LoaderError:
        return LoaderError("a worker died")

    def close(self, *args: object, **kwargs: object) -> None:
        self.events.append(("close",))
