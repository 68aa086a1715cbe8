"""share_on_host: one process builds, the others attach; if any dies, none hangs and nothing is left."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_ranks import FORK, ROWS, Box, Building, Rank, build, build_never, build_slowly, servers, wait_for
from robustness.processes import is_gone

from shmloader import LoaderError, NotSharedWarning, ShareTimeout
from shmloader.store import host_server, share
from shmloader.store.host import share_on_host
from shmloader.store.job import job_of_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs abstract sockets")


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(name: str) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start_one(build: Callable[[], Any], **arguments: Any) -> Rank:
        ranks.append(Rank(name, build, **arguments))
        return ranks[-1]

    yield start_one
    for rank in ranks:
        rank.end()


def test_one_rank_builds_and_all_map_the_same_memory(start: Any) -> None:
    results = [rank.result() for rank in [start(build_slowly) for _ in range(4)]]
    assert [result["built"] for result in results].count(True) == 1
    assert len({result["inode"] for result in results}) == 1
    assert all(result["equal"] for result in results)


def test_a_later_rank_attaches_when_the_builder_is_gone_already(start: Any) -> None:
    first = start(build)
    second = (first.result(), start(build))[1]
    inode = second.result()["inode"]
    first.kill()
    late = start(build_never).result()
    assert late == {"built": False, "inode": inode, "equal": True}


def test_the_object_is_built_anew_after_the_last_rank_has_dropped_it(name: str) -> None:
    inodes = []
    for _ in range(2):
        shared = share_on_host(Building(build), name=name)
        (server,) = servers()
        inodes.append(os.fstat(shared.buffer.fd).st_ino)
        kept_part = shared[10:20]
        del shared
        assert server.is_running()  # a view of it is a part of the memory
        del kept_part
        assert wait_for(lambda server=server: is_gone(server))
    assert inodes[0] != inodes[1]


def test_a_process_that_asks_twice_gets_the_same_memory(name: str) -> None:
    first, second = share_on_host(Building(build), name=name), share_on_host(Building(build_never), name=name)
    assert os.fstat(first.buffer.fd).st_ino == os.fstat(second.buffer.fd).st_ino
    assert first == second == ROWS


def test_the_next_in_line_builds_when_the_builder_is_killed(start: Any) -> None:
    builder = start(build_never)
    assert builder.hear() == "building"
    others = [start(build) for _ in range(3)]
    time.sleep(0.2)
    builder.kill()
    results = [rank.result() for rank in others]
    assert [result["built"] for result in results].count(True) == 1
    assert len({result["inode"] for result in results}) == 1


def test_a_process_that_the_build_forked_does_not_hide_the_builders_death(start: Any) -> None:
    """The forked process would hold the listening socket, and the others would wait for it."""
    heirs, ours = FORK.Pipe()

    def build_with_heir() -> Any:
        heirs.send(start_heir().pid)
        time.sleep(60)

    def start_heir() -> Any:
        heir = FORK.Process(target=time.sleep, args=(60,))
        heir.start()
        return heir

    builder = start(build_with_heir)
    heir = psutil.Process(ours.recv())
    other = start(build)
    time.sleep(0.2)
    builder.kill()
    assert heir.is_running()
    assert other.result()["built"]
    heir.kill()
    heirs.close()
    ours.close()


def test_a_rank_that_is_killed_while_it_waits_disturbs_nobody(start: Any) -> None:
    go, wait = FORK.Pipe()

    def build_on_demand() -> Any:
        wait.recv()
        return ROWS

    builder = start(build_on_demand)
    assert builder.hear() == "building"
    killed, other = start(build), start(build)
    time.sleep(0.2)
    killed.kill()
    go.send("go")
    assert builder.result()["equal"]
    assert other.result() == {"built": False, "inode": builder_inode(start), "equal": True}
    go.close()
    wait.close()


def builder_inode(start: Any) -> int:
    """The inode of the memory that a later rank gets."""
    inode: int = start(build_never).result()["inode"]
    return inode


def test_nothing_is_left_when_all_ranks_are_killed_at_once(start: Any) -> None:
    ranks = [start(build) for _ in range(3)]
    for rank in ranks:
        rank.result()
    (server,) = servers()
    for rank in ranks:
        rank.process.kill()
    assert wait_for(lambda: is_gone(server))


def test_a_killed_server_takes_no_memory_from_the_ranks(start: Any) -> None:
    rank = start(build)
    inode = rank.result()["inode"]
    (server,) = servers()
    server.kill()
    assert wait_for(lambda: is_gone(server))
    assert rank.process.is_alive()
    assert start(build).result()["inode"] != inode  # built anew


def test_what_build_raises_is_raised_in_every_waiting_rank(start: Any) -> None:
    def fail() -> Any:
        time.sleep(5)  # the others wait by then
        raise KeyError("no such split", 7)

    ranks = [start(fail) for _ in range(3)]
    errors = [rank.result() for rank in ranks]
    pids = [rank.process.pid for rank in ranks]
    for error, _ in errors:
        assert type(error) is KeyError
        assert error.args == ("no such split", 7)
    notes = ["".join(noted) for _, noted in errors if noted]
    assert len(notes) == 2  # the builder's own has its traceback
    assert all("in fail" in note and any(f"process {pid}" in note for pid in pids) for note in notes)


def test_a_failed_build_may_be_tried_again(name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        share_on_host(Building(lambda: 1 // 0), name=name)
    assert share_on_host(Building(build), name=name) == ROWS


def test_an_interrupted_build_is_taken_over(start: Any) -> None:
    """Another rank builds when the building rank is interrupted."""

    def interrupted() -> Any:
        time.sleep(0.3)
        raise SystemExit(3)

    builder = start(interrupted)
    assert builder.hear() == "building"
    assert start(build).result()["built"]
    builder.process.join()
    assert builder.process.exitcode == 3


def test_a_wait_ends_after_its_timeout_and_names_the_builder(start: Any, name: str) -> None:
    builder = start(build_never)
    assert builder.hear() == "building"
    began_s = time.monotonic()
    with pytest.raises(ShareTimeout, match=rf"process {builder.process.pid}, .* not done after 0\.2 s"):
        share_on_host(Building(build), name=name, timeout_s=0.2)
    assert time.monotonic() - began_s < 10
    assert issubclass(ShareTimeout, TimeoutError)
    builder.kill()


def test_a_rank_may_wait_without_an_end(start: Any, name: str) -> None:
    builder = start(build_slowly)
    assert builder.hear() == "building"
    assert share_on_host(Building(build_never), name=name, timeout_s=math.inf) == ROWS


def test_runs_are_kept_apart(name: str) -> None:
    kept = [share_on_host(Building(build), name=name, job=job) for job in ("one run", "another")]
    assert len({os.fstat(shared.buffer.fd).st_ino for shared in kept}) == 2


ASKS = "import sys; from shmloader.store.job import job_of_process; print(job_of_process('x'))"
STARTS = (
    "import os, subprocess, sys; from shmloader.store.job import job_of_process; mine = job_of_process('x')\n"
    "os.environ.update(LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500')\n"
    "print(mine, mine == job_of_process('x'), flush=True)\n"
    "subprocess.run([sys.executable, '-c', sys.argv[1]], env=os.environ | {'LOCAL_RANK': '1'})\n"
)
LAUNCHED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "torchrun": (
        {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "2", "RANK": "0"},
    ),
    "srun": (
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"},
    ),
}


def asked(environment: dict[str, str], *command: str) -> list[str]:
    """The runs that a process with this environment names, and those of processes that it starts."""
    command = command or (ASKS,)
    done = subprocess.run(
        [sys.executable, "-c", *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_ranks_of_one_launcher_have_one_run(launcher: str) -> None:
    one, other = LAUNCHED[launcher]
    assert asked(one) == asked(one | {"RANK": "1", "SLURM_PROCID": "1", "LOCAL_RANK": "1"})
    assert asked(one) != asked(other)


def test_programs_in_a_step_of_one_task_are_runs_of_their_own() -> None:
    """As started in a shell that srun has started: all of them inherit the step."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    runs = [asked(step | {"SLURM_STEP_NUM_TASKS": "1"})[0] for _ in range(2)]
    assert len(set(runs)) == 2
    assert all(run.startswith("['process'") for run in runs)


