"""Ray Train: the page's program, killed and on other ranks; the loaders that Ray builds anew."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shmloader
from frameworks.hosts import HOSTS, Host, wait_until
from frameworks.pages import needs
from frameworks.rows import Rows
from shmloader import errors

needs("ray.train.torch")
ray_torch = pytest.importorskip(
    "ray.train.torch", reason="ray[train] is not installed: make test-integrations"
)
from ray.train.torch import train_loop_utils  # noqa: E402
from ray.train.v2.torch import train_loop_utils as later  # noqa: E402

ENVIRONMENT = os.environ | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}
PROGRAM = Path(__file__).with_name("ray_page.py")


class Context:
    """Stands for the context of a worker of Ray Train, as far as `prepare_data_loader` asks it."""

    def get_world_size(self) -> int:
        return 2

    def get_world_rank(self) -> int:
        return 1


class Half(DistributedSampler[Any]):
    """Asks no process group, which is not there."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, 2, 1, **options)


@pytest.fixture
def in_rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later.ray.train, "get_context", Context)
    monkeypatch.setattr(later.ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(later, "DistributedSampler", Half)


def loader_of(**options: Any) -> Any:
    options = {"num_workers": 1, "multiprocessing_context": "fork"} | options
    return shmloader.DataLoader(Rows(), batch_size=4, **options)


OPTIONS = {
    "prefetch_factor": 5,
    "persistent_workers": True,
    "in_order": False,
    "dispatch": "dynamic",
    "on_error": "skip",
    "worker_restarts": 3,
}


def test_the_class_and_the_options_survive(in_rank_1_of_2: None) -> None:
    with shmloader.install():
        prepared = later.prepare_data_loader(loader_of(**OPTIONS))
        inside = prepared._dataloader
        assert type(inside) is shmloader.DataLoader
        assert {name: getattr(inside, name) for name in OPTIONS} == OPTIONS
        assert inside.multiprocessing_context.get_start_method() == "fork"
        assert isinstance(inside.sampler, DistributedSampler)
        assert len(list(prepared)) == len(inside)
        stock = later.prepare_data_loader(DataLoader(Rows(), batch_size=4))
        assert type(stock._dataloader) is DataLoader
    assert later.DataLoader is train_loop_utils.DataLoader is DataLoader


def test_a_batch_sampler_that_ray_leaves_out_is_an_error(in_rank_1_of_2: None) -> None:
    """Ray would have the samples one by one; it leaves the loader alone if it is not to divide it."""
    sampler = shmloader.TokenBatchSampler([3] * len(Rows()), 12, num_replicas=2, rank=1)
    with shmloader.install():
        loader: Any = shmloader.DataLoader(Rows(), batch_sampler=sampler)
        whole = [batch.tolist() for batch in loader]
        with pytest.raises(ValueError, match=r"Ray leaves out the batch_sampler \(TokenBatchSampler\)"):
            later.prepare_data_loader(loader)
        prepared = later.prepare_data_loader(loader, add_dist_sampler=False)
        assert [batch.tolist() for batch in prepared] == whole


def test_without_install_one_warning_says_what_goes(in_rank_1_of_2: None) -> None:
    errors.forget_warnings() if hasattr(errors, "forget_warnings") else None
    with pytest.warns(
        RuntimeWarning, match=r"builds a loader of torch's class .* Call shmloader.install\(\)"
    ):
        loader = loader_of()
    assert type(later.prepare_data_loader(loader)._dataloader) is DataLoader


def test_states_are_of_the_batch_that_came_out_of_the_wrapper() -> None:
    """After each batch, after the epoch, and of a next one that is left; they continue in a new loader."""
    with shmloader.install():
        whole = [batch.tolist() for batch in loader_of()]
        wrapper = train_loop_utils._WrappedDataLoader(loader_of(), torch.device("cpu"), False)
        states = []
        for number, _ in enumerate(wrapper, 1):
            states.append(wrapper.state_dict())
            assert states[-1]["batches"] == number
        assert number == len(whole)
        assert wrapper.state_dict()["finished"]
        next(iter(wrapper))
        assert wrapper.state_dict()["batches"] == 1
        for number, state in enumerate(states, 1):
            again = train_loop_utils._WrappedDataLoader(loader_of(), torch.device("cpu"), False)
            again.load_state_dict(state)
            assert [batch.tolist() for batch in again] == whole[number:]


@pytest.mark.timeout(900)
def test_a_killed_rank_and_other_ranks_go_on_with_the_page(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert_runs_go_on(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_same_with_ranks_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0", "RAY_memory_monitor_refresh_ms": "0"}
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    ray += ["--num-cpus=2", "--object-store-memory=100000000"]
    alpha, beta = hosts
    address = f"{HOSTS['alpha']}:6379"
    cluster = []
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # short, for names of sockets
        try:
            for host, role in (
                (alpha, ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]),
                (beta, [f"--address={address}"]),
            ):
                host.output("mount", "-t", "tmpfs", "ray", folder)
                command = [*ray, *role, f"--node-ip-address={HOSTS[host.name]}"]
                cluster.append(host.start(command, tmp_path, environment))
                log = tmp_path / f"{host.name}.log"
                assert wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 120)
            alpha.name = "program"  # for its log
            command = [sys.executable, str(PROGRAM), str(tmp_path), address]
            cluster.append(alpha.start(command, tmp_path, environment))
            assert wait_until(lambda: cluster[-1].poll() is not None, 600)
            assert not cluster[-1].returncode, (tmp_path / "program.log").read_text()[-4000:]
        finally:
            for process in reversed(cluster):
                process.terminate()
                process.wait(60)
        assert wait_until(lambda: not any(host.left() for host in hosts), 30), [host.left() for host in hosts]
    for run in ("killed", "three"):
        assert {path.name for path in (tmp_path / run / "lines").glob("host *")} == {
            "host alpha",
            "host beta",
        }
    assert_runs_go_on(tmp_path)


def assert_runs_go_on(folder: Path) -> None:
    """Check what the page's program has written: batches and losses."""

    def lines(run: str, rank: int, attempt: int = 0) -> list[str]:
        return (folder / run / "lines" / f"rank {rank}, attempt {attempt}").read_text().splitlines()

    expected = torchs_lines()
    for rank in range(2):
        killed, rest, whole = lines("killed", rank), lines("killed", rank, 1), expected[rank]
        assert killed == whole[: len(killed)]
        begun = 60 - len(rest)  # at a fourth batch before rank 1's 15th, whose checkpoint Ray had by then
        assert begun in (4, 8, 12)
        assert rest == whole[begun:]
    had = [index for rank in range(2) for line in expected[rank][:12] for index in indices(line)]
    of_three = [line for rank in range(3) for line in lines("three", rank) if line.split()[1] == "0"]
    assert sorted(had + [index for line in of_three for index in indices(line)]) == list(range(480))


def torchs_lines() -> list[list[str]]:
    """The lines of both ranks with torch's loader and sampler, in one process: gradients are averaged."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.arange(480), torch.arange(480.0).reshape(480, 1) / 480)
    samplers = [DistributedSampler(dataset, 2, rank, seed=7) for rank in range(2)]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines: list[list[str]] = [[], []]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(dataset, batch_size=8, sampler=sampler) for sampler in samplers]
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            for rank, (index, x) in enumerate(batches):
                loss = (model(x) - x).square().mean()
                (loss / 2).backward()
                lines[rank].append(f"{rank} {epoch} {index.tolist()} {loss.item().hex()}")
            optimizer.step()
    return lines


def indices(line: str) -> list[int]:
    return [int(index) for index in line.partition("[")[2].partition("]")[0].split(",")]
