"""Decoders of members of archives, by extension."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shmloader.errors import ArchiveError
from shmloader.failures.bad_samples import is_a_samples_fault

Decoder = Callable[[bytes], Any]


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
        "txt": bytes.decode,
        "text": bytes.decode,
        "json": json.loads,
        "cls": int,
        **dict.fromkeys(("jpg", "jpeg", "png", "webp", "ppm"), image),
    }
)
"""The decoders of a `TarDataset` without others; members of other extensions stay bytes."""


def _plain(extension: str) -> str:
    return extension.lower().lstrip(".")


class Members:
    """The members that are wanted of each sample, and their decoders; see `TarDataset` for the arguments.

    Attributes:
        wanted: The extensions; None for all.
    """

    def __init__(self, decoders: Mapping[str, Decoder] | None, members: Sequence[str] | None) -> None:
        self._decoders = {
            _plain(ending): decode for ending, decode in (DECODERS if decoders is None else decoders).items()
        }
        if dotted := [ending for ending in self._decoders if "." in ending]:
            raise ValueError(
                f"a decoder is found by the last part of an extension, and {dotted[0]!r} has several: give "
                f"it as {dotted[0].rpartition('.')[2]!r}"
            )
        if isinstance(members, str):
            raise TypeError(f"members is a sequence of extensions: members=[{members!r}]")
        self.wanted = None if members is None else frozenset(map(_plain, members))

    def decoded(self, data: bytes, key: str, extension: str, archive: object, offset: int) -> Any:
        """The value of a member: its bytes, if nothing decodes it; `ArchiveError` if they are damaged."""
        decode = self._decoders.get(extension.rpartition(".")[2])
        if decode is None:
            return data
        try:
            return decode(data)
        except ImportError:
            raise
        except Exception as error:
            if not is_a_samples_fault(error):  # `on_error` would leave the sample out
                raise
            raise ArchiveError(
                f"{archive}, offset {offset:,}: {key}.{extension} of {len(data):,} bytes cannot be decoded "
                f"({type(error).__name__}: {error!s:.300})"
            ) from error
