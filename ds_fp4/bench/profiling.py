# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which kernels ran in a stretch of work on a GPU, and when none did.

A stretch begins and ends with a marker, a kernel of a name of its own on the stream. Kernels of other streams (NCCL's,
every other GEMM of cuBLAS's) count as busy while they run; of kernels beside each other each has its whole time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_MARKER = "spin_kernel"  # torch.cuda._sleep's


def mark(cycles: int = 1) -> None:
    """Put a marker on the current stream that takes as many clock cycles."""
    torch.cuda._sleep(cycles)


@dataclass
class Stretch:
    """Times in microseconds.

    Attributes:
        span: between its markers. idle: of it without a kernel.
        kernels: (time, calls, name), longest first.
        gaps: (length, after the first marker, kernel before, kernel after), longest first.
    """

    span: float = 0.0
    idle: float = 0.0
    kernels: list[tuple[float, int, str]] = field(default_factory=list)
    gaps: list[tuple[float, float, str, str]] = field(default_factory=list)

    def lines(self, kernels: int = 30, gaps: int = 10) -> list[str]:
        """For people."""
        return [
            f"GPU idle {self.idle / self.span:.1%} of {self.span:.0f} us",
            *(f"{time:8.0f} us {calls:3d} x {name}" for time, calls, name in self.kernels[:kernels]),
            *(
                f"idle {time:5.0f} us at {at:6.0f}: {before} -> {after}"
                for time, at, before, after in self.gaps[:gaps]
            ),
        ]


def profile(run: Callable[[], object]) -> list[Stretch]:
    """The stretches of `run`, in order: what happens between its 1st and 2nd marker, its 3rd and 4th, and so on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return stretches(events)


def stretches(events: list[tuple[float, float, str]]) -> list[Stretch]:
    """Stretches of (start, end, name) events of one GPU, markers among them.

    Raises:
        ValueError: on an odd number of markers.
    """
    events = sorted(events)
    markers = [(start, end) for start, end, name in events if _MARKER in name]
    if len(markers) % 2:
        raise ValueError(f"every stretch has two markers, got {len(markers)} in all")
    found = []
    for (_, first), (last, _) in zip(markers[::2], markers[1::2], strict=True):
        inside = [
            (max(start, first), min(end, last), name)
            for start, end, name in events
            if _MARKER not in name and end > first and start < last
        ]
        found.append(_stretch(inside, first, last))
    return found


def _stretch(events: list[tuple[float, float, str]], first: float, last: float) -> Stretch:
    result = Stretch(span=last - first)
    by_name: dict[str, list[float]] = {}
    busy_until, previous = first, "start"
    for start, end, name in [*events, (last, last, "end")]:
        short = name.split("<")[0].split("(")[0].removeprefix("void ")[:50]
        if start > busy_until:
            result.idle += start - busy_until
            result.gaps.append((start - busy_until, busy_until - first, previous, short))
        if end > start:
            by_name.setdefault(short, []).append(end - start)
        if end >= busy_until:
            busy_until, previous = end, short
    result.kernels = sorted(((sum(t), len(t), name) for name, t in by_name.items()), reverse=True)
    result.gaps.sort(reverse=True)
    return result


def together(parts: list[Stretch]) -> Stretch:
    """Several stretches as one; gaps keep the times of their own."""
    total = Stretch(sum(p.span for p in parts), sum(p.idle for p in parts))
    by_name: dict[str, tuple[float, int]] = {}
    for part in parts:
        total.gaps += part.gaps
        for time, calls, name in part.kernels:
            before = by_name.get(name, (0.0, 0))
            by_name[name] = (before[0] + time, before[1] + calls)
    total.kernels = sorted(((time, calls, name) for name, (time, calls) in by_name.items()), reverse=True)
    total.gaps.sort(reverse=True)
    return total
