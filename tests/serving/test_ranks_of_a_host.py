"""``shared_by="host"``: ranks of a host get the same batches from one process, which local rank 0 starts."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from robustness.processes import has_ended
from serving_programs import WAIT_S, Numbers, numbers, plain, wait_until
from warm_python import warm_python

import shmloader
from shmloader.loading import loading_of
from shmloader.serving import ranks as serving_ranks

FORK = multiprocessing.get_context("fork")
_runs = itertools.count()


class Ranks:
    """Two forked ranks of one run, each of which sends what a function returns, or its exception."""

    def __init__(self, program: Callable[..., Any], *given: Any, ranks: int = 2) -> None:
        self.pipes, self.processes = [], []
        run = f"{os.getpid()}-{next(_runs)}"
        for rank in range(ranks):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=self._run, args=(theirs, rank, ranks, run, program, given))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _run(self, pipe: Any, rank: int, ranks: int, run: str, program: Any, given: Any) -> None:
        for prefix in ("", "LOCAL_"):
            os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(ranks)}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = run  # tests do not meet each other
        try:
            pipe.send(program(rank, *given))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        if pipe.poll(WAIT_S):
            pipe.recv()

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(WAIT_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def end(self, *, kill: int | None = None) -> None:
        if kill is not None:
            self.processes[kill].kill()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it was killed
                pipe.send("end")
            pipe.close()
        for process in self.processes:
            process.join(WAIT_S)
            assert process.exitcode is not None, "a rank hangs at its end"
            process.close()


def outcomes(program: Callable[..., Any], *given: Any) -> list[Any]:
    ranks = Ranks(program, *given)
    try:
        return [ranks.hear(rank) for rank in range(2)]
    except AssertionError:
        for process in ranks.processes:
            process.kill()
        raise
    finally:
        ranks.end()


def shared(**options: Any) -> shmloader.DataLoader[Any]:
    return numbers(shared_by="host", **options)


class Unsized(torch.utils.data.Dataset[Any]):
    """Has no length: its sampler has."""

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}


def epochs(rank: int) -> Any:
    train = shared(seed_per_sample=True)
    small = shared(dataset=Unsized(), shuffle=False, sampler=range(8))
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    got = [[plain(batch) for batch in train], [batch["index"].tolist() for batch in small]]
    got.append([plain(batch) for batch in train])
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn in the rank
    statistics = train.statistics()
    assert statistics.batches == 32 == 2 * len(train)
    assert statistics.wait_for_workers_s > 0
    small.close()
    got.append([batch["index"].tolist() for batch in small])
    return got


def test_each_rank_gets_the_batches_of_one_program() -> None:
    one, other = outcomes(epochs)
    assert one == other
    alone = numbers(seed_per_sample=True)
    order = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert one == [[plain(batch) for batch in alone], order, [plain(batch) for batch in alone], order]


def made_anew(rank: int, seed: int | None) -> Any:
    """The order of a loader, of the same after it was closed, of another one, and of one after a new seed."""
    torch.manual_seed(0)

    def make() -> Any:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return shmloader.DataLoader(Numbers(), 4, shuffle=True, generator=generator, shared_by="host")

    loader = make()
    orders = []
    for one in (loader, loader, make()):
        orders.append([index for batch in one for index in batch["index"].tolist()])
        one.close()
    torch.manual_seed(5)
    with make() as last:
        return [*orders, [index for batch in last for index in batch["index"].tolist()]]


@pytest.mark.parametrize("seed", [None, 3])
def test_orders_differ_where_a_loader_is_made_anew_unless_its_own_generator_says_else(
    seed: int | None,
) -> None:
    one, other = outcomes(made_anew, seed)
    assert one == other
    assert len({tuple(order) for order in one}) == (4 if seed is None else 1)
    for number, global_seed in ((0, 0), (3, 5)):
        alone = numbers(0, generator=None if seed is None else torch.Generator().manual_seed(seed))
        torch.manual_seed(global_seed)
        assert one[number] == [index for batch in alone for index in batch["index"].tolist()]


class Told(Numbers):
    """Says in its samples which epoch it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.epoch, index


