# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level's autograd function: tokens and routing in, combined output out.

    forward                                          backward
    home   quantize tokens, gather records           quantize dy, gather records
           ---- dispatch, one all-to-all ----         ---- combine's gradient, one all-to-all ----
    there  FP8 rows in expert order                  FP8 rows in expert order
           GEMM gate and up                          GEMM dh
           activation * routing weight               activation backward
           GEMM down                                 GEMM dx
           sum over local experts                    sum over local experts
           ---- combine, one all-to-all ----          ---- dispatch's gradient, one all-to-all ----
    home   sum over ranks                            weight gradients while it travels; sum over ranks

What is kept for backward: the records that were received (they are read again for the weight gradient), gate_up as the
recipe says, and the routing. All of it goes through autograd's saved tensors, so that checkpointing, offloading hooks
and a graph freed without backward treat it as they treat any operation's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ds_fp4 import ops
from ds_fp4.experts.exchange import Counts
from ds_fp4.experts.records import RecordFormat
from ds_fp4.experts.weights import Pair, come_and_go, split_kinds, stacked
from ds_fp4.gemm import Groups

if TYPE_CHECKING:
    from ds_fp4.experts.layer import ExpertLayer


def apply_experts(
    layer: ExpertLayer,
    x: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`ExpertLayer.__call__` after its checks; scores are FP32."""
    return _Experts.apply(layer, x, scores, expert_ids, *weights)


class Routing(NamedTuple):
    """Tensors of one forward's routing that its backward needs, in the order they are saved."""

    expert_ids: torch.Tensor  # [T, k]
    tokens: torch.Tensor  # [n], the token of each record sent
    records: torch.Tensor  # [T, k], records of each token
    order: torch.Tensor  # [P], the received record of each padded row
    weights: torch.Tensor  # [P], its routing weight
    m_indices: torch.Tensor  # [P], its expert
    group_sizes: torch.Tensor  # [E]
    padded_offsets: torch.Tensor  # [E + 1]
    places: torch.Tensor  # [U, k], padded rows of each received record

    def groups(self, counts: Counts) -> Groups:
        return Groups(self.m_indices, self.padded_offsets, counts.padded_sizes)

    def padded_sizes(self) -> torch.Tensor:
        return self.padded_offsets.diff()


def _release_saved(ctx: torch.autograd.function.FunctionCtx) -> None:
    """Drop autograd's own references to what a backward has read, unless its graph is kept for another.

    It would hold them until backward returns, and does where this method of torch's compiled backwards is missing. So
    after an error (out of memory) the same backward cannot be called again.
    """
    if hasattr(ctx, "maybe_clear_saved_tensors"):
        ctx.maybe_clear_saved_tensors()


def _gradient_tail(layer: ExpertLayer, records: torch.Tensor) -> torch.Tensor | None:
    """The routing weights' gradients in records of dispatch's backward leg: FP32 [n, k]; None if they have no tail."""
    size = layer.dispatch_backward.tail_data_bytes
    return layer.dispatch_backward.tail(records)[:, :size].view(torch.float32) if size else None


def _sum_over_ranks(
    layer: ExpertLayer, records: RecordFormat, returned: torch.Tensor, lists: torch.Tensor
) -> torch.Tensor:
    """[T, H]: each token's sum over the ranks that it was sent to, at most one record from each."""
    ranks = layer.spec.ep_size
    if ranks == 1 and returned.shape[0] == lists.shape[0]:
        # Every token has its one record, in the order of tokens.
        return records.values(returned)
    return records.sums(returned, lists if lists.shape[1] <= ranks else lists[:, :ranks].contiguous())


def dispatch(
    layer: ExpertLayer,
    x: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, Routing, Counts, Pair | None]:
    """Tokens to the ranks of their experts.

    Returns:
        The records received, uint8 [U, bytes]; their routing; the counts; the first GEMM's FP8 weights, made while
        the counts travel (None without weights).
    """
    spec, exchange, records = layer.spec, layer.exchange, layer.dispatch
    tables = exchange.new_tables(spec.local_experts, x.device)
    send = ops.plan_send(expert_ids, spec.ep_size, spec.local_experts, table=tables[0])
    pending_counts = exchange.start_counts(tables)
    # The GPU works on while counts travel: as many records are made as there may be, and those that are not are
    # zeros at the end.
    fronts = records.encode(x.contiguous(), records.allocate_fronts(x.shape[0], x.device))
    outgoing, tail = records.gather(fronts, send.tokens)
    ops.pack_routing(expert_ids, scores, send.tokens, send.records, spec.local_experts, out=tail)
    del fronts, tail
    w13 = layer.cache.get(weights, "w13") if weights else None
    # From here on the GPU has nothing to do until records travel, and then until they are read.
    to_ranks, from_ranks = pending_counts.wait()
    sent = sum(to_ranks)
    travelling = exchange.start(outgoing[:sent], to_ranks, from_ranks)
    counts = Counts(to_ranks, from_ranks, pending_counts.padded_sizes())
    received = travelling.wait()
    del outgoing, travelling
    plan = ops.plan_receive(records.tail(received), spec.top_k, spec.local_experts, counts.padded_rows)
    routing = Routing(
        expert_ids,
        send.tokens[:sent],
        send.records,
        plan.order,
        plan.weights,
        plan.m_indices,
        plan.group_sizes,
        plan.padded_offsets,
        plan.places,
    )
    return received, routing, counts, w13


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, scores, expert_ids, *weights):
        compute, device, dtype = layer.compute, x.device, x.dtype
        received, routing, counts, w13 = dispatch(layer, x, scores, expert_ids, weights)
        groups = routing.groups(counts)

        gate_up = compute.gemm(layer.dispatch.gemm_rows(received, routing.order), w13, groups)
        del w13  # where nothing is kept, FP8 weights live as long as their GEMM
        h, saved = compute.activate(gate_up, routing.weights)
        del gate_up
        y = compute.gemm(h, layer.cache.get(weights, "w2"), groups)
        del h
        outgoing = layer.combine.allocate(received.shape[0], device)
        layer.combine.sum_into(y, routing.places, outgoing)
        del y
        returned = layer.exchange.start(outgoing, counts.received, counts.sent).wait()
        output = _sum_over_ranks(layer, layer.combine, returned, routing.records)

        ctx.layer, ctx.counts, ctx.dtype = layer, counts, dtype
        ctx.keep_fp8 = not come_and_go(weights)
        ctx.parts = (len(weights), len(routing))
        ctx.save_for_backward(*weights, *routing, received, *saved)
        return output.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        layer, counts = ctx.layer, ctx.counts
        exchange, compute = layer.exchange, layer.compute
        count, routing_parts = ctx.parts
        tensors = ctx.saved_tensors
        weights = tensors[:count]
        routing = Routing(*tensors[count : count + routing_parts])
        received, *saved = tensors[count + routing_parts :]
        del tensors
        _release_saved(ctx)  # so that each lives as long as it is needed here
        groups = routing.groups(counts)
        needs_x, needs_scores = ctx.needs_input_grad[1:3]
        needs_weights = ctx.needs_input_grad[4:]

        fronts = layer.combine_backward.allocate_fronts(dy.shape[0], dy.device)
        layer.combine_backward.encode(dy.contiguous(), fronts)
        outgoing = layer.combine_backward.gather(fronts, routing.tokens)[0]  # no tail
        del fronts
        travelling = exchange.start(outgoing, counts.sent, counts.received)
        w2_t = layer.cache.get(weights, "w2_t", ctx.keep_fp8)
        gradient = travelling.wait()
        del outgoing, travelling
        dh = compute.gemm(layer.combine_backward.gemm_rows(gradient, routing.order), w2_t, groups)
        del w2_t
        if compute.recomputes_gate_up:
            w13 = layer.cache.get(weights, "w13", ctx.keep_fp8)
            saved = [compute.gemm(layer.dispatch.gemm_rows(received, routing.order), w13, groups)]
            del w13
        d = compute.activate_backward(dh, routing.weights, tuple(saved), routing.group_sizes)
        del dh, saved

        travelling = None
        if needs_x or needs_scores:
            w13_t = layer.cache.get(weights, "w13_t", ctx.keep_fp8)
            dx = compute.gemm((d.row, d.row_scales), w13_t, groups)
            del w13_t
            outgoing = layer.dispatch_backward.allocate(received.shape[0], dy.device)
            layer.dispatch_backward.sum_into(dx, routing.places, outgoing)
            del dx
            gathered = ops.gather_gradients(d.weights, routing.places, out=_gradient_tail(layer, outgoing))
            travelling = exchange.start(outgoing, counts.received, counts.sent)
            del outgoing
        operands = [received, gradient, d._replace(row=None, row_scales=None)]  # only dx needed the rows
        del received, gradient, d
        weight_gradients = _weight_gradients(layer, weights, needs_weights, operands, routing, groups)

        x_gradient = scores_gradient = None
        if travelling is not None:
            returned = travelling.wait()
            if needs_x:
                x_gradient = _sum_over_ranks(layer, layer.dispatch_backward, returned, routing.records)
                x_gradient = x_gradient.to(ctx.dtype)
            if needs_scores:
                tail = _gradient_tail(layer, returned)
                scores_gradient = ops.return_gradients(
                    routing.expert_ids, routing.records, gathered if tail is None else tail, layer.spec.local_experts
                )
        return None, x_gradient, scores_gradient, None, *weight_gradients


