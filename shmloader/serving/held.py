"""The things that readers hold, and the count of holders of each."""

from __future__ import annotations

from shmloader.slots import ByteArray


class Held:
    """Things in slots, each kept as long as any reader holds it. Their anchors are leases on the slots."""

    def __init__(self) -> None:
        self._anchors: dict[int, ByteArray] = {}  # by ``seq``
        self._holders: dict[int, set[int]] = {}  # numbers of readers, by ``seq``
        self._next = 0

    def __len__(self) -> int:
        return len(self._anchors)

    def add(self, anchor: ByteArray, readers: list[int]) -> int:
        """Keep something until all of these readers have let it go; returns its ``seq``."""
        seq = self._next
        self._next = seq + 1
        if readers:
            self._anchors[seq], self._holders[seq] = anchor, set(readers)
        return seq

    def release(self, seq: int, reader: int) -> bool:
        """A reader lets something go; False if it does not hold that."""
        holders = self._holders.get(seq, set())
        if reader not in holders:
            return False
        holders.remove(reader)
        if not holders:
            del self._anchors[seq], self._holders[seq]
        return True

    def release_all(self, reader: int) -> None:
        """Let go all that a reader holds: it has ended."""
        for seq in [seq for seq, holders in self._holders.items() if reader in holders]:
            self.release(seq, reader)