def told(rank: int) -> Any:
    """Epochs of which the loader is told, or the sampler alone, as frameworks do."""
    sampler = torch.utils.data.DistributedSampler(range(16), 1, 0)  # this host's share of one host's
    loader = shmloader.DataLoader(Told(16), 4, sampler=sampler, num_workers=1, shared_by="host")
    got = []
    for epoch in (3, 4, 5):
        (loader if epoch == 3 else sampler).set_epoch(epoch)
        batches = list(loader)
        sampler.set_epoch(epoch)
        assert [index for _, indices in batches for index in indices.tolist()] == list(sampler)
        got.append({int(one) for epochs, _ in batches for one in epochs})
    loading_of(loader).set_dataset_epoch(6)  # as Lightning and accelerate do, for datasets
    return [*got, {int(one) for epochs, _ in loader for one in epochs}]


def test_epochs_are_told_by_the_loader_or_its_sampler() -> None:
    assert outcomes(told) == [[{3}, {4}, {5}, {6}]] * 2


def states(rank: int, state: Any) -> Any:
    loader = shared(seed_per_sample=True)
    if state is not None:
        loader.load_state_dict(state)
    begin = loader.state_dict()
    assert begin == (state or begin)
    if state is None and rank == 0:  # a state names the rank whose loader it is of: here the one that serves
        assert begin == numbers(seed_per_sample=True).state_dict()
    got = []
    for batch in loader:
        got.append(plain(batch))
        if len(got) == 3 + rank:
            break
    left = loader.state_dict()
    time.sleep(0.05)  # the serving process goes on meanwhile
    assert loader.state_dict() == left
    return got, begin, left


def test_each_rank_has_the_state_of_its_place_and_all_go_on_from_one() -> None:
    alone = numbers(seed_per_sample=True)
    expected = [plain(batch) for batch in alone]
    results = outcomes(states, None)
    assert all(type(result) is tuple for result in results), results
    (first, begin, state), (second, same, later) = results
    assert (first, second, same) == (expected[:3], expected[:4], begin)
    assert (state["batches"], later["batches"]) == (3, 4)
    (first, _, _), (second, _, after) = outcomes(states, later)
    assert (first, second) == (expected[4:7], expected[4:8])
    assert after["batches"] == 8


def divided(rank: int, kind: Any) -> Any:
    sampler = kind(range(64), num_replicas=2, rank=rank)
    return next(iter(shmloader.DataLoader(Numbers(), 4, sampler=sampler, shared_by="host")))


@pytest.mark.parametrize("kind", [torch.utils.data.DistributedSampler, shmloader.ShardedSampler])
def test_a_sampler_over_all_ranks_is_refused_by_name(kind: Any) -> None:
    for rank, said in enumerate(outcomes(divided, kind)):
        assert said.startswith("LoaderError: shared_by='host' gives all ranks of a host the same batches")
        assert f"a {kind.__name__}, has the share of rank {rank} of 2 alone" in said


def different(rank: int) -> Any:
    loader = shared(batch_size=4 + rank)
    if rank == 1:
        return len(list(loader))
    iter(loader)
    return "ready"


def test_ranks_with_different_loaders_are_told() -> None:
    assert outcomes(different) == [
        "ready",
        (
            "LoaderError: with shared_by='host' all ranks of a host make the same loader, for they get the "
            "same batches. Local rank 0 has: Numbers, 64 samples, batch_size=4, BatchSampler, RandomSampler; "
            "and this rank: Numbers, 64 samples, batch_size=5, BatchSampler, RandomSampler"
        ),
    ]


def fails_to_start(rank: int) -> Any:
    def fails(*_: Any) -> None:
        raise OSError("not here")

    serving_ranks.run_server = fails
    return next(iter(shared())) if rank == 0 else ""


def test_a_process_that_cannot_serve_is_named() -> None:
    said, _ = outcomes(fails_to_start)
    assert "ServerDied: the process that was to serve a loader" in said
    assert "exited with code 1" in said


def cut_short(rank: int) -> Any:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    if rank:
        return None
    serving_ranks._attach = interrupted
    with pytest.raises(KeyboardInterrupt):
        iter(shared())
    return [child.name() for child in psutil.Process().children()]


def test_a_rank_that_is_cut_short_while_it_attaches_leaves_no_process() -> None:
    """Nor does it wait for that at its own end."""
    assert outcomes(cut_short) == [[], None]


def read_on(rank: int, pipe: Any, samples: int) -> Any:
    batches = iter(shared(dataset=Numbers(samples)))
    kept = [next(batches) for _ in range(3)]
    right = plain(kept)
    pipe.send([child.pid for child in psutil.Process().children(recursive=True)])
    try:
        for _ in batches:
            pass
    except shmloader.ServerDied as died:
        assert plain(kept) == right
        return str(died)


