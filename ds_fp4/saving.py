# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.saved_tensors`: autograd keeps what it saves for backward in packed form. Nothing is recomputed."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_fp4.packing import Format, Packer, View, is_packable


class _Kept:
    """A saved tensor that is not packed."""

    __slots__ = ("tensor", "version")

    def __init__(self, t: torch.Tensor) -> None:
        # Itself if it is a leaf: ZeRO-3 swaps the memory of parameters, and an alias would keep what it frees. Else an
        # alias: a node that held its own output would hold itself.
        self.tensor = t if t.is_leaf else t.detach()
        self.version = t._version

    def unpack(self) -> torch.Tensor:
        # Autograd leaves this check to the hooks.
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a {self.tensor.dtype} tensor of shape {tuple(self.tensor.shape)} that backward needs was changed by "
                f"an in-place operation: it is at version {self.tensor._version}, expected version {self.version}. "
                "Make the operation out-of-place, or clone the tensor first."
            )
        return self.tensor


class _Packed:
    """A saved tensor that is packed."""

    __slots__ = ("view", "buffer")

    def __init__(self, view: View, buffer: torch.Tensor) -> None:
        self.view, self.buffer = view, buffer

    @torch.no_grad()
    def unpack(self) -> torch.Tensor:
        return self.view.of(self.view.run.decode(self.buffer))


class saved_tensors(saved_tensors_hooks):
    """Context in which autograd saves activations packed.

        with ds_fp4.saved_tensors(format="fp8"):
            loss = model(batch)
        loss.backward()

    The forward is untouched; gradients are computed from the packed values. Packed is what `packing.is_packable` says:
    BF16, FP16 or FP32 tensors that need a gradient, in rows of at least 32 values, 2,048 in all. Integers, masks,
    statistics of normalizations and attention (which need no gradient), small tensors and parameters (their views,
    casts and concatenations too) are kept as they are. What several operations save of the same memory is packed once;
    a slice that was saved before the tensor it is part of is packed apart from it.

    Args:
        format: "fp8" or "mxfp4".
        scale_rounding: how the scale of an MXFP4 block is rounded: "even", "floor", "rceil" or "ceil".

    Raises:
        ValueError: on another format or scale_rounding.
    """

    def __init__(self, format: str = "fp8", *, scale_rounding: str = "even") -> None:
        packer = Packer(Format(format, scale_rounding))

        def pack(t: torch.Tensor) -> _Kept | _Packed:
            return _Packed(*packer.pack(t)) if is_packable(t) else _Kept(t)

        def unpack(saved: _Kept | _Packed) -> torch.Tensor:
            return saved.unpack()

        super().__init__(pack, unpack)
