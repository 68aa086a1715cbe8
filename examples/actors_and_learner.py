"""Reinforcement learning: actors play in processes of their own; queues take what they saw to the learner.

The game is cart-pole: a pole on a cart falls unless the cart is pushed left and right. Each actor plays 32
games at once with the learner's newest weights, which lie in shared memory.
"""

import math

import torch
from torch import multiprocessing

import shmloader

GAMES, STEPS, CHUNKS, ACTORS = 32, 64, 20, 2


class CartPole:
    """Games in step: place, speed, angle and angular speed of each; a game that is lost begins anew."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = self.begin(torch.zeros(GAMES, 4))

    def begin(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=self.generator) / 10 - 0.05

    def step(self, action: torch.Tensor) -> torch.Tensor:
        """Push each cart; says which games are lost."""
        _, v, angle, turn = self.state.unbind(1)
        pushed = (20.0 * action - 10.0 + 0.05 * turn**2 * angle.sin()) / 1.1
        faster = (9.8 * angle.sin() - angle.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        speed = pushed - 0.05 * faster * angle.cos() / 1.1
        self.state += 0.02 * torch.stack([v, speed, turn, faster], 1)
        lost = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12))
        self.state[lost] = self.begin(self.state[lost])
        return lost


def act(queue: shmloader.Queue, policy: torch.nn.Module, seed: int) -> None:
    """Play; what was seen is written straight into the memory that the learner reads."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    games = CartPole(generator)
    for _ in range(CHUNKS):
        seen = queue.new_empty((STEPS, GAMES, 4))
        actions, lost = torch.zeros(STEPS, GAMES), torch.zeros(STEPS, GAMES, dtype=torch.bool)
        with torch.no_grad():
            for step in range(STEPS):
                seen[step] = games.state
                actions[step] = torch.bernoulli(policy(seen[step]).sigmoid().squeeze(1), generator=generator)
                lost[step] = games.step(actions[step])
        queue.put((seen, actions, lost))
    queue.close()


def main() -> None:
    """Train on whichever actor's games are there."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ).share_memory()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    queues = [shmloader.Queue(maxsize=2) for _ in range(ACTORS)]
    actors = [multiprocessing.Process(target=act, args=(queue, policy, i)) for i, queue in enumerate(queues)]
    for actor in actors:
        actor.start()
    chunks = 0
    while queues:
        for queue in shmloader.wait(queues):
            try:
                seen, actions, lost = queue.get()
            except shmloader.QueueClosed:
                queues.remove(queue)
                continue
            still = torch.zeros(
                GAMES
            )  # how many steps each game lasts from here on, later ones counting less
            lasts = torch.stack([still := 1 + 0.98 * still * ~gone for gone in reversed(lost)]).flip(0)
            worth = (lasts - lasts.mean()) / lasts.std()
            chosen = torch.nn.functional.logsigmoid((2 * actions - 1) * policy(seen).squeeze(2))
            optimizer.zero_grad()
            (-chosen * worth).mean().backward()
            optimizer.step()
            chunks += 1
            if chunks % 8 == 0:
                print(f"{chunks} chunks: a game lasts {lost.numel() / max(1, int(lost.sum())):.0f} steps")
    for actor in actors:
        actor.join()
    print(f"learned from {chunks * STEPS * GAMES} steps")


if __name__ == "__main__":
    main()
