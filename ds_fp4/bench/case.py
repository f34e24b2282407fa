# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""One kernel at one shape, as a benchmark measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# What a case makes: the call, the bytes it must move (each input read once, each output written once), and another way
# to the same result to compare with, if there is one.
Made = tuple[Callable[[], object], int, Callable[[], object] | None]


@dataclass(frozen=True)
class Case:
    """A kernel at a shape.

    Attributes:
        name: of the call, with what it is told apart by.
        shapes: for people: "[65536, 2048], 32 experts".
        make: builds inputs and outputs on a device, and calls on them. Everything is random data. Each call of `make`
            gives fresh tensors, so that a benchmark may rotate among several sets.
        peer: what the third part of `make`'s result is, "torch eager".
    """

    name: str
    shapes: str
    make: Callable[[torch.device], Made]
    peer: str = ""
