"""Several ranks: each trains on its share, and an evaluation counts each sample once.

torchrun --nproc-per-node 2 examples/several_ranks.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import shmloader

SAMPLES = 1_003  # not a multiple of the ranks


def main() -> None:
    """Train for two epochs, and evaluate."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    # All ranks have equally many batches: the last samples of some are repeated.
    training = shmloader.DataLoader(
        dataset, 16, sampler=shmloader.ShardedSampler(dataset, shuffle=True, seed=0), num_workers=1
    )
    # Each sample once: a rank may have a batch less than another one.
    evaluation = shmloader.DataLoader(
        dataset, 16, sampler=shmloader.ShardedSampler(dataset, shuffle=False, uneven="exact"), num_workers=1
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        training.set_epoch(epoch)
        for x, y in training:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = torch.zeros(2)
        with torch.no_grad():
            for x, y in evaluation:  # no collective call in here: ranks have different numbers of batches
                counts += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {int(counts[0])} of {int(counts[1])} samples right")
        assert counts[1] == SAMPLES
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
