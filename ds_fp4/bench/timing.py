# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""How long work on a GPU takes, by CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

# Enough for the host to queue all runs behind it, so that none waits for its launch. In clock cycles.
HEAD_START = 8_000_000
# Cycles a second that no Hopper GPU exceeds.
HIGHEST_CLOCK = 2_000_000_000


def median_seconds(runs: Sequence[Callable[[], object]], repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one run, the runs taken in turn (over different buffers, so that caches do not help)."""
    for i in range(max(warmup, len(runs))):
        runs[i % len(runs)]()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    for i, (start, end) in enumerate(events):
        start.record()
        runs[i % len(runs)]()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3


def median_seconds_in_graph(run: Callable[[], object], calls: int = 20, repeats: int = 10) -> float:
    """Median time of one of `calls` runs in a CUDA graph: the time of small work, without the host's."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return median_seconds([graph.replay], repeats) / calls


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy of `size` bytes on the device."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds([lambda: target.copy_(source)])
