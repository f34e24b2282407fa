# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert-parallel all-to-all with a codec per leg and direction.

One collective per leg and direction: a row's data and scales travel in one record (`ds_fp4.codec`). The legs are
named as in the `ds_fp4.all_to_all` block; dispatch's gradient travels on `dispatch_backward`, combine's on
`combine_backward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch.autograd.function import once_differentiable

from ds_fp4.codec import Codec, make_codec
from ds_fp4.config import LayerRecipe


@dataclass(frozen=True)
class Leg:
    """One leg of the exchange: what travels forward and what travels backward. None sends tensors as they are."""

    name: str
    forward: Codec | None
    backward: Codec | None


def make_legs(recipe: LayerRecipe, hidden: int) -> tuple[Leg, Leg]:
    """Dispatch and combine legs of a layer whose rows hold `hidden` elements."""

    def codec(name: str) -> Codec | None:
        return make_codec(name, hidden, recipe.scale_rounding)

    return (
        Leg("dispatch", codec(recipe.dispatch_forward), codec(recipe.dispatch_backward)),
        Leg("combine", codec(recipe.combine_forward), codec(recipe.combine_backward)),
    )


def _exchange(
    rows: torch.Tensor,
    codec: Codec | None,
    group: Any,
    send_splits: list[int] | None,
    receive_splits: list[int] | None,
) -> torch.Tensor:
    """[N, hidden] -> [sum(receive_splits) or N, hidden], in one collective."""
    # Experts and autograd may hand over any layout (the gradient of a sum has strides of 0), as DeepSpeed allows.
    rows = rows.contiguous()
    payload = rows if codec is None else codec.encode(rows)
    received_rows = payload.shape[0] if receive_splits is None else sum(receive_splits)
    received = torch.empty(received_rows, payload.shape[1], dtype=payload.dtype, device=payload.device)
    dist.all_to_all_single(received, payload, receive_splits, send_splits, group=group)
    return received if codec is None else codec.decode(received, rows.dtype)


class _CodecAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leg, group, send_splits, receive_splits):
        ctx.leg, ctx.group, ctx.splits = leg, group, (receive_splits, send_splits)
        return _exchange(rows, leg.forward, group, send_splits, receive_splits)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _exchange(grad, ctx.leg.backward, ctx.group, *ctx.splits), None, None, None, None


def codec_all_to_all(
    rows: torch.Tensor,
    leg: Leg,
    group: Any,
    send_splits: list[int] | None = None,
    receive_splits: list[int] | None = None,
) -> torch.Tensor:
    """Differentiable all-to-all of rows.

    Args:
        rows: BF16, FP16 or FP32 [..., hidden]. With splits, [N, hidden]; without, the rows are split evenly.
        leg: the codecs of the forward and the backward exchange.
        group: process group.
        send_splits, receive_splits: rows to and from each rank of the group; both None for an even split.

    Returns the received rows: [sum(receive_splits), hidden] with splits, else the shape of `rows`.
    """
    hidden = rows.shape[-1]
    received = _CodecAllToAll.apply(rows.reshape(-1, hidden), leg, group, send_splits, receive_splits)
    return received if receive_splits is not None else received.view(rows.shape)
