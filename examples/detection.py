"""Object detection: annotations like COCO's, which all workers share, and a ``collate_fn`` of one's own.

The images are crops of a photograph that comes with matplotlib; the boxes are drawn at random.
"""

import random
from typing import Any

import numpy as np
import torch
from matplotlib import cbook
from PIL import Image
from torch.utils.data import Dataset

import shmloader

SIDE = 128


class Detection(Dataset[dict[str, torch.Tensor]]):
    """Images with boxes ``[left, top, width, height]`` and categories, as COCO's JSON file has them."""

    def __init__(self, photograph: np.ndarray[Any, Any], annotations: list[dict[str, Any]]) -> None:
        self.photograph = torch.from_numpy(photograph)
        # A list of dicts: forked workers would copy it by reading it, spawned ones get a copy each. Shared,
        # it lies in memory once, for all workers.
        self.annotations = shmloader.share(annotations)

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        annotation = self.annotations[index]
        top, left = annotation["at"]
        image = self.photograph[top : top + SIDE, left : left + SIDE].permute(2, 0, 1)
        objects = annotation["objects"]
        return {
            "image": image,
            "boxes": torch.tensor([one["bbox"] for one in objects], dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor([one["category_id"] for one in objects], dtype=torch.int64),
        }


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One tensor of images, and the boxes of all of them in one, with the number of their image.

    What ``stack`` and ``cat`` make for the batch is made where the training loop reads it.
    """
    counts = torch.tensor([len(sample["boxes"]) for sample in samples])
    return {
        "images": torch.stack([sample["image"] for sample in samples]),
        "boxes": torch.cat([sample["boxes"] for sample in samples]),
        "labels": torch.cat([sample["labels"] for sample in samples]),
        "image_of_box": torch.repeat_interleave(torch.arange(len(samples)), counts),
    }


def make_annotations(count: int) -> list[dict[str, Any]]:
    """Annotations of up to five objects for each image."""
    draw = random.Random(0)
    return [
        {
            "at": (draw.randrange(200), draw.randrange(200)),
            "objects": [
                {"bbox": [draw.uniform(0, 64) for _ in range(4)], "category_id": draw.randrange(80)}
                for _ in range(draw.randrange(6))
            ],
        }
        for _ in range(count)
    ]


def main() -> None:
    """Load an epoch, and say what was in it."""
    path = str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    photograph = np.array(Image.open(path).convert("RGB"))
    dataset = Detection(photograph, make_annotations(2_000))
    print(f"annotations: {dataset.annotations.describe()}")
    loader = shmloader.DataLoader(dataset, 64, shuffle=True, num_workers=2, collate_fn=collate)
    boxes = 0
    with loader:
        for batch in loader:
            boxes += len(batch["boxes"])
            assert len(batch["images"]) > batch["image_of_box"].max()
            assert batch["labels"].dtype == torch.int64  # also where an image has no objects
        print(f"{boxes} boxes in {len(loader)} batches")
        print(loader.statistics())


if __name__ == "__main__":
    main()
