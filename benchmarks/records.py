"""Records between the benchmark and the process of one measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Spec:
    """The specification of one measurement, sent to its fresh process.

    `contestant` is a registered loader, or "limit". `plugins` are files that register more
    workloads and loaders. The window lasts `seconds` and at least `min_batches`, but never much
    longer than four times `seconds`. After `timeout_s` the process says where it hangs, and ends.
    """

    workload: str
    contestant: str
    workers: int
    prefetch_factor: int
    seconds: float
    warmup_s: float
    min_batches: int
    descriptor_batches: int
    timeout_s: float
    quick: bool
    plugins: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Writes the specification as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Reads the output of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "plugins": tuple(fields["plugins"])})


@dataclass(frozen=True)
class Measurement:
    """The figures of one fresh process; counts are of the timed window unless said otherwise.

    `checksum` covers every byte of the first batches. `wrong_batches` counts the later batches (warm-up and
    window) whose touched values differ from those of the batch that was due. Descriptors are the main
    process's. `cpu_s` is the processor time of all processes of the measurement, `foreign_share` what other
    processes used, as a share of all cores' time.

    Start-ups: `first_batch_s` is the time from before the loader was made to the first batch, `made_s` the
    part of it until the loader was made. Training loops: `wait_share` is the share of time in `next`.
    """

    contestant: str
    batches: int
    window_s: float
    batches_per_s: float
    samples_per_s: float
    nbytes_per_s: float
    cpu_s: float
    foreign_share: float
    batch_nbytes: int
    checksum: str
    wrong_batches: int = 0
    descriptors_min: int | None = None
    descriptors_max: int | None = None
    reserved_nbytes: int | None = None
    slot_bound_nbytes: int | None = None
    statistics: dict[str, Any] | None = None
    details: dict[str, float] | None = None
    first_batch_s: float | None = None
    made_s: float | None = None
    wait_share: float | None = None