def _weight_gradients(layer, weights, needed, operands, routing, groups) -> list[torch.Tensor | None]:
    """Gradients of the expert weights that need one, as sums over this rank's rows, in the weights' order.

    Args:
        operands: received records, their gradient's, and `activate_backward`'s result. The list is emptied, so that
            each can go when it has been read.
    """
    received, gradient, d = operands
    operands.clear()
    device = received.device
    is_stacked = stacked(weights)
    kinds = split_kinds(weights, is_stacked)
    needs = [kind if is_stacked else any(kind) for kind in split_kinds(needed, is_stacked)]

    def new_gradient(kind) -> torch.Tensor:
        shape = kind.shape if is_stacked else (len(kind), *kind[0].shape)
        dtype = (kind if is_stacked else kind[0]).dtype
        # The GEMM libraries write BF16 and FP32; autograd casts to what the parameter is.
        dtype = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
        return torch.empty(shape, dtype=dtype, device=device)

    gradients: list[torch.Tensor | None] = [None, None, None]
    order_and_layout = routing.order, routing.padded_sizes(), layer.compute.column_scale_layout
    if needs[1]:
        gradients[1] = new_gradient(kinds[1])
        columns = layer.combine_backward.gemm_columns(gradient, *order_and_layout)
        gradient = None
        layer.compute.weight_gradient(columns, (d.h_col, d.h_col_scales), groups, [gradients[1]])
        del columns
    gradient, d = None, d._replace(h_col=None, h_col_scales=None)
    if needs[0] or needs[2]:
        gradients[0], gradients[2] = new_gradient(kinds[0]), new_gradient(kinds[2])
        columns = layer.dispatch.gemm_columns(received, *order_and_layout)
        received = None
        layer.compute.weight_gradient((d.col, d.col_scales), columns, groups, [gradients[0], gradients[2]])
        del columns
    if is_stacked:
        return [g if need else None for g, need in zip(gradients, needs, strict=True)]
    flat = [g[e] if g is not None else None for g in gradients for e in range(len(kinds[0]))]
    return [g if need else None for g, need in zip(flat, needed, strict=True)]
