"""Decoders of members of archives, by extension."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

Decoder = Callable[[bytes], Any]


def text(data: bytes) -> str:
    """UTF-8 text."""
    return data.decode()


def image(data: bytes) -> Any:
    """An image as an array of uint8, shape ``(height, width, 3)``.

    Raises:
        ImportError: If Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "images are decoded by Pillow: pip install pillow, or pass decoders={} for bytes"
        ) from error
    with Image.open(io.BytesIO(data)) as opened:
        return np.array(opened.convert("RGB"))


DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "txt": text,
        "text": text,
        "json": json.loads,
        "cls": int,
        **dict.fromkeys(("jpg", "jpeg", "png", "webp", "ppm"), image),
    }
)
"""The decoders of a `TarDataset` without others; members of other extensions stay bytes."""
