# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What is measured while training: JSON lines, memory peaks, and the summary of a run."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

UNTIMED_STEPS = 5  # the first steps pay for allocators, autotuning and first collectives


class MetricsFile:
    """A JSONL file that one rank writes, one object per line, flushed so that it can be followed."""

    def __init__(self, path: Path | None):
        """`path` None (the other ranks) writes nothing."""
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a")

    def write(self, **values: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict]:
    """The file's lines; a last line that a crash left incomplete is dropped."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for i, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if i + 1 < len(lines):
                raise ValueError(
                    f"{path}, line {i + 1}: not JSON: {line[:80]!r}. Delete the line, or the file."
                ) from None
    return records


def truncate_metrics(path: Path, steps: int) -> None:
    """Drops what was logged after `steps` steps, which a run resumed from there will log again."""
    kept = [record for record in read_metrics(path) if record["step"] <= steps]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))


class PeakMemory:
    """Peak memory of this process since the last `reset`: CUDA's allocator on GPUs, resident memory on CPUs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.name = "peak GPU memory" if device.type == "cuda" else "peak RSS"

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # Linux with glibc: give back what earlier runs freed, then set the peak to what is resident now. Elsewhere
            # the peak is the process's since its start.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            status = Path("/proc/self/status").read_text()
            return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
        except (OSError, StopIteration):
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Summary:
    """One run's results; bytes and tokens are of all ranks together, the peak is the largest of any rank."""

    held_out_loss: float
    train_loss: float
    forward_bytes: float  # sent per step to other ranks in forward legs
    recompute_bytes: float  # the same, for forward legs that activation checkpointing ran again
    backward_bytes: float
    tokens_per_second: float
    peak_bytes: int
    memory_name: str
    metrics: str

    def as_dict(self) -> dict:
        return asdict(self)


def summarize(path: Path, peak_bytes: int, memory_name: str) -> Summary:
    """Reads a finished run's JSONL. The speed is the median step's, so that a hiccup of the machine does not count."""
    records = read_metrics(path)
    steps = [record for record in records if "loss" in record]
    held_out = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    timed = steps[UNTIMED_STEPS:] or steps
    return Summary(
        held_out_loss=held_out[-1] if held_out else math.nan,
        train_loss=statistics.fmean(record["loss"] for record in steps[-10:]),
        forward_bytes=statistics.fmean(record["forward_bytes"] for record in steps),
        recompute_bytes=statistics.fmean(record["recompute_bytes"] for record in steps),
        backward_bytes=statistics.fmean(record["backward_bytes"] for record in steps),
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in timed),
        peak_bytes=peak_bytes,
        memory_name=memory_name,
        metrics=str(path),
    )


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sums each value over all ranks, in FP64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest of the ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()
