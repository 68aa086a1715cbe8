"""`TarStream`: the samples of a `TarDataset`, from compressed and remote archives; shards, places, damage."""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from robustness.processes import LONG
from stream_datasets import identity
from tar_archives import members_of, write

from shmloader import ArchiveError, DataLoader, TarDataset, TarStream

MUTATIONS = 20_000 if LONG else 300


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


def in_two_parts(data: bytes) -> bytes:
    return gzip.compress(data[:3000]) + gzip.compress(data[3000:])


def made(folder: Path, count: int = 4, of_each: int = 10) -> tuple[list[Path], list[dict[str, Any]]]:
    """Archives that are packed in several ways, and their samples."""
    paths, samples = [], []
    for number, pack in zip(range(count), [bytes, gzip.compress, zstd, in_two_parts] * count, strict=False):
        path = write(folder / f"{number}.tar", members_of(of_each, of_each * number))
        samples += list(TarDataset(path))
        path.write_bytes(pack(path.read_bytes()))
        paths.append(path)
    return paths, samples


def samples_of(loader: Any) -> list[Any]:
    return [one for batch in loader for one in batch]


def numbers(samples: list[Any]) -> list[int]:
    return sorted(one["json"]["n"] for one in samples)


def test_samples_are_those_of_a_dataset_however_they_are_packed(tmp_path: Path) -> None:
    paths, samples = made(tmp_path)
    assert list(TarStream(paths)) == samples
    some = TarStream(map(str, paths), members=["cls", ".SEG.bin"], decoders={"bin": len})
    assert [*some][2] == {"__key__": "part/00002", "cls": b"2\n", "seg.bin": 74}
    with pytest.raises(ValueError, match="at least one archive"):
        TarStream([])


def test_archives_of_any_file_system_are_read_in_workers(tmp_path: Path) -> None:
    paths, samples = made(tmp_path)
    remote = fsspec.filesystem("memory")
    for path in paths:
        remote.pipe(f"/tar-streams/{path.name}", path.read_bytes())
    try:
        urls = [f"memory://tar-streams/{path.name}" for path in paths]
        given = [f"/tar-streams/{path.name}" for path in paths]
        for stream in (TarStream(urls), TarStream(given, filesystem=remote)):
            with DataLoader(
                stream, 4, collate_fn=identity, num_workers=1, multiprocessing_context="fork"
            ) as loader:
                assert samples_of(loader) == samples
    finally:
        remote.rm("/tar-streams", recursive=True)


def test_archives_are_divided_and_an_epoch_is_resumed_in_the_middle_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, samples = made(tmp_path, 6)
    seen = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        settings: dict[str, Any] = {"collate_fn": identity, "shard": "auto"}
        with DataLoader(TarStream(paths), 4, num_workers=2, **settings) as loader:
            iterator = iter(loader)
            begun = [next(iterator) for _ in range(3)]
            state = loader.state_dict()
        with DataLoader(TarStream(paths), 4, num_workers=1, **settings) as loader:
            loader.load_state_dict(state)
            seen += [one for batch in (*begun, *loader) for one in batch]
    assert numbers(seen) == numbers(samples) == list(range(60))


def test_a_resumed_epoch_opens_no_archive_that_was_read(tmp_path: Path) -> None:
    paths, samples = made(tmp_path)
    iterator: Any = iter(TarStream(paths))
    assert [next(iterator) for _ in range(23)] == samples[:23]
    state = iterator.state_dict()
    assert state == {"archive": 2, "path": str(paths[2]), "samples": 3}
    paths[0].unlink()
    resumed: Any = iter(TarStream(paths))
    resumed.load_state_dict(state)
    assert [*resumed] == samples[23:]
    assert resumed.state_dict() == {"archive": 4, "path": None, "samples": 0}
    with pytest.raises(ValueError, match=r"archive 2 was .*2\.tar, and is .*3\.tar"):
        iter(TarStream(paths[1:])).load_state_dict(state)  # type: ignore[attr-defined]
    write(paths[2], members_of(2))
    resumed.load_state_dict(state)
    with pytest.raises(ArchiveError, match=r"2\.tar was changed: it has 2 samples, and 3 were read"):
        next(resumed)


