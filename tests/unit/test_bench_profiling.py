# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Busy and idle time of stretches between markers."""

import pytest

from ds_fp4.bench import profiling

MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def test_idle_is_what_no_kernel_covers():
    events = [
        (0, 5, "before"),
        (5, 10, MARK),
        (12, 20, "void a<int>(float)"),
        (15, 30, "nccl"),  # on another stream, over the end of a
        (40, 45, "a"),
        (50, 51, MARK),
        (51, 90, "after"),
    ]
    (stretch,) = profiling.stretches(events)
    assert stretch.span == 40 and stretch.idle == 2 + 10 + 5
    assert stretch.kernels == [(15, 1, "nccl"), (13, 2, "a")]
    assert stretch.gaps == [(10, 20, "nccl", "a"), (5, 35, "a", "end"), (2, 0, "start", "a")]
    assert stretch.lines()[0] == "GPU idle 42.5% of 40 us"


def test_stretches_come_in_pairs_of_markers_and_add_up():
    events = [(i, i + 1, MARK) for i in (0, 10, 20, 30)] + [(2, 5, "a"), (12, 15, "between"), (22, 28, "a")]
    first, second = profiling.stretches(events)
    assert (first.span, first.idle, second.span, second.idle) == (9, 6, 9, 3)
    both = profiling.together([first, second])
    assert (both.span, both.idle, both.kernels) == (18, 9, [(9, 2, "a")])
    with pytest.raises(ValueError, match="two markers, got 5"):
        profiling.stretches([*events, (40, 41, MARK)])
