# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""FP8 copies of the expert weights, made once per optimizer step.

A stale copy would train wrong without a word, and DeepSpeed's optimizers change weights in ways that
`Tensor._version` does not show (they write through `.data` and flat buffers). So a copy belongs to an epoch, which the
engine's optimizer step and everything that loads weights end (`ds_fp4.engine`); `_version` and the address are looked
at besides, for changes made by hand. Under ZeRO-3 a parameter's memory comes and goes, and nothing is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ds_fp4 import ops

Pair = tuple[torch.Tensor, torch.Tensor]

_epochs = itertools.count(1)
_epoch = 0


def weights_changed() -> None:
    """Tell ds_fp4 that expert weights were changed by other means than the engine's step or a loaded checkpoint.

    Needed after writes through `.data` (an exponential moving average swapped in, for example) and after steps of the
    optimizer that the engine does not know of (`engine.optimizer.step()`); in-place operations on the parameters
    themselves are noticed.
    """
    global _epoch
    _epoch = next(_epochs)


class Fp8Weights(NamedTuple):
    """Operands of the data GEMMs, codes and FP32 scales of 128 x 128 blocks.

    Attributes:
        w13: [E, 2I, H], gate over up. w13_t: [E, H, 2I]. w2: [E, H, I]. w2_t: [E, I, H].
    """

    w13: Pair
    w13_t: Pair
    w2: Pair
    w2_t: Pair


def quantize(weights: Sequence[torch.Tensor]) -> Fp8Weights:
    """FP8 operands of an expert layer.

    Args:
        weights: (w1, w2, w3) with w1 and w3 [E, I, H] and w2 [E, H, I]; or 3E matrices, all experts' w1 [I, H],
            then w2 [H, I], then w3.
    """
    w1, w2, w3 = split_kinds(weights, stacked(weights))
    if stacked(weights):
        w13, w13_t = ops.weight_to_fp8(w1.detach(), w3.detach())
        return Fp8Weights(w13, w13_t, *ops.weight_to_fp8(w2.detach()))
    (intermediate, hidden), experts, device = w1[0].shape, len(w1), w1[0].device
    gate_up = _new_operands(experts, 2 * intermediate, hidden, device)
    down = _new_operands(experts, hidden, intermediate, device)
    for expert in range(experts):
        one = slice(expert, expert + 1)
        ops.weight_to_fp8(w1[expert].detach()[None], w3[expert].detach()[None], out=_slice(gate_up, one))
        ops.weight_to_fp8(w2[expert].detach()[None], out=_slice(down, one))
    return Fp8Weights(*gate_up, *down)


def stacked(weights: Sequence[torch.Tensor]) -> bool:
    """Whether `quantize`'s argument has a tensor of all experts for each kind, not a matrix an expert."""
    return weights[0].dim() == 3


def split_kinds(items: Sequence, stacked: bool) -> tuple:
    """w1, w2, w3 of `quantize`'s argument or of anything in its order: single items, or lists of one per expert."""
    if stacked:
        return tuple(items)
    experts = len(items) // 3
    return items[:experts], items[experts : 2 * experts], items[2 * experts :]


def _new_operands(experts: int, n: int, k: int, device: torch.device) -> tuple[Pair, Pair]:
    def pair(rows: int, columns: int) -> Pair:
        q = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
        return q, torch.empty(experts, -(-rows // 128), -(-columns // 128), dtype=torch.float32, device=device)

    return pair(n, k), pair(k, n)


def _slice(operands: tuple[Pair, Pair], experts: slice) -> tuple[Pair, Pair]:
    return tuple(tuple(t[experts] for t in pair) for pair in operands)


def come_and_go(weights: Sequence[torch.Tensor]) -> bool:
    """Whether these are ZeRO-3 parameters. What autograd gives back of a saved one may not say so."""
    return any(hasattr(weight, "ds_id") for weight in weights)


class WeightCache:
    """One layer's FP8 weights.

    Args:
        keep: whether to keep them for the rest of the step; else each use quantizes anew.
        quantize: `quantize`, or what stands in for it.
    """

    def __init__(self, keep: bool, quantize: Callable[[Sequence[torch.Tensor]], Fp8Weights] = quantize) -> None:
        self._keep, self._quantize = keep, quantize
        self._key: tuple | None = None
        self._kept: Fp8Weights | None = None

    def get(self, weights: Sequence[torch.Tensor], keep: bool = True) -> Fp8Weights:
        """The FP8 operands of these weights as they are now; `keep` False if they are known to come and go."""
        if not self._keep or not keep or come_and_go(weights):
            return self._quantize(weights)
        key = (_epoch, *((w.data_ptr(), -1 if w.is_inference() else w._version) for w in weights))
        if key != self._key:
            # Let the old copy go first, so that two never exist at a time.
            self._kept = self._key = None
            self._kept = self._quantize(weights)
            self._key = key
        return self._kept