def test_a_clock_that_is_set_makes_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.store.job._initial_environment", dict)
    times = itertools.count()
    monkeypatch.setattr("psutil.Process.create_time", lambda _: next(times))
    kind, process = job_of_process("x")
    assert [kind, process] == job_of_process("x")
    assert process.split()[0] in (str(os.getpid()), str(os.getppid()))
    assert len(process.split()) == 2


def test_lightnings_first_rank_has_the_run_of_those_that_it_starts() -> None:
    first, second = asked({}, STARTS, ASKS)
    assert first == f"{second} True"
    assert asked({}, STARTS, ASKS)[0] != first


# As setproctitle does, unless SPT_NOENV is set: the title is written over the arguments and the environment.
TITLED = (
    "import ctypes, pathlib\n"
    "begin, end = map(int, pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()[47:49])\n"
    "def write_over(title):\n"
    "    ctypes.memset(begin, 0, end - begin), ctypes.memmove(begin, title, len(title))\n"
    "write_over(b'')\n"
)


def test_a_title_over_the_environment_makes_no_other_run() -> None:
    environment, _ = LAUNCHED["torchrun"]
    twice = f"{TITLED}{ASKS}; write_over(b'train --lr=0.1'); print(job_of_process('x'))"
    assert asked(environment, twice) == [str(["torchrun", "none", "a", "1"])] * 2
    first, second = asked({}, TITLED + STARTS, TITLED + ASKS)
    assert first == f"{second} True"


def test_a_rank_of_no_known_launcher_is_asked_for_its_run() -> None:
    shell = f'{sys.executable} -c "{ASKS}"; true'
    done = subprocess.run(
        ["sh", "-c", shell], env=os.environ | {"RANK": "1"}, capture_output=True, text=True, check=False
    )
    assert "share_on_host(..., job=...)" in done.stderr


