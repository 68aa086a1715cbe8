"""torch's own tests of its loader, to find those that fail only with this loader.

    python tests/parity/torch_suite.py PATH/test_dataloader.py [arguments of pytest]

The file comes with torch's sources, and needs the package expecttest. It runs three times: as it is, under
`shmloader.install()`, and with torch's class replaced by `shmloader.DataLoader`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

WAY = "SHMLOADER_TORCH_SUITE"


def use(way: str) -> None:
    """Make this process load in one of the ways."""
    import torch.utils.data

    import shmloader

    if way == "install":
        shmloader.install()
    else:
        torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = shmloader.DataLoader


# Here, since processes that the tests spawn import this file, too.
if os.environ.get(WAY, "torch") != "torch":
    use(os.environ[WAY])


def wait_longer(items: list[Any]) -> None:
    """Give spawned processes more than the minute that the file does: they import torch's tests."""
    for item in items:
        item.module.JOIN_TIMEOUT = 300.0


def run(way: str, suite: Path, arguments: list[str]) -> dict[str, str]:
    """Run the file in a new process; returns the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, __file__, str(suite), *arguments, f"--junitxml={results}"]
        subprocess.run(command, env={**os.environ, WAY: way}, check=False)
        cases = ET.parse(results).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ET.Element) -> str:
    """The outcome of a test; a test may fail, and then fail to clean up."""
    kinds = {element.tag for element in case}
    return next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")


def main() -> int:
    """Run all ways and compare them; or run one, in a process that `run` has started."""
    suite, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    if WAY in os.environ:
        import pytest

        # Not this project's settings: its guard and its view of warnings are not torch's.
        settings = f"-c {os.devnull} --rootdir={suite.parent} -p no:cacheprovider --timeout=900 -q".split()
        plugin = SimpleNamespace(pytest_collection_modifyitems=wait_longer)
        return pytest.main([str(suite), *settings, *arguments], plugins=[plugin])
    torchs = run("torch", suite, arguments)
    print_counts("torch", torchs)
    worse = 0
    for way in ("install", "replaced"):
        ours = run(way, suite, arguments)
        print_counts(way, ours)
        for test in sorted(torchs.keys() | ours.keys()):
            if ours.get(test) != torchs.get(test):
                print(f"  {test}: {ours.get(test)}, with torch's loader {torchs.get(test)}")
                worse += torchs.get(test) == "passed"
    return worse > 0


def print_counts(way: str, outcomes: dict[str, str]) -> None:
    found = list(outcomes.values())
    print(f"== {way}:", *(f"{found.count(kind)} {kind}" for kind in sorted(set(found))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
