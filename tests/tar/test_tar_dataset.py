"""`TarDataset`: samples, indices that are kept, archives that are refused, and damaged ones."""

from __future__ import annotations

import io
import os
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from robustness.processes import LONG
from stream_datasets import identity
from tar_archives import members_of, write

from shmloader import ArchiveError, DataLoader, ShardedSampler, TarDataset
from shmloader.tar import index as index_module

MUTATIONS = 20_000 if LONG else 2000


def sample(number: int) -> dict[str, Any]:
    return {
        "__key__": f"part/{number:05}",
        "cls": number % 10,
        "txt": f"text {number} ä",
        "json": {"n": number},
        "seg.bin": bytes([number % 256]) * (number * 37 % 1500),
    }


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_the_archives(tmp_path: Path, kind: int) -> None:
    paths = [write(tmp_path / f"{n}.tar", members_of(30, 30 * n), format=kind) for n in range(3)]
    dataset = TarDataset(paths)
    assert [dataset[number] for number in range(len(dataset))] == list(map(sample, range(90)))
    assert dataset[-1] == sample(89)
    for number in (90, -91):
        with pytest.raises(IndexError, match="archives of 90 samples"):
            dataset[number]
    assert TarDataset(paths[0])[3] == sample(3)
    assert pickle.loads(pickle.dumps(dataset))[45] == sample(45)


def test_long_names_folders_and_empty_members_are_read(tmp_path: Path) -> None:
    long = "a" * 120 + "/" + "b" * 150
    path = write(
        tmp_path / "one.tar", [(f"{long}.txt", b"x"), ("ä.bin", b""), (".hidden", b"h"), ("README", b"r")]
    )
    with tarfile.open(path, "a") as archive:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    with pytest.warns(RuntimeWarning, match=r"has 2 file\(s\) without an extension, such as '.hidden'"):
        dataset = TarDataset(path)
    assert list(dataset) == [{"__key__": long, "txt": "x"}, {"__key__": "ä", "bin": b""}]


def test_only_wanted_members_are_read_and_decoded(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", members_of(3))
    some = TarDataset(
        path, members=["cls", ".SEG.bin"], decoders={"cls": lambda data: -int(data), "bin": len}
    )
    assert some[2] == {"__key__": "part/00002", "cls": -2, "seg.bin": 74}
    assert TarDataset(path, decoders={})[2]["json"] == b'{"n": 2}'


def test_extensions_that_cannot_be_meant_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", members_of(3))
    with pytest.warns(
        UserWarning, match=r"has the extension\(s\) clas, .* They have: cls, json, seg.bin, txt"
    ):
        assert TarDataset(path, members=["clas"])[0] == {"__key__": "part/00000"}
    with pytest.raises(TypeError, match=r"members=\['cls'\]"):
        TarDataset(path, members="cls")
    assert TarDataset(path, members=["seg.bin"], decoders={".BIN": len})[2]["seg.bin"] == 74
    with pytest.raises(ValueError, match=r"'seg\.bin' has several: give it as 'bin'"):
        TarDataset(path, decoders={"seg.bin": len})


def test_who_can_read_an_archive_can_read_its_index(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", members_of(3))
    for mode in (0o644, 0o640):
        path.chmod(mode)
        kept = tmp_path / "one.tar.index"
        kept.unlink(missing_ok=True)
        TarDataset(path)
        assert kept.stat().st_mode & 0o777 == mode


def test_images_are_arrays(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "png")
    found = TarDataset(write(tmp_path / "one.tar", [("a.png", file.getvalue())]))[0]["png"]
    assert (found == pixels).all()
    assert found.flags.writeable


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 1, "worker_type": "thread"},
        {"num_workers": 1, "multiprocessing_context": "forkserver"},
    ],
    ids=str,
)
def test_loaders_shuffle_divide_and_resume_archives(
    tmp_path: Path, arguments: Any, warm_helpers: None
) -> None:
    dataset = TarDataset([write(tmp_path / f"{n}.tar", members_of(20, 20 * n)) for n in range(2)])
    dataset[0]  # so that an archive is open
    seen = []
    for rank in range(2):
        sampler = ShardedSampler(dataset, 2, rank)
        loader = DataLoader(dataset, 4, sampler=sampler, collate_fn=identity, **arguments)
        first = next(iter(loader))
        state = loader.state_dict()
        loader.close()
        loader.load_state_dict(state)
        seen += [one for batch in (first, *loader) for one in batch]
        loader.close()
    assert sorted(seen, key=lambda one: one["json"]["n"]) == list(map(sample, range(40)))


