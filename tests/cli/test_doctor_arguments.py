"""Values that the doctor's options accept, and the messages for others."""

import pytest

from shmloader.cli import main
from shmloader.cli.doctor import parse
from shmloader.cli.options import format_nbytes, parse_nbytes

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("500000", 500_000),
        ("38MB", 38_000_000),
        ("38 mb", 38_000_000),
        ("38MiB", 38 * MIB),
        ("38M", 38 * MIB),
        ("1.5GB", 1_500_000_000),
        (".5k", 512),
        ("2TiB", 2**41),
        ("64B", 64),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "0", "-1", "0.1", "38 XB", "38MBit", "1e6", "inf"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["doctor", "--batch-bytes", text])
    assert refused.value.code == 2
    assert "is not a size such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(None, "no limit"), (1, "1 bytes"), (4096, "4.0 KiB"), (38 * MIB, "38.0 MiB"), (150 * MIB, "150 MiB")],
)
def test_sizes_are_written(nbytes: int | None, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize("option", ["workers", "timeout"])
@pytest.mark.parametrize("text", ["1.5", "0", "-3", "1000001", "many", "", "nan"])
def test_what_is_no_number_of_workers_or_seconds_is_refused(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["doctor", f"--{option}={text}"])
    assert refused.value.code == 2
    assert f"{text!r} is not a whole number from 1 to 1,000,000" in capsys.readouterr().err


def test_what_the_refusals_name_is_accepted() -> None:
    for workers, timeout in [("1", "1"), ("1000000", "1000000")]:
        arguments = parse(["--workers", workers, "--timeout", timeout])
        assert (arguments.workers, arguments.timeout) == (int(workers), int(timeout))
