"""States that the program's own samplers and datasets make, as one string inside the loader's state."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from typing import Any

import torch

from shmloader.errors import ResumeError


def pack_user_state(state: Any, owner: str) -> str:
    """A state as text: JSON if that restores it, else as ``torch.save`` writes it; or a `ResumeError`."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(state)
        if repr(json.loads(text)) == repr(state):  # JSON makes lists of tuples, and strings of keys
            return text
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        # Before the reason torch has advice on files that does not help here.
        why = str(error).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0]
        raise ResumeError(
            f"the state_dict() of {owner} holds what cannot be saved, or what torch.load(weights_only=True) "
            f"does not load: {why:.500}. Return Python's own numbers, strings, "
            "lists and dicts, and tensors: int(...) and .tolist() make them of NumPy's."
        ) from error
    return f"torch:{base64.b64encode(file.getvalue()).decode()}"


def unpack_user_state(text: str) -> Any:
    """The state that `pack_user_state` was given."""
    if text.startswith("torch:"):
        return torch.load(io.BytesIO(base64.b64decode(text[6:])), weights_only=True)
    return json.loads(text)
