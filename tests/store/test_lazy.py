"""Parquet files that are read lazily: the rows, what is in memory, other file systems, damaged files."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lazy_files import MIXED, PLAIN, allocated_nbytes, as_text, damage, write, write_columns
from object_store import object_store
from parity.compare import assert_same
from stream_datasets import identity
from warm_python import STRICT, warm_python

import shmloader
from shmloader import BlockSampler, DataLoader, LoaderError, share
from shmloader.store.row_groups import RowGroups


@pytest.mark.parametrize("rows", [MIXED, PLAIN], ids=["mixed", "plain"])
@pytest.mark.parametrize("cache_nbytes", [None, 1, 3000])
def test_rows_are_those_of_the_store_in_memory(
    tmp_path: Path, rows: list[Any], cache_nbytes: int | None
) -> None:
    write(tmp_path / "a", rows)
    lazy = shmloader.open(tmp_path / "a", lazy=True, cache_nbytes=cache_nbytes)
    store = shmloader.open(tmp_path / "a")
    assert len(lazy) == 90
    assert list(map(as_text, lazy)) == list(map(as_text, store)) == list(map(as_text, rows))
    numbers = [3, 88, 3, -1, *range(0, 90, 4)]
    assert as_text(lazy.__getitems__(numbers)) == as_text(store.__getitems__(numbers))
    for some in (numbers, [5], [16, 17, 18], range(90)):
        assert as_text(lazy.take(some)) == as_text(store.take(some))
    assert as_text(list(lazy[::-7])) == as_text(list(store[::-7]))
    for number in (90, -91):
        with pytest.raises(IndexError):
            lazy[number]
    with pytest.raises(IndexError):
        lazy.take([0, 90])
    assert as_text(pickle.loads(pickle.dumps(lazy))[50]) == as_text(rows[50])
    assert as_text(lazy.take([])) == as_text(store.take([]))
    assert lazy.__getitems__([]) == []


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path / "a", PLAIN)
    lazy = shmloader.open(paths, lazy=True, columns=["n", "text"])
    assert lazy[31] == {"n": 31, "text": "31"}
    assert [one.name for one in lazy.describe().fields] == ["n", "text"]
    assert "90 rows of kind 'records'" in repr(lazy)
    with pytest.raises(TypeError, match=r"columns=\['n'\] of open"):
        lazy["n"]
    with pytest.raises(TypeError, match=r"pyarrow\.dataset"):
        lazy.to_arrow()
    with pytest.raises(TypeError, match=r"\['n'\], not one name"):
        shmloader.open(paths, lazy=True, columns="n")
    with pytest.raises(KeyError, match="no column 'm'"):
        shmloader.open(paths, lazy=True, columns=["m"])
    with pytest.raises(ValueError, match="pass lazy=True too"):
        shmloader.open(paths, cache_nbytes=5)
    with pytest.raises(ValueError, match="cache_nbytes=0 must be"):
        shmloader.open(paths, lazy=True, cache_nbytes=0)
    with pytest.raises(FileNotFoundError, match="matches no"):
        shmloader.open(str(tmp_path / "b*.parquet"), lazy=True)
    share({"a": 1, "b": 2}).save(tmp_path / "mapping.parquet")
    with pytest.raises(ValueError, match=r"holds a mapping.*without lazy=True"):
        shmloader.open(tmp_path / "mapping.parquet", lazy=True)
    share(PLAIN).save(tmp_path / "store.arrow")
    with pytest.raises(ValueError, match=r"store\.arrow is damaged, no file of Arrow's.* cannot read"):
        shmloader.open(tmp_path / "store.arrow", lazy=True)
    write_columns(tmp_path / "other.parquet", 5, 5)
    with pytest.raises(ValueError, match=r"other\.parquet has other rows than .*0\.parquet"):
        shmloader.open([*paths, tmp_path / "other.parquet"], lazy=True)
    share([{"f": {1: object}}] * 3).save(tmp_path / "pickled.parquet")
    with pytest.raises(ValueError, match="has pickled values"):
        shmloader.open(tmp_path / "pickled.parquet", lazy=True)
    assert shmloader.open(tmp_path / "pickled.parquet", lazy=True, allow_pickle=True)[2] == {"f": {1: object}}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "worker_type": "thread"},
        pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.long),
        {"num_workers": 1, "multiprocessing_context": "forkserver"},
    ],
    ids=str,
)
def test_batches_are_those_of_the_store_in_memory(tmp_path: Path, arguments: dict[str, Any]) -> None:
    rows = [{name: value for name, value in row.items() if name != "some"} for row in PLAIN]
    write(tmp_path / "a", rows)
    lazy = shmloader.open(tmp_path / "a", lazy=True, cache_nbytes=2000)
    assert lazy[3] == rows[3]  # so that this process has read, too
    assert shmloader.why_per_sample(lazy) is None
    sampler = BlockSampler(lazy, 1, 0, window=2, lanes=2, run_length=7)
    batches = DataLoader(lazy, 7, sampler=sampler, **arguments)
    wanted = DataLoader(shmloader.open(tmp_path / "a"), 7, sampler=sampler)
    for got, want in zip(batches, wanted, strict=True):
        assert as_text(got) == as_text(want)
    samples: Any = DataLoader(lazy, 7, sampler=sampler, collate_fn=identity, **arguments)
    assert sorted(row["n"] for batch in samples for row in batch) == list(range(90))
    samples.close()
    batches.close()


def reads(monkeypatch: pytest.MonkeyPatch, log: Path) -> Callable[[], list[tuple[int, int]]]:
    """Notes process and number of each row group that is read."""
    read = RowGroups.read

    def noted(self: RowGroups, groups: Any) -> Any:
        with log.open("a") as file:
            file.write("".join(f"{os.getpid()} {group}\n" for group in groups))
        return read(self, groups)

    monkeypatch.setattr(RowGroups, "read", noted)
    return lambda: [tuple(map(int, line.split())) for line in log.read_text().splitlines()]  # type: ignore[misc]


def test_each_row_group_is_read_once_by_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_columns(tmp_path / "a.parquet", 4800, 100)
    noted = reads(monkeypatch, tmp_path / "log")
    lazy = shmloader.open(path, lazy=True, cache_nbytes=5 * 100 * 160)
    sampler = BlockSampler(lazy, 1, 0, window=4, lanes=2, run_length=50)
    seen = np.concatenate([batch["c0"] for batch in DataLoader(lazy, 50, sampler=sampler, num_workers=2)])
    assert sorted(seen) == list(range(4800))
    assert sorted(group for _, group in noted()) == list(range(48))
    assert len({pid for pid, _ in noted()}) == 2


def test_single_rows_keep_the_row_groups_that_were_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = reads(monkeypatch, tmp_path / "log")
    lazy = shmloader.open(write_columns(tmp_path / "a.parquet", 300, 100), lazy=True, cache_nbytes=40_000)
    for row in (0, 100, 1, 200, 2):
        assert lazy[row]["c3"] == row + 3
    assert [group for _, group in noted()] == [0, 1, 2]


def test_memory_stays_constant(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "a.parquet", 80_000, 1000)
    gc.collect()
    group_nbytes, before_nbytes = 160_000, pa.total_allocated_bytes()
    lazy = shmloader.open(path, lazy=True, cache_nbytes=8 * group_nbytes)
    order = BlockSampler(lazy, 1, 0, window=6, run_length=100)
    dice, most_nbytes = np.random.default_rng(0), 0
    for rows in itertools.chain(np.reshape(list(order), (-1, 100)), dice.integers(0, 80_000, (20, 30))):
        taken = lazy.take(rows)
        assert (taken["c7"] == rows + 7).all()
        most_nbytes = max(most_nbytes, allocated_nbytes(before_nbytes, 9 * group_nbytes))
    assert 6 * group_nbytes <= most_nbytes <= 9 * group_nbytes
    del lazy, taken, order
    assert pa.total_allocated_bytes() - before_nbytes < group_nbytes


def test_arrays_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "a", [{"array": np.arange(1000) + n} for n in range(90)])
    lazy = shmloader.open(tmp_path / "a", lazy=True, cache_nbytes=1)
    kept = [row["array"] for row in lazy]
    assert all((array == np.arange(1000) + n).all() for n, array in enumerate(kept))
    assert not kept[0].flags.writeable


def test_reading_much_for_few_rows_is_told_once(tmp_path: Path) -> None:
    lazy = shmloader.open(write_columns(tmp_path / "a.parquet", 10_000, 100), lazy=True, cache_nbytes=1)
    with pytest.warns(
        RuntimeWarning, match=r"64 row groups of 6,400 rows were read for .*BlockSampler"
    ) as told:
        for row in range(0, 10_000, 100):
            lazy[row]
    assert len(told) == 1


def test_workers_with_a_limit_of_memory_may_count_what_they_read(tmp_path: Path) -> None:
    lazy = shmloader.open(write_columns(tmp_path / "a.parquet", 400, 10), lazy=True, cache_nbytes=1)
    for store in (lazy, shmloader.share([f"row {n}" for n in range(400)])[5:]):
        plain = DataLoader(store, batch_size=10, collate_fn=identity)
        limited = DataLoader(store, 10, num_workers=1, collate_fn=identity, worker_max_nbytes=1 << 40)
        assert_same(list(limited), list(plain))


@pytest.mark.parametrize("workers", [(2, 0), (0, 2), (1, 2)], ids=str)
def test_an_epoch_is_resumed_to_the_row_by_other_ranks_and_workers(
    tmp_path: Path, workers: tuple[int, int]
) -> None:
    lazy = shmloader.open(write_columns(tmp_path / "a.parquet", 960, 40), lazy=True, cache_nbytes=30_000)

    def loaders(ranks: int, num_workers: int) -> Iterator[DataLoader[Any]]:
        for rank in range(ranks):
            lanes = ranks * max(1, num_workers)
            sampler = BlockSampler(lazy, ranks, rank, window=3, lanes=lanes, run_length=10)
            yield DataLoader(lazy, 10, sampler=sampler, num_workers=num_workers)

    seen: list[int] = []
    state = None
    for loader in loaders(2, workers[0]):
        seen += torch.cat([batch["c0"] for batch in itertools.islice(loader, 13)]).tolist()
        state = loader.state_dict()
        loader.close()
    for loader in loaders(3, workers[1]):
        loader.load_state_dict(state)
        seen += torch.cat([batch["c0"] for batch in loader]).tolist()
        loader.close()
    assert set(seen) == set(range(960))
    assert len(seen) <= 960 + 2


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "a.parquet", 100, 10)
    lazy = shmloader.open(path, lazy=True)
    lazy[5]
    write_columns(path, 100, 10)
    os.utime(path, (1, 1))  # clocks of files have ticks, and it is as large as before
    with pytest.raises(LoaderError, match=r"a\.parquet was changed since it was opened"):
        lazy[50]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.parquet"):
        lazy[60]


def test_a_damaged_row_group_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "a.parquet", 100, 10, columns=1)
    damage(path, 3)
    lazy = shmloader.open(path, lazy=True)
    assert lazy[29] == {"c0": 29}
    for read in (lambda: lazy[35], lambda: lazy.take([1, 35] * 10), lambda: lazy.__getitems__([35])):
        with pytest.raises(ValueError, match=r"a\.parquet, row group 3 is damaged, no file"):
            read()
    with pytest.warns(Warning, match="bad"):
        loader = DataLoader(lazy, 10, on_error="skip", num_workers=1)
        assert [number for batch in loader for number in batch["c0"].tolist()] == [
            number for number in range(100) if number // 10 != 3
        ]


# --- other file systems


@pytest.fixture(scope="module")
def s3() -> None:
    """Lets Arrow begin what it keeps for S3 as long as the process lives."""
    pa.fs.S3FileSystem(anonymous=True, region="us-east-1")


def blocking_s(client: Any, path: str) -> float:
    """What a client takes that reads one row group after another: four times that of a quarter of them."""
    began_s = time.perf_counter()
    parquet = pq.ParquetFile(client.open_input_file(path), pre_buffer=False)
    for group in range(parquet.num_row_groups // 4):
        parquet.read_row_group(group, use_threads=False)
    return 4 * (time.perf_counter() - began_s)


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_object_store_is_read_by_several_requests_at_once(
    tmp_path: Path, method: str, warm_helpers: None
) -> None:
    """Arrow's client of S3, which this process has used before the workers start."""
    (tmp_path / "a").mkdir()
    write_columns(tmp_path / "a" / "0.parquet", 2400, 100)
    with object_store(tmp_path, delay_s=0.02) as store:
        one_s = blocking_s(store.client(), "data/a/0.parquet")
        lazy = shmloader.open("data/a/*.parquet", lazy=True, filesystem=store.client())
        assert lazy[7]["c1"] == 8
        sampler = BlockSampler(lazy, 1, 0, window=6, lanes=2, run_length=50)
        loader = DataLoader(
            lazy, 50, sampler=sampler, num_workers=2, multiprocessing_context=method, persistent_workers=True
        )
        iterator = iter(loader)
        seen = [next(iterator)["c0"]]  # workers have started
        store.requests = store.most_at_once = 0
        began_s = time.perf_counter()
        seen += [batch["c0"] for batch in iterator]
        took_s = time.perf_counter() - began_s
        loader.close()
        assert torch.cat(seen).sort().values.tolist() == list(range(2400))
        assert store.most_at_once >= 4
        assert store.requests < 24 * 4  # and not one for each of 20 columns
        assert took_s < one_s / 3
        with pytest.raises(FileNotFoundError, match="matches no Parquet"):
            shmloader.open("data/a/*.pq", lazy=True, filesystem=store.client())
        with pytest.raises(ValueError, match="these are not local"):
            shmloader.open("data/a/*.parquet", lazy=True, filesystem=store.client(), verify=True)
        with pytest.raises(ValueError, match="only the last part"):
            shmloader.open("data/*/0.parquet", lazy=True, filesystem=store.client())
        (tmp_path / "a" / "0.parquet").write_bytes(b"")
        with pytest.raises(LoaderError, match="was changed"):
            list(pickle.loads(pickle.dumps(lazy)))