def test_a_rank_that_builds_in_another_way_is_an_error(name: str) -> None:
    rows = [{"n": number} for number in range(100)]
    kept = share_on_host(functools.partial(make, rows, ["train"]), name=name)
    assert share_on_host(functools.partial(make, rows, ["train"]), name=name) == kept
    for other in (functools.partial(make, rows, ["valid"]), lambda: rows):
        with pytest.raises(LoaderError, match="with another function, or other arguments"):
            share_on_host(other, name=name)


def make(rows: Any, split: str) -> Any:
    return rows


def test_what_would_be_copied_into_every_rank_is_refused_with_its_size(name: str) -> None:
    refused = pytest.raises(
        LoaderError, match=r"20,\d\d\d,\d\d\d bytes of the Box .* would be copied into every rank"
    )
    with pytest.warns(NotSharedWarning, match=r"Box\.content, a bytearray"), refused:
        share_on_host(lambda: Box(bytearray(20_000_000)), name=name)


def test_the_server_is_in_a_session_of_its_own(name: str) -> None:
    """A Ctrl-C at the terminal, or a launcher that kills a process group, must not end it."""
    shared = share_on_host(Building(build), name=name)
    (server,) = servers()
    assert os.getsid(server.pid) != os.getsid(0)
    assert server.ppid() != os.getpid()  # so no process has to wait for it
    del shared


def test_as_many_stores_as_ranks_can_be_given(name: str) -> None:
    count = host_server.MOST_FDS - 1
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3 * count + 50:
        pytest.skip("a descriptor for each store, on both sides and on its way (ulimit -n)")
    stores = [share([number]) for number in range(count)]
    built = share_on_host(Building(lambda: Box(stores)), name=name)
    attached = share_on_host(Building(build_never), name=name)
    assert [list(store) for store in attached.content] == [[number] for number in range(count)]
    assert len(built.content) == count
    with pytest.raises(LoaderError, match=f"lies in {count + 1} pieces .* can be given {count}"):
        share_on_host(Building(lambda: Box([*stores, share([0])])), name=f"{name} more")


def test_an_object_without_shared_memory_is_passed_on_too(name: str) -> None:
    """Run in a process of its own: the connection is then held as long as the process lives."""
    ours, theirs = FORK.Pipe()

    def hold() -> None:
        theirs.send(share_on_host(Building(lambda: Box(5)), name=name).content)
        theirs.recv()

    holder = FORK.Process(target=hold)
    holder.start()
    assert ours.recv() == 5

    def attach() -> None:
        theirs.send(share_on_host(Building(lambda: Box(6)), name=name).content)

    attacher = FORK.Process(target=attach)
    attacher.start()
    assert ours.recv() == 5
    ours.send("end")
    for process in (holder, attacher):
        process.join()
        process.close()
    ours.close()
    theirs.close()


def test_what_was_done_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shmloader"):
        shared = share_on_host(Building(build), name=name)
        share_on_host(Building(build_never), name=name)
    text = caplog.text
    assert f"built {shared.buffer.nbytes:,} bytes" in text
    assert f"attached to {shared.buffer.nbytes:,} bytes" in text


# Real ranks, each a program.

PROGRAM = """
import os, sys
import torch, torch.distributed
import shmloader

if sys.argv[2] == "gloo":
    torch.distributed.init_process_group("gloo")
def build():
    print("built", flush=True)
    return [{"number": n, "text": str(n)} for n in range(1000)]
store = shmloader.share_on_host(build, name=sys.argv[1])
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return len(store)
    def __getitem__(self, index): return store[index]["number"]
with shmloader.DataLoader(Numbers(), batch_size=100, num_workers=1, multiprocessing_context="fork") as loader:
    total = torch.tensor(sum(int(batch.sum()) for batch in loader))
if sys.argv[2] == "gloo":
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
print("inode", os.fstat(store.buffer.fd).st_ino, "total", int(total), flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("group", ["gloo", "none"])
def test_two_ranks_as_torchrun_starts_them(tmp_path: Path, name: str, group: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    limit = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    ranks = [
        subprocess.Popen(
            [*limit, sys.executable, str(script), name, group],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lines = []
    try:
        for rank in ranks:
            assert rank.stdout is not None
            while not (line := rank.stdout.readline()).startswith("inode"):
                assert line, rank.communicate()[1]
                lines.append(line)
            lines.append(line)
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert lines.count("built\n") == 1
    (result,) = {line for line in lines if line.startswith("inode")}
    assert result.split()[-1] == str(sum(range(1000)) * (2 if group == "gloo" else 1))


def test_a_rank_that_ends_by_sigterm_leaves_nothing(start: Any) -> None:
    rank = start(build)
    rank.result()
    (server,) = servers()
    os.kill(rank.process.pid, signal.SIGTERM)
    rank.process.join()
    assert wait_for(lambda: is_gone(server))