def test_an_index_is_made_once_and_made_anew_for_another_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    make = index_module.make_index
    monkeypatch.setattr(index_module, "make_index", lambda path: [made.append(path), make(path)][1])
    path = write(tmp_path / "one.tar", members_of(5))
    folder = tmp_path / "indices"
    folder.mkdir()
    for _ in range(2):
        assert len(TarDataset(path)) == len(TarDataset(path, index_folder=folder)) == 5
    assert len(made) == 2
    assert [one.name.partition(".tar.")[0] for one in (*tmp_path.glob("*.index"), *folder.iterdir())] == [
        "one"
    ] * 2
    stale = TarDataset(path)
    write(path, members_of(6))
    os.utime(path, (1, 1))  # clocks of files have ticks, and it is as large as before
    assert len(TarDataset(path)) == 6
    assert len(made) == 3
    with pytest.raises(ArchiveError, match=r"one\.tar was changed since its index was made"):
        stale[0]


def test_an_archive_that_is_rewritten_while_it_is_open_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", members_of(5))
    dataset = TarDataset(path)
    first = dataset[0]
    before = path.stat()
    write(path, members_of(6))
    os.utime(path, (1, 1))
    assert path.stat().st_ino == before.st_ino
    with pytest.raises(ArchiveError, match=r"one\.tar was changed since its index was made"):
        dataset[0]
    path.rename(tmp_path / "other")  # one that is put in its place
    write(path, members_of(5))
    again = TarDataset(path)
    assert again[0] == first
    write(tmp_path / "new", members_of(6)).rename(path)
    assert again[0] == first


@pytest.mark.parametrize("how", ["cut", "another", "turned"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "one.tar", members_of(5))
    TarDataset(path)
    kept = tmp_path / "one.tar.index"
    data = bytearray(kept.read_bytes())
    if how == "cut":
        del data[100:]
    elif how == "another":
        data[:] = b"something else"
    elif how == "turned":
        data[len(data) // 2] ^= 0xFF
    kept.write_bytes(data)
    assert list(TarDataset(path)) == list(map(sample, range(5)))


def test_an_index_of_places_outside_the_archive_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", members_of(5))
    TarDataset(path)
    kept = tmp_path / "one.tar.index"
    with np.load(kept) as file:
        arrays = dict(file)
    with kept.open("wb") as out:
        np.savez(out, **arrays | {"offsets": arrays["offsets"] + 10**9})
    with pytest.raises(ArchiveError, match=r"the index has 2 bytes there, and the archive 0"):
        TarDataset(path)[0]


def test_an_index_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", members_of(2))
    with pytest.warns(RuntimeWarning, match="cannot be kept as .*missing.*pass an index_folder"):
        assert len(TarDataset(path, index_folder=tmp_path / "missing")) == 2


def with_member(kind: bytes, name: str = "link.txt") -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with tarfile.open(path, "a") as archive:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)

    return change


def cut_at(nbytes: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:nbytes]) and None


