"""accelerate and Lightning on two ranks, stopped and resumed: beside torch's loader and torchdata's.

Without `stateful=True` or `use_stateful_dataloader=True` a resumed program gets torch's batches; with it,
exactly the batches of the undisturbed one, on both ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frameworks.pages import needs

PROGRAMS = {"accelerate": "accelerate_resumed.py", "lightning": "lightning_resumed.py"}


def outcomes(framework: str, mode: str, folder: Path) -> list[dict[str, Any]]:
    """By rank and case: the batches of an undisturbed run, those before the checkpoint, those after it."""
    (folder / mode).mkdir()
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launched, str(Path(__file__).with_name(PROGRAMS[framework])), str(folder / mode), mode],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / mode / f"rank{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", PROGRAMS)
def test_two_ranks_resume_as_with_torchs_loader_or_exactly_if_the_program_asks(
    framework: str, tmp_path: Path
) -> None:
    needs(framework)
    stock, install, asked = (outcomes(framework, mode, tmp_path) for mode in ("stock", "install", "asked"))
    assert install == stock
    for rank in asked:
        (said,) = rank.pop("said")
        assert (
            "saves one state of a loader of Rows for 2 ranks, and it holds for the rank that wrote it only"
            in said
        )
        wrong = [case for case, (whole, begun, rest) in rank.items() if not begun or begun + rest != whole]
        assert wrong == []
    assert all(stock[rank][case][0] == asked[rank][case][0] for rank in (0, 1) for case in asked[rank])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", PROGRAMS)
def test_torchdatas_loader_is_not_exact_in_these_cases(framework: str, tmp_path: Path) -> None:
    """What the documentation says of it; if this fails, torchdata or the framework has become better."""
    needs(framework)
    needs("torchdata")
    first, _ = outcomes(framework, "torchdata", tmp_path)
    assert first.pop("said") == []
    exact = {
        case
        for case, found in first.items()
        if not isinstance(found[2], str) and found[1] + found[2] == found[0]
    }
    assert exact == EXACT_WITH_TORCHDATA[framework]


EXACT_WITH_TORCHDATA = {
    "accelerate": {
        "in order, mid-epoch",
        "in order, a later epoch",
        "in order, last batch",
        "stream, mid-epoch",
        "stream, a later epoch",
        "stream, last batch",
        "stream, dispatched, last batch",
    },
    "lightning": {"with a sampler of the program"},
}
