"""The pictures of the pages that show commands are drawn by the commands themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks.pictures import PICTURES  # noqa: E402

# which take long, by `benchmarks.memory` and by `bench --plot`
OF_MEASUREMENTS = {"memory.png", "memory-workers.png", "performance-images.png", "performance-own-stack.png"}
TEXTS = {
    "memory-live.svg": ["worker 0 of train", "-> each of 2 workers' private memory", "limit:"],
    "profile.svg": ["DataLoader over OneSlow", "slowest: dataset[", "batches/s"],
    "top.svg": ["DataLoader over OneSlow", "waiting for a batch"],
}


def test_the_build_of_the_site_draws_each_picture_that_a_page_shows() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"\]\(([\w-]+\.(?:png|svg))\)", pages))
    assert shown == {*PICTURES, *OF_MEASUREMENTS}
    assert "-m benchmarks.pictures build/site-source/docs" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.long
def test_each_picture_is_of_what_the_command_shows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.pictures", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert {path.name for path in tmp_path.iterdir()} == set(PICTURES)
    for name in PICTURES:
        if name.endswith(".png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
            continue
        svg = (tmp_path / name).read_text(encoding="utf-8")
        assert not re.search(r"url\((?!#)|href|@import", svg), "a picture loads nothing from elsewhere"
        text = "".join(ET.fromstring(svg).itertext()).replace("\xa0", " ")
        assert [one for one in TEXTS[name] if one not in text] == []