@pytest.mark.usefixtures("s3")
def test_a_server_that_fails_is_an_oserror_that_names_the_file(tmp_path: Path) -> None:
    write_columns(tmp_path / "a.parquet", 100, 10)
    with object_store(tmp_path) as store:
        lazy = shmloader.open("data/a.parquet", lazy=True, filesystem=store.client())
        assert lazy[5]["c0"] == 5
        store.denies = True
        with pytest.raises(OSError, match=r"data/a\.parquet"):
            lazy[50]


class OfOneProcess(LocalFileSystem):
    """A file system like fsspec's asynchronous ones, which refuse to work after a fork."""

    cachable = False
    protocol = "of-one-process"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pid = os.getpid()

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.pid != os.getpid():
            raise RuntimeError("This class is not fork-safe")
        return super()._open(path, *arguments, **options)


def test_forked_workers_have_a_client_of_their_own(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "a.parquet", 100, 10)
    lazy = shmloader.open(path, lazy=True, filesystem=OfOneProcess())
    assert lazy[7]["c0"] == 7
    loader = DataLoader(lazy, 50, num_workers=1, multiprocessing_context="fork")
    assert [batch["c0"][0].item() for batch in loader] == [0, 50]


def test_file_systems_of_fsspec_are_read(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    data = write_columns(tmp_path / "a.parquet", 100, 10).read_bytes()
    memory.pipe({f"/lazy/{name}.parquet": data for name in "ab"})
    try:
        for path, given in (
            ("/lazy", memory),
            ("/lazy/*.parquet", memory),
            ("memory://lazy/*.parquet", None),
        ):
            lazy = shmloader.open(path, lazy=True, filesystem=given)
            assert len(lazy) == 200
            assert [batch["c0"][0].item() for batch in DataLoader(lazy, 50, num_workers=1)] == [0, 50] * 2
        with pytest.raises(ValueError, match="lies in another file system"):
            shmloader.open([tmp_path / "a.parquet", "memory://lazy/a.parquet"], lazy=True)
    finally:
        memory.rm("/lazy", recursive=True)
    lazy = shmloader.open([tmp_path / "a.parquet", f"file://{tmp_path}/a.parquet"], lazy=True)
    assert lazy[150] == lazy[50]


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty."""
    found = fsspec.filesystem("memory")

    def clear() -> None:
        found.store.clear()
        found.pseudo_dirs[:] = [""]

    clear()
    yield found
    clear()


def test_a_remote_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path, memory: Any) -> None:
    """As of a URL with a query."""
    one, two = (write_columns(tmp_path / f"{n}.parquet", n, 10).read_bytes() for n in (100, 200))
    names = ["/web/a.parquet?key=1", "/web/a[1].parquet", "/set[1]/a.parquet", "/web/[!a]?*.parquet"]
    memory.pipe(dict.fromkeys(names, one) | {"/web/a.parquet.key=1": two, "/web/a1.parquet": two})
    for name in names:
        assert len(shmloader.open(name, lazy=True, filesystem=memory)) == 100
        assert len(shmloader.open(f"memory:/{name}", lazy=True)) == 100
    assert len(shmloader.open("/set[1]", lazy=True, filesystem=memory)) == 100
    assert len(shmloader.open("/web/a?.parquet", lazy=True, filesystem=memory)) == 200
    with pytest.raises(ValueError, match="only the last part"):
        shmloader.open("/set[2]/a.parquet", lazy=True, filesystem=memory)


def test_urls_without_a_folder_are_read(tmp_path: Path, memory: Any) -> None:
    memory.pipe({f"/{name}.parquet": write_columns(tmp_path / "a", 100, 10).read_bytes() for name in "ab"})
    for url, rows in {"memory://a.parquet": 100, "memory://*.parquet": 200, "memory://": 200}.items():
        assert len(shmloader.open(url, lazy=True)) == rows


@pytest.mark.usefixtures("s3")
def test_a_whole_bucket_is_read(tmp_path: Path) -> None:
    write_columns(tmp_path / "a.parquet", 100, 10)
    with object_store(tmp_path) as store:
        options = f"scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{store.server_port}"
        assert len(shmloader.open(f"s3://key:secret@data?{options}", lazy=True)) == 100


def test_all_of_a_file_url_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "my set" / "é 100%25 [1]?.parquet"
    path.parent.mkdir()
    write_columns(path, 100, 10)
    write_columns(path.with_name("other 1.parquet"), 30, 10)
    assert len(shmloader.open(path.as_uri(), lazy=True)) == 100
    assert len(shmloader.open(f"{path.parent.as_uri()}/other%20?.parquet", lazy=True)) == 30
    assert len(shmloader.open(path.parent.as_uri(), lazy=True)) == 130


def test_a_file_of_fsspec_that_is_gone_is_not_called_damaged(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/gone/a.parquet", write_columns(tmp_path / "a.parquet", 100, 10).read_bytes())
    lazy = shmloader.open("/gone/a.parquet", lazy=True, filesystem=memory)
    memory.rm("/gone", recursive=True)
    with pytest.raises(FileNotFoundError, match=r"gone/a\.parquet"):
        lazy[5]


def test_the_program_of_the_page_resumes_to_the_row(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "larger-than-memory.md"
    found = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    (tmp_path / "train.py").write_text(found[1])
    done = subprocess.run(
        [*warm_python(), *STRICT, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "12000 12000\n"), done.stderr
