"""Collate functions as programs write them, and data sets that give whole batches.

Each does what many public training programs do. None of them knows this project.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from benchmarks.made_data import ENDLESS, Records, make_images

Pairs = list[tuple[torch.Tensor, int]]


def stack(samples: list[torch.Tensor]) -> torch.Tensor:
    """Stacks images."""
    return torch.stack(samples)


def stack_pairs(samples: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes images and labels apart, and joins each."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def stack_dicts(samples: Pairs) -> dict[str, torch.Tensor]:
    """Makes a dict of a batch, as models of language and vision take it."""
    return {
        "pixel_values": torch.stack([image for image, _ in samples]),
        "labels": torch.tensor([label for _, label in samples]),
    }


def cat(samples: list[torch.Tensor]) -> torch.Tensor:
    """Joins images that have a batch dimension of their own."""
    return torch.cat([sample[None] for sample in samples], 0)


def stack_boxes(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stacks images, and joins boxes with the number of their image in front, as for YOLO."""
    images, boxes = zip(*samples, strict=True)
    numbered = [torch.nn.functional.pad(box, (1, 0), value=number) for number, box in enumerate(boxes)]
    return torch.stack(images), torch.cat(numbered)


def stack_scaled(samples: list[torch.Tensor]) -> torch.Tensor:
    """Stacks images and brings them to the range from 0 to 1."""
    return torch.stack(samples).float().div_(255)


def fill_zeros(samples: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills images into zeros one by one, as timm does."""
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    images = torch.zeros((len(samples), *samples[0][0].shape), dtype=torch.uint8)
    for number, (image, _) in enumerate(samples):
        images[number] += image
    return images, labels


def of_array(samples: list[torch.Tensor]) -> torch.Tensor:
    """Makes one array of all images, and a tensor of it."""
    return torch.tensor(np.array([sample.numpy() for sample in samples]))


def of_numpy_stack(samples: list[torch.Tensor]) -> torch.Tensor:
    """Stacks images with NumPy."""
    return torch.from_numpy(np.stack([sample.numpy() for sample in samples]))


def old_default(samples: list[torch.Tensor]) -> torch.Tensor:
    """Stacks images into shared memory if it runs in a worker: torch's default of some years ago."""
    out = None
    if torch.utils.data.get_worker_info() is not None:
        numel = sum(sample.numel() for sample in samples)
        storage: Any = samples[0].untyped_storage()
        shared = storage._new_shared(numel * samples[0].element_size())  # noqa: SLF001 - as programs do
        out = torch.empty(0, dtype=samples[0].dtype)
        out.set_(shared, 0, (len(samples), *samples[0].shape), samples[0][None].stride())
    return torch.stack(samples, 0, out=out)


def pad_long(samples: list[torch.Tensor]) -> torch.Tensor:
    """Pads sequences to the longest."""
    return pad_sequence(samples, batch_first=True)


def words(samples: list[str]) -> dict[str, list[list[str]]]:
    """Makes lists of words of texts: nothing that a slot could hold."""
    return {"words": [text.split() for text in samples]}


Detected = tuple[torch.Tensor, dict[str, torch.Tensor]]


def nest(samples: list[Detected]) -> tuple[torch.Tensor, torch.Tensor, tuple[dict[str, torch.Tensor], ...]]:
    """Pads images to the largest, with a mask, and leaves the targets apart, as DETR and its kin do."""
    images, targets = zip(*samples, strict=True)
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    padded = torch.zeros((len(images), 3, height, width))
    mask = torch.ones((len(images), height, width), dtype=torch.bool)
    for number, image in enumerate(images):
        padded[number, :, : image.shape[1], : image.shape[2]].copy_(image)
        mask[number, : image.shape[1], : image.shape[2]] = False
    return padded, mask, targets


def make_detected(samples: int) -> Records:
    """Makes float32 images of 3x560x560 with seven tensors about their boxes."""
    made = []
    for number in range(samples):
        boxes = number % 8 + 1
        target = {"boxes": torch.rand(boxes, 4), "labels": torch.arange(boxes), "area": torch.rand(boxes)}
        target |= {"iscrowd": torch.zeros(boxes, dtype=torch.int64), "image_id": torch.tensor([number])}
        target |= dict.fromkeys(("orig_size", "size"), torch.tensor([560, 560]))
        made.append((torch.rand(3, 560, 560), {name: leaf.clone() for name, leaf in target.items()}))
    return Records(made)


def make_pairs(samples: int) -> Records:
    """Makes images with a label."""
    return Records([(image, number % 10) for number, image in enumerate(make_images(samples).base)])


def make_boxed(samples: int) -> Records:
    """Makes images with a few boxes."""
    images = make_images(samples).base
    return Records([(image, torch.rand(number % 8 + 1, 5)) for number, image in enumerate(images)])


def make_long_tokens(samples: int) -> Records:
    """Makes sequences of 40 to 120 kB."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5_000, 15_000, (samples,), generator=generator).tolist()
    return Records([torch.arange(length) for length in lengths])


def make_texts(samples: int) -> Records:
    """Makes short texts."""
    return Records([f"a text of some words, the number of which is {number}" for number in range(samples)])


class FreshArrays(Dataset[Any]):
    """Images that NumPy makes anew for each sample, as a decoder and its augmentation do."""

    def __init__(self, samples: int) -> None:
        self._pixels = np.zeros((samples, 3, 224, 224), np.uint8)
        self._pixels += np.arange(samples, dtype=np.uint8)[:, None, None, None]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self._pixels[index % len(self._pixels)].astype(np.float32)


class WholeBatches(Dataset[Any]):
    """A table whose items are whole batches: a list of indices gives one tensor."""

    def __init__(self, samples: int) -> None:
        self._table = make_images(samples).base

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, indices: list[int]) -> Any:
        return self._table[torch.as_tensor(indices)]


class EncodedFiles(Dataset[Any]):
    """Encoded files of 100 kB, as a program that decodes elsewhere loads them."""

    def __init__(self, samples: int) -> None:
        self._files = [np.random.default_rng(number).bytes(100_000) for number in range(samples)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self._files[index % len(self._files)]
