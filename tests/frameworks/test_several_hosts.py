"""torchrun on two hosts: a rank is killed, all are started anew, and the epoch continues from its checkpoint.

A host is a set of namespaces (network, host name, IPC, mounts) with a /dev/shm of its own. Files are shared.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from frameworks.hosts import HOSTS, Host, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "several-hosts.md"
RANKS = 4
KILLED_AT = 9
DEADLINE_S = 240

pytestmark = pytest.mark.long

# Goes before the page's loop. Each rank writes a file of its own; one is killed if it has no checkpoint.
WATCH = f"""
    import signal, socket, sys
    sys.stdout = open(f"{{os.getpid()}}.out", "w")
    begin = loader.state_dict()["batches"]
    print(socket.gethostname(), os.fstat(dataset.buffer.fd).st_ino, begin)
    def die_at(step):
        if rank == {RANKS - 1} and begin == 0 and step == {KILLED_AT}:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def page_program() -> str:
    """The page's program, changed: each rank prints what it has mapped, and one rank dies once."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    loop, first = "    for epoch in range(first_epoch", "            loss = "
    assert found[1].count(loop) == found[1].count(first) == 1
    return found[1].replace(loop, WATCH + loop).replace(first, f"            die_at(step)\n{first}")


def page_command() -> tuple[dict[str, str], list[str]]:
    """The page's line that starts the program on each host: environment and command."""
    found = re.search(r"^(\w+)=(\S+) torchrun (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    command = [sys.executable, "-m", "torch.distributed.run", *found[3].replace("HOST:", "alpha:").split()]
    return {found[1]: found[2], "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}, command


class Run(NamedTuple):
    """One rank of one attempt.

    Attributes:
        host: The name of its host.
        inode: The memory of its dataset.
        begin: Batches before it, by the checkpoint that it resumed from.
        batches: Its indices by rank and step; steps are counted from the beginning of the epoch.
    """

    host: str
    inode: str
    begin: int
    batches: dict[tuple[int, int], list[int]]


def read(output: Path) -> Run:
    (host, inode, begin), *lines = [line.split(maxsplit=2) for line in output.read_text().splitlines()]
    batches = {(int(rank), int(begin) + int(step)): json.loads(indices) for rank, step, indices in lines}
    return Run(host, inode, int(begin), batches)


def test_a_job_of_two_hosts_goes_on_after_a_rank_was_killed(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(page_program())
    environment, command = page_command()
    running = [host.start(command, tmp_path, environment) for host in hosts]
    try:
        ended = wait_until(lambda: all(one.poll() is not None for one in running), DEADLINE_S)
        said = "\n".join((tmp_path / f"{name}.log").read_text()[-4000:] for name in HOSTS)
        assert ended, said
        assert [one.returncode for one in running] == [0, 0], said
    finally:
        for one in running:
            one.kill()
            one.wait()

    runs = [read(output) for output in tmp_path.glob("*.out")]
    begins = sorted({run.begin for run in runs})
    assert begins[:2] == [0, KILLED_AT // 4 * 4], "the second attempt goes on from the last checkpoint"
    batches: dict[tuple[int, int], list[int]] = {}
    for run in runs:
        for place, indices in run.batches.items():
            assert batches.setdefault(place, indices) == indices, "what comes again is the same"
    assert max(step for run in runs if run.begin == 0 for _, step in run.batches) == KILLED_AT
    assert sorted(batches) == [(rank, step) for rank in range(RANKS) for step in range(480 // 4 // RANKS)]
    assert sorted(index for indices in batches.values() for index in indices) == list(range(480))
    for begin in begins:
        memory = {(run.host, run.inode) for run in runs if run.begin == begin}
        assert sorted(host for host, _ in memory) == sorted(HOSTS), "the ranks of a host share one dataset"
        assert len({inode for _, inode in memory}) == len(HOSTS), "hosts have datasets of their own"
    assert wait_until(lambda: not any(host.left() for host in hosts), 20), [host.left() for host in hosts]
