"""torchft: replicas come and go, and each sample of an epoch is trained once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: make test-integrations")
from frameworks.hosts import wait_until

PROGRAM = Path(__file__).with_name("torchft_page.py")
# Two of them: then the one that is left waits for another, which may be there only a moment later.
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=2)
print(server.address(), flush=True)
sys.stdin.read()
"""


def lines(path: Path) -> list[tuple[int, list[int]]]:
    """Epoch and indices of each step."""
    found = []
    for line in path.read_text().splitlines():
        _, _, epoch, indices = line.split(maxsplit=3)
        found.append((int(epoch), [int(one) for one in indices.strip("[]").split(",") if one]))
    return found


@pytest.mark.timeout(600)
def test_each_sample_is_trained_once_though_replicas_come_and_go(tmp_path: Path) -> None:
    """One dies in mid-step, another takes its place, and a third joins them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        with (tmp_path / "log").open("a") as log:
            options = {"stderr": log, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | options
            command = [sys.executable, *command]
            running.append(subprocess.Popen(command, env=environment, text=True, **options))
        return running[-1]

    def replica(name: str, number: int, *options: str) -> subprocess.Popen[str]:
        return start([str(PROGRAM), str(tmp_path / name), str(number), *options], stdout=subprocess.DEVNULL)

    try:
        lighthouse = start(["-c", LIGHTHOUSE])
        assert lighthouse.stdout is not None
        environment["TORCHFT_LIGHTHOUSE"] = lighthouse.stdout.readline().strip()
        stays, dies = replica("stays", 0), replica("dies", 1, "--dies", "22")
        comes = replica("comes", 2, "--after", str(tmp_path / "dies"), "7")
        replica("joins", 3, "--after", str(tmp_path / "comes"), "3")
        assert wait_until(lambda: None not in (stays.poll(), comes.poll()), 400)
        said = (tmp_path / "log").read_text()[-4000:]
        assert (stays.returncode, dies.poll(), comes.returncode) == (0, -9, 0), said
    finally:
        for process in running:
            process.kill()
            process.communicate()
    trained: Counter[tuple[int, int]] = Counter()
    for path in map(tmp_path.joinpath, ("stays", "dies", "comes", "joins")):
        if path.exists():  # `joins` may be late
            trained.update((epoch, index) for epoch, indices in lines(path) for index in indices)
    assert trained == {(epoch, index): 1 for epoch in range(2) for index in range(500)}
    assert len(lines(tmp_path / "dies")) == 7