def appended(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def compressed(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(__file__, "a.txt")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link": (with_member(tarfile.SYMTYPE), "'link.txt' is neither a plain file"),
    "a hard link": (with_member(tarfile.LNKTYPE), "'link.txt' is neither a plain file"),
    "a path outside": (with_member(tarfile.REGTYPE, "../up.txt"), "'../up.txt' is a path outside"),
    "an absolute path": (with_member(tarfile.REGTYPE, "/up.txt"), "'/up.txt' is a path outside"),
    "two members of a name": (with_member(tarfile.REGTYPE, "part/00004.txt"), "has two members .txt"),
    "a sample in two places": (with_member(tarfile.REGTYPE, "part/00000.more"), "belongs to the sample"),
    "half a member": (cut_at(1100), "offset 512: the member 'part/00000.txt'|cut off|no header"),
    "half a header": (cut_at(1300), "offset 1,024: "),
    "no end": (cut_at(1024), "offset 1,024: it is cut off: the block of zeros"),
    "another archive behind": (appended, "further data follows its end"),
    "compression": (compressed, "offset 0: there is no header.*TarStream reads archives with compression"),
    "no archive": (
        lambda path: path.write_bytes(b"no archive" * 100) and None,
        "offset 0: there is no header",
    ),
    "nothing": (cut_at(0), "offset 0: there is no header"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_archives_that_are_refused_are_named_with_the_offset(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "one.tar", members_of(5))
    change, message = REFUSED[kind]
    change(path)
    with pytest.raises(ArchiveError, match=r"one\.tar, offset [\d,]+: .*") as caught:
        TarDataset(path)
    assert caught.match(message)
    assert not list(tmp_path.glob("*.index"))


def test_a_member_that_cannot_be_decoded_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "one.tar", [("a.json", b"{"), ("b.json", b"[]")])
    dataset = TarDataset(path)
    with pytest.raises(
        ArchiveError, match=r"offset 512: a\.json of 1 bytes cannot be decoded \(JSONDecodeError"
    ):
        dataset[0]
    loader = DataLoader(dataset, 2, on_error="skip", collate_fn=identity)
    with pytest.warns(Warning, match="bad"):
        assert [one["__key__"] for batch in loader for one in batch] == ["b"]


def test_a_decoder_that_lacks_memory_makes_no_bad_sample(tmp_path: Path) -> None:
    def decode(data: bytes) -> None:
        raise MemoryError(f"for {len(data)} bytes")

    dataset = TarDataset(write(tmp_path / "one.tar", members_of(3)), decoders={"cls": decode})
    with pytest.raises(MemoryError, match="for 2 bytes"):
        next(iter(DataLoader(dataset, 2, on_error="skip", collate_fn=identity)))


def test_an_empty_archive_has_no_samples(tmp_path: Path) -> None:
    assert len(TarDataset(write(tmp_path / "one.tar", []))) == 0
    with pytest.raises(ValueError, match="at least one archive"):
        TarDataset([])


def mutate(data: bytearray, dice: random.Random) -> None:
    header = 512 * dice.randrange(len(data) // 512)
    field, length = dice.choice(
        [(0, 100), (100, 8), (124, 12), (136, 12), (148, 8), (156, 1), (257, 8), (345, 155)]
    )
    how = dice.randrange(6)
    if how == 0:
        del data[dice.randrange(len(data)) :]
    elif how == 1:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how == 2:
        data[header + field : header + field + length] = dice.randbytes(length)
    elif how == 3:
        begin = dice.randrange(len(data))
        del data[begin : begin + dice.choice([1, 511, 512, 5000])]
    elif how == 4:
        data[header + 124 : header + 136] = dice.choice(
            [b"\x80" + b"\xff" * 11, b"\xff" * 12, b"7" * 11 + b"\0"]
        )
    else:
        data[header + 156 : header + 157] = dice.choice([b"L", b"K", b"x", b"g", b"S", b"5", b"1", b"\0"])
    if how in (2, 4, 5):  # with a checksum that is right
        block = data[header : header + 512]
        block[148:156] = b" " * 8
        data[header + 148 : header + 156] = b"%06o\0 " % sum(block)


@pytest.mark.in_ci
@pytest.mark.filterwarnings("ignore:.* without an extension")
def test_mutated_archives_are_an_error_with_the_offset_or_other_samples(tmp_path: Path) -> None:
    """No other exception, and no hang: each archive is read whole."""
    plain = write(
        tmp_path / "plain.tar", [*members_of(4), ("x" * 130 + ".txt", b"y")], format=tarfile.GNU_FORMAT
    ).read_bytes()
    pax = write(
        tmp_path / "pax.tar", [("ä" * 90 + ".txt", b"y"), *members_of(3)], format=tarfile.PAX_FORMAT
    ).read_bytes()
    path, refused, read = tmp_path / "mutated.tar", 0, 0
    for seed in range(MUTATIONS):
        dice = random.Random(seed)
        data = bytearray(dice.choice([plain, pax]).rstrip(b"\0") + bytes(1024 + 512))
        del data[len(data) // 512 * 512 :]
        mutate(data, dice)
        path.write_bytes(data)
        try:
            index = index_module.make_index(path)
            list(TarDataset(path))
        except ArchiveError as error:
            refused += f"{path}, offset " in str(error)
        else:
            read += 1
            assert (index.offsets + index.sizes <= len(data)).all(), f"mutation {seed}"
    assert refused + read == MUTATIONS
    assert min(refused, read) > MUTATIONS // 10


@pytest.mark.in_ci
def test_the_index_of_many_samples_is_small(tmp_path: Path) -> None:
    count = 20_000
    path = write(tmp_path / "many.tar", ((f"{n:08}.cls", b"1") for n in range(count)))
    dataset = TarDataset(path)
    assert len(pickle.dumps(dataset)) < 60 * count
    assert dataset[count - 1] == {"__key__": f"{count - 1:08}", "cls": 1}
    assert torch.utils.data.default_collate([dataset[0]])["cls"].tolist() == [1]
