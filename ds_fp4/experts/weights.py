# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""FP8 copies of the expert weights, each made when a GEMM asks for it, and kept for the optimizer step or not at all.

A stale copy would train wrong without a word, and DeepSpeed's optimizers change weights in ways that
`Tensor._version` does not show (they write through `.data` and flat buffers). So copies belong to an epoch, which the
engine's optimizer step and everything that loads weights end (`ds_fp4.engine`), and are freed with it; `_version` and
the address are looked at besides, for changes made by hand. Under ZeRO-3 a parameter's memory comes and goes, and
nothing is kept.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ds_fp4 import ops

Pair = tuple[torch.Tensor, torch.Tensor]
# What the data GEMMs read. Forward: w13 [E, 2I, H], gate over up, and w2 [E, H, I]. Backward: their transposes, w13_t
# [E, H, 2I] and w2_t [E, I, H], and w13 once more where gate_up is computed again.
Operand = Literal["w13", "w2", "w13_t", "w2_t"]
OPERANDS: tuple[Operand, ...] = ("w13", "w2", "w13_t", "w2_t")

_epochs = itertools.count(1)
_epoch = 0
_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def weights_changed() -> None:
    """Tell ds_fp4 that expert weights were changed by other means than the engine's step or a loaded checkpoint.

    Needed after writes through `.data` (an exponential moving average swapped in, for example) and after steps of the
    optimizer that the engine does not know of (`engine.optimizer.step()`); in-place operations on the parameters
    themselves are noticed. All FP8 copies of this process are freed; the next forward makes new ones.
    """
    global _epoch
    _epoch = next(_epochs)
    for cache in _caches:
        cache.free()


def quantize(weights: Sequence[torch.Tensor], operand: Operand) -> Pair:
    """One FP8 operand of an expert layer: codes, and FP32 scales of 128 x 128 blocks.

    Args:
        weights: (w1, w2, w3) with w1 and w3 [E, I, H] and w2 [E, H, I]; or 3E matrices, all experts' w1 [I, H],
            then w2 [H, I], then w3.
        operand: one of OPERANDS.
    """
    w1, w2, w3 = split_kinds(weights, stacked(weights))
    kinds = (w1, w3) if operand.startswith("w13") else (w2,)
    transposed = operand.endswith("_t")
    orientation = "transposed" if transposed else "rows"
    if stacked(weights):
        return ops.weight_to_fp8(*(kind.detach() for kind in kinds), orientation=orientation)[transposed]
    (n, k), experts, device = kinds[0][0].shape, len(w1), w1[0].device
    rows, columns = (k, n * len(kinds)) if transposed else (n * len(kinds), k)
    codes = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(experts, -(-rows // 128), -(-columns // 128), dtype=torch.float32, device=device)
    for expert in range(experts):
        parts = (kind[expert].detach()[None] for kind in kinds)
        out = codes[expert : expert + 1], scales[expert : expert + 1]
        ops.weight_to_fp8(*parts, orientation=orientation, out=(None, out) if transposed else (out, None))
    return codes, scales


def stacked(weights: Sequence[torch.Tensor]) -> bool:
    """Whether `quantize`'s argument has a tensor of all experts for each kind, not a matrix an expert."""
    return weights[0].dim() == 3


def split_kinds(items: Sequence, stacked: bool) -> tuple:
    """w1, w2, w3 of `quantize`'s argument or of anything in its order: single items, or lists of one per expert."""
    if stacked:
        return tuple(items)
    experts = len(items) // 3
    return items[:experts], items[experts : 2 * experts], items[2 * experts :]


def come_and_go(weights: Sequence[torch.Tensor]) -> bool:
    """Whether these are ZeRO-3 parameters. What autograd gives back of a saved one may not say so."""
    return any(hasattr(weight, "ds_id") for weight in weights)


class WeightCache:
    """One layer's FP8 weights.

    Args:
        keep: whether to keep them for the rest of the step; else each use quantizes anew.
        quantize: `quantize`, or what stands in for it.
    """

    def __init__(self, keep: bool, quantize: Callable[[Sequence[torch.Tensor], Operand], Pair] = quantize) -> None:
        self._keep, self._quantize = keep, quantize
        self._key: tuple | None = None
        self._kept: dict[Operand, Pair] = {}
        _caches.add(self)

    def free(self) -> None:
        """Let go of what is kept."""
        self._kept, self._key = {}, None

    def get(self, weights: Sequence[torch.Tensor], operand: Operand, keep: bool = True) -> Pair:
        """An FP8 operand of these weights as they are now; `keep` False if they are known to come and go.

        All that is kept is of the same weights: once they have changed, be it between a forward and its backward, the
        first operand that is asked for ends all copies of the old ones.
        """
        if not self._keep or not keep or come_and_go(weights):
            return self._quantize(weights, operand)
        key = (_epoch, *((w.data_ptr(), -1 if w.is_inference() else w._version) for w in weights))
        if key != self._key:
            # Let the old copies go first, so that two never exist at a time.
            self._kept, self._key = {}, key
        if operand not in self._kept:
            self._kept[operand] = self._quantize(weights, operand)
        return self._kept[operand]
