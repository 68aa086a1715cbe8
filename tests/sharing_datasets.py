"""Datasets whose attributes refer to the same objects, importable by workers under every start method."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

FRAMES = 400
FRAME_NBYTES = 8192


class Clips(Dataset[Any]):
    """Frames in a list, the same frames by video, and the same rows by class."""

    def __init__(self) -> None:
        self.frames = [np.full(FRAME_NBYTES // 8, n, np.int64) for n in range(FRAMES)]
        self.by_video = {f"video {v}": self.frames[v * 10 : v * 10 + 10] for v in range(FRAMES // 10)}
        self.rows = [{"path": f"folder/of/many/frames/frame-{n}.jpeg", "label": n % 7} for n in range(20_000)]
        self.by_class = {label: self.rows[label::7] for label in range(7)}

    def __len__(self) -> int:
        return FRAMES

    def __getitem__(self, number: int) -> dict[str, Any]:
        video, place = divmod(number, 10)
        return {
            "frame": torch.tensor(self.frames[number]),
            "again": torch.tensor(self.by_video[f"video {video}"][place]),
            "label": self.rows[number]["label"],
            "length": len(self.by_class[number % 7][number // 7]["path"]),
        }
