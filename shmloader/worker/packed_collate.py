"""`collate_packed`: samples of various lengths joined to one row, with their boundaries. In workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_LABELS, _NO_LABEL = "labels", -100  # which torch's losses ignore


def collate_packed(samples: Sequence[Any]) -> dict[str, Any]:
    """Join samples to one row without padding, for attention over sequences of various lengths.

    It is meant for batches of a `TokenBatchSampler` with ``layout="packed"``. Names and values are those of
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` of transformers.

    Args:
        samples: Sequences of tokens, or dicts of sequences that are equally long within a sample, such as
            ``input_ids`` and ``labels``. A sequence is a tensor, an array or a list of shape ``(length,)``.

    Returns:
        The sequences joined, each of shape ``(1, total)``; bare ones are ``input_ids``. The first label of
        each sample is -100, since no token of its own comes before it. ``position_ids``, int64 of shape
        ``(1, total)``, begin at 0 in each sample. ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 of shape
        ``(samples + 1,)``, are the boundaries; ``max_length_q`` and ``max_length_k`` the longest length.

    Raises:
        ValueError: If the sequences of a sample differ in length; the sample's place and lengths are named.
    """
    rows = [sample if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    parts = {name: [torch.as_tensor(row[name]) for row in rows] for name in rows[0]}
    lengths = [len(one) for one in next(iter(parts.values()))]
    for place, length in enumerate(lengths):
        if any(len(part[place]) != length for part in parts.values()):
            found = ", ".join(f"{name}: {len(part[place]):,}" for name, part in parts.items())
            raise ValueError(f"the sequences of sample {place} of {len(rows)} differ in length: {found}")
    batch: dict[str, Any] = {name: torch.cat(part)[None] for name, part in parts.items()}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if _LABELS in batch:
        batch[_LABELS][0, ends[:-1].long()] = _NO_LABEL
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = ends
    batch["max_length_q"] = batch["max_length_k"] = max(lengths)
    return batch