@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_rank(killed: int) -> None:
    """Local rank 0's ends all with the error that names its process; another one's is nothing to the rest."""
    ours, theirs = FORK.Pipe()
    ranks = Ranks(read_on, theirs, 4000 if killed else 4_000_000)  # to the end, or much more than are read
    processes = {pid for _ in range(2) for pid in ours.recv()}
    assert len(processes) >= 3  # one serves, two load
    ranks.processes[killed].kill()
    if killed == 0:
        assert "which served 'ranks-" in ranks.hear(1)
    else:
        assert ranks.hear(0) is None  # it has read all
    ranks.end(kill=0)
    for end in (ours, theirs):
        end.close()
    wait_until(lambda: all(map(has_ended, processes)))


def alone(rank: int) -> Any:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    loader = shared()
    batches = [plain(batch) for batch in loader]
    del os.environ["LOCAL_WORLD_SIZE"]
    try:
        len(list(shared()))
    except ValueError as error:
        return batches, str(error), "shmloader.serving.server" in sys.modules
    return None


def test_a_rank_alone_on_its_host_loads_by_itself_and_missing_numbers_are_named() -> None:
    for batches, said, _ in outcomes(alone):
        assert batches == [plain(batch) for batch in numbers()]
        assert "LOCAL_RANK is '0' and LOCAL_WORLD_SIZE is None" in said
    assert len(list(shared())) == 16  # not in a run


def others(rank: int) -> Any:
    loader, said = shared(), []
    calls = lambda: loader.follow([]), lambda: loader.batch(0, 0), loader.profile, lambda: aiter(loader)
    for call in calls:
        with pytest.raises(shmloader.LoaderError, match="not there for a loader with shared_by='host'"):
            call()
        said.append(True)
    return said


def test_what_is_not_there_is_an_error() -> None:
    assert outcomes(others) == [[True] * 4] * 2
    with pytest.raises(ValueError, match="shard='auto' divides a stream among all ranks"):
        shmloader.DataLoader(Stream(), shard="auto", shared_by="host")
    with pytest.raises(ValueError, match="shared_by must be one of 'host', not 'rank'"):
        shmloader.DataLoader(Numbers(), shared_by="rank")  # type: ignore[arg-type]


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream without items."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


PROGRAM = """
import json, os, signal, sys
import torch, torch.distributed as dist
import shmloader

class Told(torch.utils.data.Dataset):
    epoch = -1
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([self.epoch, index, torch.randint(1000, ()).item()])

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once a rank has died
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    def make(**options):
        return shmloader.DataLoader(Told(), 8, num_workers=1, shared_by="host", **options)
    try:
        next(iter(make(sampler=torch.utils.data.DistributedSampler(range(64)))))
    except shmloader.LoaderError as error:
        assert f"has the share of rank {rank} of 2 alone" in str(error)
    loader = make(shuffle=True)
    for epoch in (5, 6):
        loader.set_epoch(epoch)
        batches = torch.stack(list(loader))
        both = [torch.empty_like(batches) for _ in range(2)]
        dist.all_gather(both, batches)
        assert torch.equal(*both) and batches[:, :, 0].unique().tolist() == [epoch]
        assert sorted(batches[:, :, 1].flatten().tolist()) == list(range(64))
    batches = iter(loader)
    state = (next(batches), loader.state_dict())[1]
    states = [None, None]
    dist.all_gather_object(states, state)
    assert states[0] == states[1] and state["batches"] == 1
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            for batch in batches:
                pass
            batches = iter(loader)
    except shmloader.ServerDied as died:
        with open(sys.argv[1], "w") as file:
            json.dump([died.pid, str(died)], file)
"""


def test_two_ranks_under_torchrun_and_the_death_of_the_one_that_serves(tmp_path: Path) -> None:
    script, result = tmp_path / "train.py", tmp_path / "result.json"
    script.write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), str(result)]
    done = subprocess.run(
        [*warm_python(), *command],
        check=False,  # a rank is killed
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "without libuv support" in done.stderr:
        pytest.skip("this torch was built without libuv, which torchrun needs")
    assert result.exists(), done.stderr
    pid, said = json.loads(result.read_text())
    assert f"process {pid}, which served" in said
    assert "exitcode  : -9" in done.stderr
    wait_until(lambda: has_ended(pid))
