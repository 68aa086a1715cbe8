"""The protocol of server and readers, in every interleaving: nothing breaks, and planted bugs are found.

`Roster`, `PlaceTable` and the packed requests are the real ones; sockets are queues, batches are
numbers in the memory of slots. A state of the model is the shortest script of steps that leads to it.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from protocol_fakes import Segment

from shmloader.memory import PAGE_NBYTES
from shmloader.serving import records
from shmloader.serving.roster import Join, Policy, Roster
from shmloader.slots import PlaceTable

EPOCH, STORED, END, CLOSED = "epoch", "stored", "end", "closed"


class Broken(Exception):
    """An invariant does not hold."""


class Reader:
    """One reader, as the server knows it."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}  # leases, by ``seq``

    def let_all_go(self) -> None:
        self.held.clear()


@dataclass(frozen=True)
class Setting:
    """What is explored; the classes are the real ones, or planted bugs."""

    readers: int = 2
    batches: int = 2
    epochs: int = 1
    window: int = 1
    policy: Policy = "wait"
    keeps: int = 1  # most batches that a reader holds beside the last one
    kills: int = 0
    leaves: int = 0  # how often readers leave an epoch early, in all
    stops: int = 0  # how many readers stop for ever, as in a debugger
    late: bool = False  # whether readers may come at any time, instead of all being waited for
    roster: type[Roster[Reader]] = Roster
    reader: type[Reader] = Reader


@dataclass
class Client:
    """One reader: what it was sent and has not read, what it holds."""

    alive: bool = True
    stopped: bool = False
    came: deque[tuple[Any, ...]] = field(default_factory=deque)  # from the server
    says: deque[bytes] = field(default_factory=deque)  # to the server
    asked: bool = False
    in_epoch: int = -1
    epochs: int = 0
    taken: int = 0
    told: int = 0
    first: int = 0
    closed: bool = False
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # ``seq``: slot, value


