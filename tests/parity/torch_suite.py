"""torch's own tests of its loader, run with torch's loader and with this one: says which fail only with this one.

    python tests/parity/torch_suite.py PATH/test_dataloader.py [arguments of pytest]

The file comes with torch's sources, of the version that is installed or an older one; it needs the package
expecttest. It runs three times: as it is, under `shmloader.install()`, and with torch's class replaced by ours.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch.utils.data
from torch.utils.data import dataloader

import shmloader

WAYS = ("torch", "install", "replaced")
WAY = "SHMLOADER_TORCH_SUITE"


def use(way: str) -> None:
    """Have the tests of this process load in one of the ways."""
    if way == "install":
        shmloader.install()
    elif way == "replaced":
        torch.utils.data.DataLoader = dataloader.DataLoader = shmloader.DataLoader


use(os.environ.get(WAY, "torch"))  # here, because spawned processes of the tests import this file, too


def run(way: str, suite: Path, arguments: list[str]) -> dict[str, str]:
    """Run the file in a new process; returns what became of each test."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, __file__, str(suite), *arguments, f"--junitxml={results}"]
        subprocess.run(command, env={**os.environ, WAY: way}, cwd=folder, check=False)
        cases = ET.parse(results).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ET.Element) -> str:
    kinds = {element.tag for element in case}
    return next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")


def main() -> int:
    """Run all ways, and compare."""
    suite, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    if WAY in os.environ:
        # No configuration of this project: its guard and its warnings as errors are not torch's.
        settings = [
            "-c",
            os.devnull,
            f"--rootdir={suite.parent}",
            "-p",
            "no:cacheprovider",
            "--timeout=300",
            "-q",
        ]
        return pytest.main([str(suite), *settings, *arguments])
    outcomes = {way: run(way, suite, arguments) for way in WAYS}
    worse = 0
    for way, of_tests in outcomes.items():
        counts = {kind: list(of_tests.values()).count(kind) for kind in sorted(set(of_tests.values()))}
        print(f"{way}: {counts}")
        for test, result in of_tests.items():
            if result != outcomes["torch"].get(test):
                print(f"  {test}: {result}, and {outcomes['torch'].get(test)} with torch's loader")
                worse += result in ("error", "failure")
    return worse > 0


if __name__ == "__main__":
    sys.exit(main())
