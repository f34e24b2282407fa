# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The routing plan: `ds_fp4.reference.routing` for host tensors, CUDA kernels for CUDA tensors, with the same results.

Two kernels plan what is sent, one packs it, two plan what was received. No call waits for a GPU; each may be captured
in a CUDA graph. Besides its outputs a plan allocates the counts that its two kernels share.
"""

from __future__ import annotations

import functools

import torch

from ds_fp4.ops.kernels import BLOCKS_PER_MULTIPROCESSOR, KERNELS, THREADS
from ds_fp4.ops.launching import launch, multiprocessors, on_gpu, row_stride
from ds_fp4.reference import routing
from ds_fp4.reference.routing import ReceivePlan, SendPlan, routing_bytes

__all__ = [
    "ReceivePlan",
    "SendPlan",
    "gather_gradients",
    "pack_routing",
    "plan_receive",
    "plan_send",
    "return_gradients",
    "routing_bytes",
]

# Each block of a plan's second kernel adds up the counts of all: more of them take longer over that than they save.
_MOST_BLOCKS = 64
_ROWS_A_BLOCK = 256


def _plan_blocks(rows: int) -> int:
    return max(1, min(_MOST_BLOCKS, -(-rows // _ROWS_A_BLOCK)))


def _entry_grid(entries: int, device: int) -> int:
    return min(-(-entries // THREADS), multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)


def _slots_grid(rows: int, k: int, device: int) -> int:
    """Blocks that take whole rows a warp, as many as fit."""
    return min(-(-rows // ((32 // k) * (THREADS // 32))), multiprocessors(device) * BLOCKS_PER_MULTIPROCESSOR)


def _ids(expert_ids: torch.Tensor) -> tuple[str, dict[str, int]]:
    name = "SendIds8" if expert_ids.dtype == torch.int64 else "SendIds4"
    return name, {"ids": expert_ids.data_ptr(), "ids_stride": row_stride(expert_ids)}


@functools.wraps(routing.plan_send)
def plan_send(
    expert_ids: torch.Tensor, ranks: int, local_experts: int, *, table: torch.Tensor | None = None
) -> SendPlan:
    if not on_gpu(expert_ids):
        return routing.plan_send(expert_ids, ranks, local_experts, table=table)
    plan = routing.prepare_plan_send(expert_ids, ranks, local_experts, table)
    (tokens, k), device = expert_ids.shape, expert_ids.device.index
    blocks, experts = _plan_blocks(tokens), ranks * local_experts
    counts = torch.empty(blocks, experts + ranks, dtype=torch.int32, device=expert_ids.device)
    template, values = _ids(expert_ids)
    values |= {
        "rows": tokens,
        "k": k,
        "local_experts": local_experts,
        "experts": experts,
        "counts_a_block": experts + ranks,
        "counts": counts.data_ptr(),
    }
    launch(KERNELS["route_count"], template, blocks, values, device)
    values |= {
        "ranks": ranks,
        "tokens": plan.tokens.data_ptr(),
        "most_records": plan.tokens.shape[0],
        "records": plan.records.data_ptr(),
        "table": plan.table.data_ptr(),
    }
    launch(KERNELS["route_send"], template, blocks, values, device)
    return plan


@functools.wraps(routing.pack_routing)
def pack_routing(
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    records: torch.Tensor,
    local_experts: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not on_gpu(expert_ids):
        return routing.pack_routing(expert_ids, scores, tokens, records, local_experts, out=out)
    new = out is None
    out = routing.prepare_pack_routing(expert_ids, scores, tokens, records, local_experts, out)
    if new:
        out.zero_()
    count, k = tokens.shape[0], expert_ids.shape[1]
    if count == 0:
        return out
    device = expert_ids.device.index
    template, values = _ids(expert_ids)
    target = out.data_ptr()
    values |= {
        "rows": count,
        "k": k,
        "scores": scores.data_ptr(),
        "scores_stride": row_stride(scores),
        "local_experts": local_experts,
        "input_rows": expert_ids.shape[0],
        "tokens": tokens.data_ptr(),
        "records": records.data_ptr(),
        "weights_out": target,
        "ids_out": target + 4 * k,
        "out_stride": row_stride(out),
    }
    launch(KERNELS["pack_routing"], template, _slots_grid(count, k, device), values, device)
    return out


@functools.wraps(routing.plan_receive)
def plan_receive(routing_records: torch.Tensor, k: int, local_experts: int, padded_rows: int) -> ReceivePlan:
    if not on_gpu(routing_records):
        return routing.plan_receive(routing_records, k, local_experts, padded_rows)
    plan = routing.prepare_plan_receive(routing_records, k, local_experts, padded_rows)
    records, device = routing_records.shape[0], routing_records.device.index
    blocks = _plan_blocks(records)
    counts = torch.empty(blocks, local_experts, dtype=torch.int32, device=routing_records.device)
    weights, stride = routing_records.data_ptr(), row_stride(routing_records)
    values = {
        "rows": records,
        "k": k,
        "ids": weights + 4 * k,
        "ids_stride": stride,
        "local_experts": local_experts,
        "experts": local_experts,
        "counts_a_block": local_experts,
        "counts": counts.data_ptr(),
    }
    launch(KERNELS["route_count"], "ReceivedIds", blocks, values, device)
    values |= {
        "weights": weights,
        "stride": stride,
        "padded_rows": padded_rows,
        "order": plan.order.data_ptr(),
        "row_weights": plan.weights.data_ptr(),
        "m_indices": plan.m_indices.data_ptr(),
        "group_sizes": plan.group_sizes.data_ptr(),
        "padded_offsets": plan.padded_offsets.data_ptr(),
        "places": plan.places.data_ptr(),
    }
    launch(KERNELS["route_receive"], "128", blocks, values, device)
    return plan


@functools.wraps(routing.gather_gradients)
def gather_gradients(
    gradients: torch.Tensor, places: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    if not on_gpu(gradients):
        return routing.gather_gradients(gradients, places, out=out)
    out = routing.prepare_gather_gradients(gradients, places, out)
    rows, k = places.shape
    if rows * k == 0:
        return out
    device = gradients.device.index
    values = {
        "rows": rows,
        "k": k,
        "input_rows": gradients.shape[0],
        "gradients": gradients.data_ptr(),
        "places": places.data_ptr(),
        "out": out.data_ptr(),
        "out_stride": row_stride(out),
    }
    launch(KERNELS["gather_gradients"], "1", _entry_grid(rows * k, device), values, device)
    return out


@functools.wraps(routing.return_gradients)
def return_gradients(
    expert_ids: torch.Tensor, records: torch.Tensor, gradients: torch.Tensor, local_experts: int
) -> torch.Tensor:
    if not on_gpu(expert_ids):
        return routing.return_gradients(expert_ids, records, gradients, local_experts)
    out = routing.prepare_return_gradients(expert_ids, records, gradients, local_experts)
    tokens, k = expert_ids.shape
    if tokens == 0:
        return out
    device = expert_ids.device.index
    template, values = _ids(expert_ids)
    values |= {
        "rows": tokens,
        "k": k,
        "local_experts": local_experts,
        "input_rows": gradients.shape[0],
        "records": records.data_ptr(),
        "gradients": gradients.data_ptr(),
        "gradients_stride": row_stride(gradients),
        "out": out.data_ptr(),
    }
    launch(KERNELS["return_gradients"], template, _slots_grid(tokens, k, device), values, device)
    return out