class World:
    """Server, readers and slots, driven by a script."""

    def __init__(self, setting: Setting, script: tuple[Any, ...]) -> None:
        self.setting = setting
        self.segment = Segment()
        pages = 4 * (setting.readers * (setting.keeps + setting.window + 2) + 4)
        self.table = PlaceTable(self.segment, 1, pages * PAGE_NBYTES)  # type: ignore[arg-type]
        wanted = None if setting.late else setting.readers
        self.roster = setting.roster(wanted, setting.window, setting.policy)
        self.clients: list[Client] = []
        self.members: list[Reader] = []
        self.made = self.kills = self.leaves = self.stops = 0
        for _ in range(0 if setting.late else setting.readers):
            self._join()
        for step in script:
            self.do(step)
        self._check()  # it held before the last step

    def _join(self) -> None:
        self.clients.append(Client())
        self.members.append(self.setting.reader())
        assert self.roster.add(self.members[-1], "now")

    # --- steps

    def steps(self) -> list[tuple[Any, ...]]:
        steps: list[tuple[Any, ...]] = []
        if self.setting.late and len(self.clients) < self.setting.readers:
            steps.append(("join",))
        if self._due():
            steps.append(("server",))
        elif self.roster.late():  # and so much time passes
            steps.append(("lose_patience",))
        for who, client in enumerate(self.clients):
            if not client.alive or client.stopped:
                continue
            if client.says:
                steps.append(("hear", who))
            if client.came:
                steps.append(("read", who))
            if not client.closed and not client.asked and client.in_epoch < 0:
                steps.append(("ask", who) if client.epochs < self.setting.epochs else ("end", who))
            if client.in_epoch >= 0 and self.leaves < self.setting.leaves:
                steps.append(("leave", who))
            if client.closed:
                steps.append(("end", who))
            steps += [("drop", who, seq) for seq in client.held]
            steps += self._mishaps(who, client)
        return steps

    def _mishaps(self, who: int, client: Client) -> list[tuple[Any, ...]]:
        stops = self.stops < self.setting.stops and client.in_epoch >= 0 and who > 0
        kills = self.kills < self.setting.kills
        return [("stop", who)] * stops + [("kill", who)] * kills

    def _due(self) -> bool:
        roster = self.roster
        return bool(
            roster.epoch_is_due()
            or roster.too_slow()
            or roster.batch_is_due()
            or (roster.running and not roster.active)
        )

    def do(self, step: tuple[Any, ...]) -> None:
        kind, *about = step
        if kind == "join":
            self._join()
        elif kind == "server":
            self._serve()
        elif kind == "lose_patience":
            self._let_go(self.roster.late())
        else:
            getattr(self, f"_{kind}")(about[0], self.clients[about[0]], *about[1:])

    def _ask(self, who: int, client: Client) -> None:
        client.asked = True
        self._say(client, records.ASK, -1)

    def _leave(self, who: int, client: Client) -> None:
        self.leaves += 1
        client.in_epoch, client.epochs = -1, client.epochs + 1
        for message in client.came:
            if message[0] == STORED:
                client.held[message[1]] = message[2], message[3]  # let go in a step of its own
        client.came = deque(message for message in client.came if message[0] == CLOSED)
        self._say(client, records.LEAVE, 0)

    def _drop(self, who: int, client: Client, seq: int) -> None:
        del client.held[seq]
        request = (records.NEXT, client.told) if client.in_epoch >= 0 else (records.STATE, -1)  # or any other
        self._say(client, *request, [seq])

    def _say(self, client: Client, kind: int, value: int, released: list[int] | None = None) -> None:
        client.says.append(records.pack_request(kind, value, 0, released or []))

    def _read(self, who: int, client: Client) -> None:
        kind, *about = client.came[0]
        if kind == STORED and client.in_epoch >= 0:
            if len(client.held) > self.setting.keeps:
                return  # the program lets one go first
            seq, slot, value, number = about
            if number != client.first + client.taken + 1:
                raise Broken(f"reader {who} has batch {number} after {client.first + client.taken}")
            client.held[seq] = slot, value
            client.taken += 1
            client.told = number + (self.setting.policy == "drop")  # see `Roster.tell_every`
            self._say(client, records.NEXT, client.told)
        elif kind == STORED:
            client.held[about[0]] = about[1], about[2]
        elif kind == EPOCH:
            if about[1] and not self.setting.late:
                raise Broken(f"reader {who} begins after {about[1]} batches")
            client.in_epoch, client.first, client.taken, client.told = about[0], about[1], 0, about[1] + 1
            client.asked = False
            self._say(client, records.NEXT, client.told)
        elif kind == END:
            if client.in_epoch >= 0:
                if client.first + client.taken != self.setting.batches:
                    raise Broken(f"reader {who} has {client.taken} batches of an epoch")
                client.in_epoch, client.epochs = -1, client.epochs + 1
        else:
            client.closed, client.in_epoch, client.asked = True, -1, False
        client.came.popleft()

    def _kill(self, who: int, client: Client) -> None:
        self.kills += 1
        self._end(who, client)

    def _stop(self, who: int, client: Client) -> None:
        self.stops += 1
        client.stopped = True

    def _end(self, who: int, client: Client) -> None:
        client.alive = False
        client.held.clear()
        client.came.clear()
        client.says.clear()
        self.roster.remove(self.members[who])
        self.members[who].let_all_go()

    def _hear(self, who: int, client: Client) -> None:
        reader, request = self.members[who], records.unpack_request(client.says.popleft())
        if client.closed or any(message[0] == CLOSED for message in client.came):
            return  # it was let go
        for seq in request.released:
            reader.held.pop(seq, None)
        if request.kind == records.ASK:
            if self.roster.ask(reader, None):
                client.came.append((EPOCH, self.roster.epoch, self.roster.made))
        elif request.kind == records.LEAVE:
            self.roster.leave(reader)
        elif request.kind == records.NEXT and not self.roster.ask_next(reader, request.value):
            raise Broken(f"reader {who} asks for {request.value} of {self.roster.made}")

    def _serve(self) -> None:
        roster = self.roster
        if roster.epoch_is_due():
            readers = list(roster.waiting)
            if missing := [who for who in roster if roster.epochs[who] >= 0 and who not in readers]:
                raise Broken(f"an epoch begins without {len(missing)} readers of the last one")
            roster.begin_epoch()
            for reader in readers:
                self._client(reader).came.append((EPOCH, roster.epoch, 0))
        elif slow := roster.too_slow():
            self._let_go(slow)
        elif not roster.batch_is_due():
            roster.end_epoch()
        elif roster.made == self.setting.batches:
            for reader in roster.end_epoch():
                self._client(reader).came.append((END,))
        else:
            self._make()

    def _let_go(self, readers: list[Reader]) -> None:
        for reader in readers:
            self.roster.remove(reader)
            self._client(reader).came.append((CLOSED,))

    def _make(self) -> None:
        self.made += 1
        value = self.made % 250 + 1
        place = self.table.grant(0, 0, 0, b"")
        self.table.reserve(place, 1).view[:1] = bytes([value])
        self.table.arrive(place.seq, place.nbytes, 0, 1, 0, 0)
        anchor, _ = self.table.take(place)
        number = self.roster.add_batch()
        for reader in self.roster.active:
            reader.held[self.made] = anchor
            self._client(reader).came.append((STORED, self.made, place.number, value, number))

    def _client(self, reader: Reader) -> Client:
        return self.clients[next(n for n, member in enumerate(self.members) if member is reader)]

    # --- invariants

    def _check(self) -> None:
        self.table.collect()
        self.table.check()
        for who, client in enumerate(self.clients):
            unread = {m[1]: (m[2], m[3]) for m in client.came if m[0] == STORED}
            for slot, value in (*client.held.values(), *unread.values()):
                if self._byte(slot) != value:
                    raise Broken(f"the batch in slot {slot}, which reader {who} has, has changed")
            ahead = self.roster.made - client.first - client.taken
            waits = client.alive and self.setting.policy == "wait" and client.in_epoch == self.roster.epoch
            if waits and ahead > self.setting.window + 1:
                raise Broken(f"reader {who} is {ahead} batches behind")

    def _byte(self, slot: int) -> int:
        return int(np.frombuffer(self.segment.memory[slot].buffer, np.uint8)[0])

    def check_end(self) -> None:
        """Nothing can happen: then all readers have ended, and nothing is held."""
        if going := [client for client in self.clients if client.alive and not client.stopped]:
            raise Broken(f"nothing can go on: {going}")
        if not self.stops and (any(reader.held for reader in self.members) or self.table.kept):
            raise Broken(f"{self.table.kept} batches are held for nobody")

    def key(self) -> Any:
        """What tells states apart; numbers that only grow are taken relative to each other."""
        roster, base = self.roster, self.made
        readers = [
            (roster.made - roster.active.get(r, 0), r in roster.waiting, epoch >= 0, self.members.index(r))
            for r, epoch in roster.epochs.items()
        ]
        clients = []
        for client in self.clients:
            came = tuple((m[0], *(base - x for x in m[3:4]), *m[4:]) for m in client.came)
            held = tuple(sorted(base - value for _, value in client.held.values()))
            says = tuple((r.kind, r.value, len(r.released)) for r in map(records.unpack_request, client.says))
            clients.append(
                (
                    client.alive,
                    client.stopped,
                    came,
                    says,
                    client.asked,
                    client.in_epoch >= 0,
                    client.epochs,
                    client.taken,
                    client.told,
                    client.first,
                    client.closed,
                    held,
                )
            )
        lists = (tuple(readers), tuple(clients))
        held = set[int]().union(*(reader.held for reader in self.members))
        return (*lists, roster.made, self.kills, self.leaves, roster.running, len(held))


