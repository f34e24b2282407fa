# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""One row of `ds-fp4 bench kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]
# What a case makes: the call, the bytes it must move, and what to compare it with.
Made = tuple[Run, int, Run | None]


def nbytes(*tensors: torch.Tensor | tuple | list | None) -> int:
    """Bytes of all elements, of nested tuples too; None is nothing."""
    return sum(t.numel() * t.element_size() if isinstance(t, torch.Tensor) else nbytes(*(t or ())) for t in tensors)


@dataclass(frozen=True)
class Case:
    """A kernel at one shape.

    Attributes:
        name: of the call, with what it is told apart by, as `--only` matches it.
        shapes: for people, "[32768, 7168]".
        make: given a CUDA device, makes random inputs and returns what to time, the bytes that must move (each input
            read once, each output written once) and what to compare it with, or None. Must not time anything itself.
            Each call makes fresh tensors.
        peer: what it is compared with, "torch eager", where that needs saying.
        required: the comparison is one of those with a target: made first, before the time for peers is used up.
    """

    name: str
    shapes: str
    make: Callable[[torch.device], Made]
    peer: str = ""
    required: bool = False