def test_an_archive_is_read_on_after_an_interrupt(tmp_path: Path) -> None:
    paths, samples = made(tmp_path, 2)
    iterator: Any = iter(TarStream(paths))
    found = [next(iterator) for _ in range(4)]

    def interrupted() -> Iterator[Any]:
        yield from ()
        raise KeyboardInterrupt

    iterator._open = interrupted()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [*found, *iterator] == samples


def damaged(data: bytes, how: str) -> bytes:
    if how == "cut":
        return data[: len(data) // 2]
    if how == "turned":
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0x55]) * 3 + data[middle + 3 :]
    return b"no archive at all"


@pytest.mark.parametrize(
    ("pack", "how"),
    [
        *itertools.product([bytes, gzip.compress, zstd], ["cut", "none"]),
        (gzip.compress, "turned"),  # the others have no checksum of data
    ],
)
def test_a_damaged_archive_is_named_and_the_next_one_may_be_read(tmp_path: Path, pack: Any, how: str) -> None:
    paths, samples = made(tmp_path, 3)
    path = write(paths[1], members_of(10, 10))
    path.write_bytes(damaged(pack(path.read_bytes()), how))
    iterator = iter(TarStream(paths))
    found = []
    with pytest.raises(ArchiveError, match=r"1\.tar, offset [\d,]+: "):
        for _ in range(30):
            found.append(next(iterator))
    assert 10 <= len(found) < 20
    assert found == samples[: len(found)]
    assert [*iterator] == samples[20:]
    with pytest.warns(Warning, match="bad"):
        loader = DataLoader(TarStream(paths), 4, on_error="skip", collate_fn=identity, shard="auto")
        assert samples_of(loader) == found + samples[20:]


def test_a_member_that_is_refused_costs_its_sample_or_its_archive(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tar", [("a.json", b"{"), ("b.json", b"[]")])
    second = write(tmp_path / "b.tar", [("c.txt", b""), ("c.TXT", b""), ("d.txt", b"")])
    third = write(tmp_path / "c.tar", [("README", b"r"), ("e.txt", b"e")])
    iterator = iter(TarStream([first, second, third]))
    with pytest.raises(ArchiveError, match=r"a\.tar, offset 512: a\.json of 1 bytes cannot be decoded"):
        next(iterator)
    assert next(iterator) == {"__key__": "b", "json": []}
    with pytest.raises(ArchiveError, match=r"b\.tar, offset 512: the sample 'c' has two members \.txt"):
        next(iterator)
    with pytest.warns(RuntimeWarning, match=r"c\.tar has file\(s\) without an extension, such as 'README'"):
        assert next(iterator) == {"__key__": "e", "txt": "e"}  # a program may leave the stream here
    assert [*iterator] == []
    with pytest.raises(FileNotFoundError):
        next(iter(TarStream(tmp_path / "missing.tar.gz")))


@pytest.mark.filterwarnings("ignore:.* without an extension")
def test_mutated_archives_are_an_error_with_the_offset_or_other_samples(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.tar", members_of(4)).read_bytes().rstrip(b"\0") + bytes(1024)
    path, refused, read = tmp_path / "mutated.tar", 0, 0
    for seed in range(MUTATIONS):
        dice = random.Random(seed)
        pack = dice.choice([bytes, gzip.compress, zstd])
        if dice.random() < 0.3:
            data = bytearray(pack(plain))
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            data = bytearray(plain)
            begin = 512 * dice.randrange(len(data) // 512) + dice.choice([0, 100, 124, 148, 156, 257])
            junk = dice.choice([dice.randbytes(12), b"7" * 11 + b"\0", b"\x80" + b"\xff" * 11])
            data[begin : begin + 12] = junk
            data = bytearray(pack(bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])))
        path.write_bytes(data)
        try:
            [*TarStream(path)]
        except ArchiveError as error:
            refused += f"{path}, offset " in str(error)
        else:
            read += 1
    assert refused + read == MUTATIONS
    assert min(refused, read) > MUTATIONS // 20