def explore(setting: Setting, most: int = 40_000) -> tuple[int, str]:
    """Visit all states, nearest first; how many there are, and the first broken invariant with its trace."""
    first: tuple[Any, ...] = ()
    seen, queue = {World(setting, first).key()}, deque([first])
    while queue:
        script = queue.popleft()
        world = World(setting, script)
        try:
            steps = world.steps()
            if all(step[0] in ("kill", "leave", "stop") for step in steps):
                world.check_end()
            for step in steps:
                after = World(setting, (*script, step))
                key = after.key()
                if key not in seen:
                    seen.add(key)
                    queue.append((*script, step))
        except Broken as broken:
            return len(seen), f"{broken} after {script}"
        assert len(seen) < most, "too many states"
    return len(seen), ""


SETTINGS = {
    "two readers in step": Setting(batches=2),
    "two epochs": Setting(batches=1, epochs=2, keeps=0),
    "three readers": Setting(readers=3, batches=1, keeps=0),
    "one is killed": Setting(batches=2, kills=1, keeps=0),
    "one leaves": Setting(batches=2, leaves=1, keeps=0),
    "a slow one is let go": Setting(batches=2, policy="drop", keeps=0),
    "two epochs, and a slow one is let go": Setting(batches=1, epochs=2, policy="drop", keeps=0),
    "one stops for ever": Setting(batches=1, epochs=2, policy="drop", stops=1, keeps=0),
    "they come late": Setting(batches=2, late=True, keeps=0),
}


