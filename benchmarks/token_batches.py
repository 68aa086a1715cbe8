"""Padding of batches within a budget of tokens: samples of this library and of grain, and random batches.

``python -m benchmarks.token_batches`` takes the functions and classes of the interpreter's own library as
texts. It prints how much of each way's batches is padding, and the time of planning a million lengths and of
a step of the sampler. grain's figures need grain (pip install -c constraints.txt -e '.[peers]').
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import whole_number
from benchmarks.tables import render_table
from shmloader import TokenBatchSampler

_TOKEN = re.compile(r"\w+|[^\w\s]")
_GRAIN_BINS = (16, 256)


def source_lengths() -> np.ndarray:
    """Tokens of each function and class at the top level of the interpreter's library."""
    lengths = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            nodes = ast.parse(source).body
        except (SyntaxError, UnicodeDecodeError):
            continue
        texts = (ast.get_source_segment(source, node) for node in nodes if hasattr(node, "name"))
        lengths += [len(_TOKEN.findall(text)) for text in texts if text]
    return np.array(lengths)


def padding(lengths: np.ndarray, batches: Iterable[Any]) -> float:
    """The part of batches, each padded to its longest sample, that is padding."""
    of_batches = [lengths[batch] for batch in batches]
    return 1 - sum(map(np.sum, of_batches)) / sum(int(one.max()) * len(one) for one in of_batches)


def grain_padding(lengths: np.ndarray, max_tokens: int, bins: int) -> float:
    """The part of rows that grain's best fit leaves empty."""
    import grain
    from grain.experimental import BestFitPackIterDataset

    texts = grain.MapDataset.source([{"text": np.ones(length, np.int32)} for length in lengths])
    shuffled = texts.shuffle(seed=0).to_iter_dataset()
    packed = BestFitPackIterDataset(
        shuffled, length_struct={"text": max_tokens}, num_packing_bins=bins, shuffle_bins=False
    )
    rows = sum(1 for _ in packed)
    return float(1 - lengths.sum() / (rows * max_tokens))


def compare(lengths: np.ndarray, max_tokens: int) -> list[list[str]]:
    """A row for each way: its name and its padding."""
    sampler = TokenBatchSampler(lengths, max_tokens, num_replicas=1, rank=0)
    padded = list(sampler)
    order = np.random.default_rng(0).permutation(len(lengths))
    cuts = np.linspace(0, len(order), len(padded) + 1).astype(int)
    random = [order[begin:end] for begin, end in itertools.pairwise(cuts) if end > begin]
    rows = len(TokenBatchSampler(lengths, max_tokens, layout="packed", num_replicas=1, rank=0))
    found = {
        f"random, {len(random):,} batches": padding(lengths, random),
        f"TokenBatchSampler, {len(padded):,} batches": padding(lengths, padded),
        f"TokenBatchSampler, packed, {rows:,} rows": float(1 - lengths.sum() / (rows * max_tokens)),
    }
    try:
        found |= {
            f"grain, best fit, {bins} bins": grain_padding(lengths, max_tokens, bins) for bins in _GRAIN_BINS
        }
    except ImportError:
        print("grain is not installed: pip install -c constraints.txt -e '.[peers]'")
    return [[name, f"{100 * part:.3f}"] for name, part in found.items()]


def time_of_plans(lengths: np.ndarray, max_tokens: int, samples: int) -> list[list[str]]:
    """A row for each layout: seconds of a plan, and microseconds of a step."""
    many = np.random.default_rng(0).choice(lengths, samples)
    table = []
    for layout in ("padded", "packed"):
        sampler = TokenBatchSampler(many, max_tokens, layout=layout, num_replicas=1, rank=0)
        began_s = time.perf_counter()
        batches = len(sampler)
        planned_s = time.perf_counter()
        for _ in sampler:
            pass
        step_us = 1e6 * (time.perf_counter() - planned_s) / batches
        table.append([layout, f"{planned_s - began_s:.2f}", f"{step_us:.1f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--max-tokens", type=whole_number(1), default=4096, help="budget of a batch (%(default)s)"
    )
    parser.add_argument(
        "--samples", type=whole_number(1), default=1_000_000, help="lengths to plan (%(default)s)"
    )
    given = parser.parse_args()
    lengths = source_lengths()
    lengths = lengths[lengths <= given.max_tokens]
    print(
        f"{len(lengths):,} texts of {int(np.median(lengths)):,} tokens (median), {lengths.max():,} at most\n"
    )
    print(render_table([["batches", "padding, %"], *compare(lengths, given.max_tokens)], texts=1))
    print(f"\n{given.samples:,} lengths drawn from these\n")
    figures = time_of_plans(lengths, given.max_tokens, given.samples)
    print(render_table([["layout", "plan, s", "step, us"], *figures], texts=1))


if __name__ == "__main__":
    main()
