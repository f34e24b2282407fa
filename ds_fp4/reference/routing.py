# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The routing plan: who gets which token, in which order experts see them, and the way back.

At home a rank has T tokens, each with k experts among ranks * local_experts, expert e living on rank e //
local_experts. A token travels to a rank once, in one record, however many of its experts live there:

    plan_send           the records, by rank, then by token
    pack_routing        each record's end: which local experts, with which weights
    plan_receive        where they arrive: rows in expert order, padded to 128 an expert
    gather_gradients    the routing weights' gradients from expert order into records
    return_gradients    and from returned records to their places at home

The routing of a record is `routing_bytes(k)` bytes, a multiple of 16: FP32 weights [k], then int16 local ids [k], in
the order of the token's slots; weight 0 and id -1 past the last.

Everything is deterministic. Buffers are sized from host integers; no call waits for a GPU.
"""

from typing import NamedTuple

import torch

from ds_fp4.formats import checks
from ds_fp4.formats.columns import TILE_ROWS

MAX_SLOTS = 32
MAX_LOCAL_EXPERTS = 1024
MAX_RANKS = 1024
MAX_EXPERTS = 4096

_RECORD_ALIGNMENT = 16
_ID_DTYPES = (torch.int32, torch.int64)


class SendPlan(NamedTuple):
    """What leaves a rank; n = records, most = T * min(k, ranks).

    Attributes:
        tokens: int32 [most], each record's token; -1 past the last record.
        records: int32 [T, k], each token's records in the order of the slots that named their ranks; -1 past the last.
        table: int32 [ranks, local_experts + 1], entries of each expert and, in the last column, records to each rank.
    """

    tokens: torch.Tensor
    records: torch.Tensor
    table: torch.Tensor


class ReceivePlan(NamedTuple):
    """What arrives, in the order of local experts; U = records received, P = padded rows.

    Attributes:
        order: int32 [P], each padded row's record, -1 for padding: the `index` of conversions.
        weights: float32 [P], its routing weight, 0 for padding.
        m_indices: int32 [P], its expert, -1 for padding.
        group_sizes: int32 [local_experts], rows of each expert without padding.
        padded_offsets: int32 [local_experts + 1], each expert's first padded row; the last is where padding of the
            last ends.
        places: int32 [U, k], padded row of each record's entry, -1 for none: lists for `combine_rows`.
    """

    order: torch.Tensor
    weights: torch.Tensor
    m_indices: torch.Tensor
    group_sizes: torch.Tensor
    padded_offsets: torch.Tensor
    places: torch.Tensor


def routing_bytes(k: int) -> int:
    """Bytes of a record's routing for k experts a token."""
    return -(-6 * k // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT


def check_slots(k: int) -> None:
    if not 1 <= k <= MAX_SLOTS:
        raise ValueError(f"a token must have 1 to {MAX_SLOTS} experts, got {k}")


def check_count(name: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be 1 to {most}, got {value!r}")


def check_counts(ranks: int, local_experts: int) -> None:
    check_count("ranks", ranks, MAX_RANKS)
    check_count("local_experts", local_experts, MAX_LOCAL_EXPERTS)
    if ranks * local_experts > MAX_EXPERTS:
        raise ValueError(f"there must be at most {MAX_EXPERTS} experts, got {ranks} ranks of {local_experts}")


def check_expert_ids(expert_ids: torch.Tensor, experts: int | None) -> tuple[int, int]:
    """T and k. `experts`, where known: values in [-1, experts) on the host."""
    checks.check_tensor("expert_ids", expert_ids, _ID_DTYPES, None, 2)
    check_slots(expert_ids.shape[1])
    if experts is not None and expert_ids.is_cpu and expert_ids.numel():
        low, high = (int(v) for v in torch.aminmax(expert_ids))
        if low < -1 or high >= experts:
            raise ValueError(f"expert_ids must be -1 or 0 to {experts - 1}, got values from {low} to {high}")
    return expert_ids.shape[0], expert_ids.shape[1]


def split_routing(routing: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of records' routing: float32 weights [U, k] and int16 ids [U, k]."""
    return routing[:, : 4 * k].view(torch.float32), routing[:, 4 * k : 6 * k].view(torch.int16)


def check_routing(routing: torch.Tensor, k: int, device: torch.device | None) -> None:
    checks.check_tensor("routing", routing, checks.BYTES, device, 2)
    if routing.shape[1] != routing_bytes(k):
        raise ValueError(f"routing must have {routing_bytes(k)} bytes a record for k={k}, got {routing.shape[1]}")
    if (routing.data_ptr() % 4 or (routing.stride()[0] % 4 and routing.shape[0] > 1)) and routing.numel():
        raise ValueError(
            f"routing must lie at multiples of 4 bytes, got address {routing.data_ptr():#x} and stride "
            f"{routing.stride(0)}"
        )


def _ranks_and_firsts(expert_ids: torch.Tensor, local_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [T, k] rank of each slot, -1 for none; whether it is the first slot of its token with that rank."""
    ids = expert_ids.to(torch.int64)
    rank = torch.where(ids < 0, -1, ids // local_experts)
    same = rank[:, :, None] == rank[:, None, :]  # [T, slot, other slot]
    earlier = torch.ones(rank.shape[1], rank.shape[1], dtype=torch.bool, device=rank.device).tril(-1)
    return rank, (rank >= 0) & ~(same & earlier).any(2)


def _record_of_slots(rank: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """int64 [T, k]: the number, among its token's records, of the record of each slot with a rank."""
    number = (first.cumsum(1) - 1).clamp(min=0)
    same = (rank[:, :, None] == rank[:, None, :]) & first[:, None, :]
    return torch.gather(number, 1, same.to(torch.int64).argmax(2))


def prepare_plan_send(
    expert_ids: torch.Tensor, ranks: int, local_experts: int, table: torch.Tensor | None
) -> SendPlan:
    """Checks the arguments of `plan_send`; its outputs, new but for a table that is given."""
    check_counts(ranks, local_experts)
    tokens, k = check_expert_ids(expert_ids, ranks * local_experts)
    device = expert_ids.device
    if table is None:
        table = torch.empty(ranks, local_experts + 1, dtype=torch.int32, device=device)
    else:
        checks.check_tensor("table", table, checks.INT32, device, 2)
        checks.check_shape("table", table, (ranks, local_experts + 1))
        checks.check_contiguous("table", table)
    return SendPlan(
        torch.empty(tokens * min(k, ranks), dtype=torch.int32, device=device),
        torch.empty(tokens, k, dtype=torch.int32, device=device),
        table,
    )


def plan_send(
    expert_ids: torch.Tensor, ranks: int, local_experts: int, *, table: torch.Tensor | None = None
) -> SendPlan:
    """The records that a rank sends: one for each (rank, token) of a token with experts on that rank, in that order.

    Args:
        expert_ids: int32 or int64 [T, k], k up to 32: experts among all, -1 for none.
        ranks: of the expert-parallel group. local_experts: of each.
        table: contiguous int32 [ranks, local_experts + 1] to write the plan's to.

    Returns:
        SendPlan. `table` is what ranks exchange; its last column holds the splits of the exchange of records.

    Raises:
        ValueError: on a wrong shape, dtype or count, or (host tensors) an id out of range, which on a GPU stops the
            kernel.
    """
    plan = prepare_plan_send(expert_ids, ranks, local_experts, table)
    rank, first = _ranks_and_firsts(expert_ids, local_experts)
    token, slot = torch.nonzero(first, as_tuple=True)
    order = torch.argsort(rank[token, slot], stable=True)
    token, slot = token[order], slot[order]
    plan.tokens.fill_(-1)
    plan.tokens[: token.shape[0]] = token.to(torch.int32)
    plan.records.fill_(-1)
    number = first.cumsum(1) - 1
    plan.records[token, number[token, slot]] = torch.arange(token.shape[0], dtype=torch.int32, device=token.device)
    named = expert_ids[expert_ids >= 0].to(torch.int64)
    plan.table[:, :-1] = torch.bincount(named, minlength=ranks * local_experts).view(ranks, local_experts)
    plan.table[:, -1] = torch.bincount(rank[first], minlength=ranks)
    return plan


def prepare_pack_routing(
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    records: torch.Tensor,
    local_experts: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Checks the arguments of `pack_routing`; its output, the one given or a new one."""
    count, k = check_expert_ids(expert_ids, None)
    device = expert_ids.device
    check_count("local_experts", local_experts, MAX_LOCAL_EXPERTS)
    checks.check_tensor("scores", scores, checks.FP32, device, 2)
    checks.check_shape("scores", scores, (count, k))
    checks.check_tensor("tokens", tokens, checks.INT32, device, 1)
    checks.check_tensor("records", records, checks.INT32, device, 2)
    checks.check_shape("records", records, (count, k))
    if out is None:
        return torch.empty(tokens.shape[0], routing_bytes(k), dtype=torch.uint8, device=device)
    check_routing(out, k, device)
    checks.check_shape("out", out, (tokens.shape[0], routing_bytes(k)))
    return out


def pack_routing(
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    records: torch.Tensor,
    local_experts: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write each record's routing: weights and local ids of the experts that its token has on its rank.

    Args:
        expert_ids: int32 or int64 [T, k], as given to `plan_send`.
        scores: float32 [T, k], the routing weights.
        tokens: int32 [n], the first n of the plan's `tokens`; a token of -1 gives a record without entries.
        records: int32 [T, k], the plan's.
        local_experts: of each rank.
        out: uint8 [n, routing_bytes(k)] to write to and return, any row stride: the records' ends.

    Returns:
        uint8 [n, routing_bytes(k)]. Bytes past the ids are zero in a new tensor, and left as they are in `out`.

    Raises:
        ValueError: on a wrong shape, dtype, device or stride.
    """
    new = out is None
    out = prepare_pack_routing(expert_ids, scores, tokens, records, local_experts, out)
    if new:
        out.zero_()
    k = expert_ids.shape[1]
    weights, ids = split_routing(out, k)
    if tokens.shape[0] == 0:
        return out
    rank, first = _ranks_and_firsts(expert_ids, local_experts)
    record_of_slot = torch.gather(records.to(torch.int64), 1, _record_of_slots(rank, first))
    token = tokens.to(torch.int64)
    own = torch.arange(token.shape[0], device=token.device)[:, None]
    safe = token.clamp(min=0)
    mine = (rank[safe] >= 0) & (record_of_slot[safe] == own) & (token >= 0)[:, None]
    # A stable sort brings a record's own slots to its front, in their order.
    order = torch.argsort((~mine).to(torch.int8), dim=1, stable=True)
    weights.copy_(torch.gather(torch.where(mine, scores[safe], 0.0), 1, order))
    ids.copy_(torch.gather(torch.where(mine, expert_ids[safe].to(torch.int64) % local_experts, -1), 1, order))
    return out


def prepare_plan_receive(routing: torch.Tensor, k: int, local_experts: int, padded_rows: int) -> ReceivePlan:
    """Checks the arguments of `plan_receive`; new outputs."""
    check_slots(k)
    check_count("local_experts", local_experts, MAX_LOCAL_EXPERTS)
    check_routing(routing, k, None)
    if not isinstance(padded_rows, int) or padded_rows < 0 or padded_rows % TILE_ROWS:
        raise ValueError(f"padded_rows must be a multiple of {TILE_ROWS} (an int), got {padded_rows!r}")
    device, records = routing.device, routing.shape[0]
    if routing.is_cpu and records:
        low, high = (int(v) for v in torch.aminmax(split_routing(routing, k)[1]))
        if low < -1 or high >= local_experts:
            raise ValueError(f"routing must name local experts -1 to {local_experts - 1}, got {low} to {high}")
    # One allocation: they live as long as each other, and where this is called a GPU waits for the host.
    sizes = (padded_rows, padded_rows, padded_rows, records * k, local_experts, local_experts + 1)
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    order, weights, m_indices, places, group_sizes, padded_offsets = memory.split_with_sizes(sizes)
    weights, places = weights.view(torch.float32), places.view(records, k)
    return ReceivePlan(order, weights, m_indices, group_sizes, padded_offsets, places)


def plan_receive(routing: torch.Tensor, k: int, local_experts: int, padded_rows: int) -> ReceivePlan:
    """The order in which experts see received records: by expert, then by record, each expert padded to 128 rows.

    Args:
        routing: uint8 [U, routing_bytes(k)], any row stride: the received records' ends.
        k: experts of a token. local_experts: of this rank.
        padded_rows: P, the experts' rows rounded up to 128 each and added up; from the exchanged tables.

    Returns:
        ReceivePlan.

    Raises:
        ValueError: on a wrong shape, dtype or stride, or (host tensors) an id out of range or too few `padded_rows`,
            which on a GPU stop the kernel.
    """
    plan = prepare_plan_receive(routing, k, local_experts, padded_rows)
    weights, ids = split_routing(routing, k)
    ids = ids.to(torch.int64)
    record, slot = torch.nonzero(ids >= 0, as_tuple=True)
    expert = ids[record, slot]
    order = torch.argsort(expert, stable=True)
    record, slot, expert = record[order], slot[order], expert[order]
    sizes = torch.bincount(expert, minlength=local_experts)
    padded = -(-sizes // TILE_ROWS) * TILE_ROWS
    ends = padded.cumsum(0)
    if routing.is_cpu and int(ends[-1]) > padded_rows:
        raise ValueError(f"padded_rows must be at least {int(ends[-1])} for these records, got {padded_rows}")
    first = torch.arange(expert.shape[0], device=expert.device) - (sizes.cumsum(0) - sizes)[expert]
    place = (ends - padded)[expert] + first
    plan.order.fill_(-1)[place] = record.to(torch.int32)
    plan.weights.zero_()[place] = weights[record, slot]
    plan.m_indices.fill_(-1)[place] = expert.to(torch.int32)
    plan.group_sizes.copy_(sizes)
    plan.padded_offsets[0] = 0
    plan.padded_offsets[1:] = ends
    plan.places.fill_(-1)[record, slot] = place.to(torch.int32)
    return plan


def _check_gradient_rows(name: str, t: torch.Tensor, rows: int | None, k: int, device: torch.device) -> None:
    checks.check_tensor(name, t, checks.FP32, device, 2)
    checks.check_shape(name, t, (t.shape[0] if rows is None else rows, k))


def prepare_gather_gradients(gradients: torch.Tensor, places: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Checks the arguments of `gather_gradients`; its output, the one given or a new one."""
    checks.check_tensor("gradients", gradients, checks.FP32, None, 1)
    checks.check_tensor("places", places, checks.INT32, gradients.device, 2)
    checks.check_contiguous("places", places)
    if out is None:
        return torch.empty(places.shape, dtype=torch.float32, device=gradients.device)
    _check_gradient_rows("out", out, *places.shape, gradients.device)
    return out


def gather_gradients(
    gradients: torch.Tensor, places: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Routing weights' gradients of records from those in expert order.

    Args:
        gradients: float32 [P], `swiglu_backward`'s.
        places: int32 [U, k], the receive plan's.
        out: float32 [U, k] to write to and return, any row stride: the ends of records.

    Returns:
        float32 [U, k]: gradients[places], 0 where a place is -1.

    Raises:
        ValueError: on a wrong shape, dtype, device or stride.
    """
    out = prepare_gather_gradients(gradients, places, out)
    if gradients.shape[0] == 0:
        return out.zero_()
    taken = gradients[places.clamp(min=0).to(torch.int64)]
    return out.copy_(taken.masked_fill_(places < 0, 0.0))


def prepare_return_gradients(
    expert_ids: torch.Tensor, records: torch.Tensor, gradients: torch.Tensor, local_experts: int
) -> torch.Tensor:
    """Checks the arguments of `return_gradients`; a new output."""
    tokens, k = check_expert_ids(expert_ids, None)
    check_count("local_experts", local_experts, MAX_LOCAL_EXPERTS)
    checks.check_tensor("records", records, checks.INT32, expert_ids.device, 2)
    checks.check_shape("records", records, (tokens, k))
    _check_gradient_rows("gradients", gradients, None, k, expert_ids.device)
    return torch.empty(tokens, k, dtype=torch.float32, device=expert_ids.device)


def return_gradients(
    expert_ids: torch.Tensor, records: torch.Tensor, gradients: torch.Tensor, local_experts: int
) -> torch.Tensor:
    """Routing weights' gradients at home, from those that returned with the records.

    Args:
        expert_ids: int32 or int64 [T, k], as given to `plan_send`.
        records: int32 [T, k], the plan's.
        gradients: float32 [n, k], any row stride: the ends of returned records, filled by `gather_gradients` on their
            rank.
        local_experts: of each rank.

    Returns:
        float32 [T, k], 0 where a slot has no expert.

    Raises:
        ValueError: on a wrong shape, dtype, device or stride.
    """
    out = prepare_return_gradients(expert_ids, records, gradients, local_experts)
    if gradients.shape[0] == 0:
        return out.zero_()
    rank, first = _ranks_and_firsts(expert_ids, local_experts)
    record = torch.gather(records.to(torch.int64), 1, _record_of_slots(rank, first))
    k = rank.shape[1]
    earlier = torch.ones(k, k, dtype=torch.bool, device=rank.device).tril(-1)
    place = ((rank[:, :, None] == rank[:, None, :]) & earlier).sum(2)
    taken = gradients[record.clamp(min=0), place]
    return out.copy_(torch.where(rank >= 0, taken, 0.0))