_LONG = {"two epochs", "one leaves", "one stops for ever"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in _LONG)) for name in SETTINGS]
)
def test_nothing_breaks_in_any_interleaving(name: str) -> None:
    states, broken = explore(SETTINGS[name])
    assert not broken
    assert states > 50


# --- planted bugs


class ForgetsHolders(Roster[Reader]):
    """The first reader that lets go frees the batch: there is one account of what all hold."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: dict[int, Any] = {}

    def add(self, reader: Reader, join: Join) -> bool:
        reader.held = self.held
        return super().add(reader, join)


class KeepsTheDead(Reader):
    """What a dead reader held is never freed."""

    def let_all_go(self) -> None:
        pass


class NoWindow(Roster[Reader]):
    """Batches are made however slow a reader is."""

    def batch_is_due(self) -> bool:
        return bool(self.active)


class BeginsForOne(Roster[Reader]):
    """An epoch begins while a reader is in the last one."""

    def epoch_is_due(self) -> bool:
        return bool(self.waiting)


class EndlessPatience(Roster[Reader]):
    """A reader that asks for no further epoch is waited for, whatever the policy is."""

    def late(self) -> list[Reader]:
        return []


class WaitsForTheDead(Roster[Reader]):
    """A reader that has ended is still waited for."""

    def remove(self, reader: Reader) -> None:
        pass


@pytest.mark.parametrize(
    ("bug", "of"),
    [
        (functools.partial(Setting, roster=ForgetsHolders), {"batches": 3}),
        (functools.partial(Setting, reader=KeepsTheDead), {"batches": 2, "kills": 1}),
        (functools.partial(Setting, roster=NoWindow), {"batches": 4}),
        (functools.partial(Setting, roster=BeginsForOne), {"batches": 2}),
        (
            functools.partial(Setting, roster=EndlessPatience, policy="drop", keeps=0),
            {"batches": 1, "epochs": 2, "stops": 1},
        ),
        (functools.partial(Setting, roster=WaitsForTheDead), {"batches": 3, "kills": 1}),
    ],
)
def test_planted_bugs_are_found(bug: Any, of: dict[str, Any]) -> None:
    _, broken = explore(bug(**of))
    assert broken
