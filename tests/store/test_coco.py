"""An object in the shapes of pycocotools' COCO: shared in place, and not copied into workers."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any

import psutil
from torch.utils.data import Dataset

from shmloader.store import MappingStore, Store, objects
from shmloader.store.attributes import share_for_loader

IMAGES, BOXES = 3000, 7
FORK = multiprocessing.get_context("fork")


class Coco:
    """Annotations in a list, by id, by image and by category, as ``createIndex`` makes them."""

    def __init__(self) -> None:
        draw = random.Random(0)
        images = [
            {"id": 7 * n, "file_name": f"{n:012d}.jpg", "coco_url": f"http://images.cocodataset.org/{n}.jpg"}
            for n in range(IMAGES)
        ]
        boxes: list[Any] = []
        for number in range(IMAGES * BOXES):
            outline: Any = [[round(draw.random() * 640, 2) for _ in range(2 * draw.randrange(10, 30))]]
            if number % 100 == 0:  # a crowd
                outline = {"counts": [draw.randrange(100) for _ in range(40)], "size": [480, 640]}
            boxes.append(
                {
                    "id": number + 1,
                    "image_id": 7 * (number // BOXES),
                    "category_id": draw.randrange(1, 90),
                    "segmentation": outline,
                    "bbox": [round(draw.random() * 300, 2) for _ in range(4)],
                    "iscrowd": int(number % 100 == 0),
                }
            )
        self.dataset = {"info": {"year": 2017}, "images": images, "annotations": boxes}
        self.imgs = {image["id"]: image for image in images}
        self.anns = {box["id"]: box for box in boxes}
        self.imgToAnns: Any = defaultdict(list)
        self.catToImgs: Any = defaultdict(list)
        for box in boxes:
            self.imgToAnns[box["image_id"]].append(box)
            self.catToImgs[box["category_id"]].append(box["image_id"])


class Detection(Dataset[Any]):
    def __init__(self) -> None:
        self.coco = Coco()
        self.ids = sorted(self.coco.imgs)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        image = self.ids[index]
        numbers = [box["id"] for box in self.coco.imgToAnns[image]]
        return self.coco.imgs[image]["file_name"], [self.coco.anns[number] for number in numbers]


def read_all(dataset: Any, pipe: Connection) -> None:
    gc.disable()
    before = psutil.Process().memory_full_info().uss
    for index in range(len(dataset)):
        dataset[index]
    pipe.send(psutil.Process().memory_full_info().uss - before)


def growth(dataset: Any) -> int:
    """Bytes that a forked process has more for itself after an epoch."""
    gc.collect()
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=read_all, args=(dataset, theirs))
    process.start()
    nbytes = int(ours.recv())
    process.join()
    process.close()
    ours.close()
    theirs.close()
    return nbytes


def test_a_coco_object_is_shared_in_place_and_workers_copy_none_of_it() -> None:
    dataset = Detection()
    expected = [dataset[index] for index in (0, 77, IMAGES - 1)]
    size, before = objects.estimate_nbytes(dataset.coco), growth(dataset)
    assert share_for_loader(dataset) is dataset
    coco = dataset.coco
    assert isinstance(coco.dataset["annotations"], Store)
    assert isinstance(coco.anns, MappingStore)
    assert isinstance(coco.imgToAnns, MappingStore)
    assert [dataset[index] for index in (0, 77, IMAGES - 1)] == expected
    assert coco.imgToAnns["no image"] == []
    after = growth(dataset)
    # A few MB of a process's own (what it reads at a time, indices of keys), whatever the size.
    assert before > size // 4
    assert after < max(size // 50, 6 << 20), f"{after:,} of {size:,} bytes"
