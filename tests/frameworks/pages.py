"""Runs the programs on the pages of docs/integrations, to compare losses with this loader and torch's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

REPOSITORY = Path(__file__).parents[2]
PAGES = REPOSITORY / "docs" / "integrations"


def outcome(page: str, mode: str) -> dict[str, Any]:
    """Run a page's program in a process of its own; see `run_page`."""
    program = [*warm_python(), str(Path(__file__).with_name("run_page.py")), str(PAGES / page), mode]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_page_loads_from_slots(page: str) -> None:
    """Check that the losses are torch's, bit for bit, and that every batch came from a slot."""
    ours, torchs = outcome(page, "slots"), outcome(page, "torch")
    assert torchs["batches"] > 0
    assert ours == torchs


def needs(framework: str) -> Any:
    """The framework's module; without it, the whole file of tests is skipped."""
    return pytest.importorskip(framework, reason=f"{framework} is not installed: make test-integrations")
