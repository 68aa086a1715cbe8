"""`collate_packed` beside transformers' own collator."""

from __future__ import annotations

import pytest
import torch

from shmloader import collate_packed

transformers = pytest.importorskip("transformers")


def test_packed_samples_are_those_of_transformers_collator() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [4, 5, 6]}, {"input_ids": [7], "labels": [8]}]
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    for name, value in collate_packed(rows).items():
        assert torch.equal(torch.as_tensor(theirs[name]), torch.as_tensor(value)), name
        assert getattr(theirs[name], "dtype", int) == getattr(value, "dtype", int), name
