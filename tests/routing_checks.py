# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Checks of the routing plan: each call against a walk over tokens in plain Python, and a whole exchange between
ranks."""

import torch

from ds_fp4 import formats, ops
from tests.fused_checks import POISON, assert_same


def random_ids(
    kind: str, tokens: int, k: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """[T, k] distinct experts a token: "uniform"; "skewed" (100:1); "one_rank" (the first experts only); "dropped"
    (some -1)."""
    g = torch.Generator().manual_seed(seed)
    if tokens == 0:
        return torch.zeros(0, k, dtype=dtype)
    chance = torch.ones(tokens, experts)
    if kind == "skewed":
        chance[:, : max(experts // 8, k)] = 100
    elif kind == "one_rank":
        chance[:, k:] = 0
    ids = torch.multinomial(chance, k, generator=g)
    if kind == "dropped":
        ids[torch.rand(tokens, k, generator=g) < 0.3] = -1
    return ids.to(dtype)


def naive_send(
    ids: list[list[int]], ranks: int, local_experts: int
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """tokens, records (without -1) and table."""
    tokens, records, table = [], [[] for _ in ids], [[0] * (local_experts + 1) for _ in range(ranks)]
    place = {}
    for rank in range(ranks):
        for token, experts in enumerate(ids):
            mine = [e for e in experts if e >= 0 and e // local_experts == rank]
            for e in mine:
                table[rank][e % local_experts] += 1
            if mine:
                table[rank][local_experts] += 1
                place[rank, token] = len(tokens)
                tokens.append(token)
    for token, experts in enumerate(ids):
        for e in experts:
            if e >= 0 and place[e // local_experts, token] not in records[token]:
                records[token].append(place[e // local_experts, token])
    return tokens, records, table


def naive_receive(entries: list[list[tuple[int, float]]], local_experts: int):
    """From each record's (expert, weight) list: order, weights, experts, sizes, offsets, places (by record)."""
    order, weights, experts, sizes, offsets = [], [], [], [], [0]
    places = [[] for _ in entries]
    for expert in range(local_experts):
        rows = [(r, s, w) for r, record in enumerate(entries) for s, (e, w) in enumerate(record) if e == expert]
        sizes.append(len(rows))
        for r, s, w in rows:
            places[r].append((s, len(order)))
            order.append(r)
            weights.append(w)
            experts.append(expert)
        padding = -len(order) % 128
        order += [-1] * padding
        weights += [0.0] * padding
        experts += [-1] * padding
        offsets.append(len(order))
    return order, weights, experts, sizes, offsets, [[p for _, p in sorted(row)] for row in places]


def padded_list(rows: list[list], k: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32).view(len(rows), k)


def check_exchange(
    device: str,
    kind: str,
    tokens: list[int],
    k: int,
    local_experts: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.int64,
) -> None:
    """One layer's routing between len(tokens) ranks, forward and back, every call against the walk in Python."""
    ranks = len(tokens)
    stride = 64 + ops.routing_bytes(k)  # records of 64 other bytes
    ids = [random_ids(kind, n, k, ranks * local_experts, seed + r, dtype) for r, n in enumerate(tokens)]
    scores = [torch.rand(n, k, generator=torch.Generator().manual_seed(seed + r)) for r, n in enumerate(tokens)]
    plans, sent = [], []
    for rank in range(ranks):
        # Every other plan writes to the table that it is given.
        table = torch.empty(ranks, local_experts + 1, dtype=torch.int32, device=device) if rank % 2 else None
        plan = ops.plan_send(ids[rank].to(device), ranks, local_experts, table=table)
        assert table is None or plan.table is table
        want_tokens, want_records, want_table = naive_send(ids[rank].tolist(), ranks, local_experts)
        most = tokens[rank] * min(k, ranks)
        expected_tokens = torch.tensor(want_tokens + [-1] * (most - len(want_tokens)), dtype=torch.int32)
        assert_same("tokens", plan.tokens, expected_tokens)
        assert_same("records", plan.records, padded_list(want_records, k))
        assert_same("table", plan.table, torch.tensor(want_table, dtype=torch.int32))
        count = len(want_tokens)
        buffer = torch.full((count, stride), POISON, dtype=torch.uint8, device=device)
        ops.pack_routing(
            ids[rank].to(device), scores[rank].to(device), plan.tokens[:count], plan.records, local_experts,
            out=buffer[:, 64:],
        )  # fmt: skip
        assert bool((buffer[:, :64] == POISON).all()), "pack_routing wrote beyond its part"
        plans.append(plan)
        sent.append(buffer.cpu())

    returned = [torch.zeros(buffer.shape[0], k) for buffer in sent]
    for rank in range(ranks):
        pieces, entries, origins = [], [], []
        for source in range(ranks):
            splits = plans[source].table[:, -1].tolist()
            start = sum(splits[:rank])
            pieces.append(sent[source][start : start + splits[rank]])
            for record in range(start, start + splits[rank]):
                token = int(plans[source].tokens[record])
                entries.append(
                    [
                        (e % local_experts, float(scores[source][token, s]))
                        for s, e in enumerate(ids[source][token].tolist())
                        if e >= 0 and e // local_experts == rank
                    ]
                )
                origins.append((source, record))
        received = torch.cat(pieces).to(device)
        sizes = torch.stack([plan.table[rank, :-1].cpu() for plan in plans]).sum(0).tolist()
        padded = sum(formats.padded_sizes(sizes))
        plan = ops.plan_receive(received[:, 64:], k, local_experts, padded)
        order, weights, experts, want_sizes, offsets, places = naive_receive(entries, local_experts)
        assert want_sizes == sizes and len(order) == padded
        assert_same("order", plan.order, torch.tensor(order, dtype=torch.int32))
        assert_same("weights", plan.weights, torch.tensor(weights, dtype=torch.float32))
        assert_same("m_indices", plan.m_indices, torch.tensor(experts, dtype=torch.int32))
        assert_same("group_sizes", plan.group_sizes, torch.tensor(sizes, dtype=torch.int32))
        assert_same("padded_offsets", plan.padded_offsets, torch.tensor(offsets, dtype=torch.int32))
        assert_same("places", plan.places, padded_list(places, k))

        # Backward: every padded row's gradient is its own number.
        gradients = torch.arange(1, padded + 1, dtype=torch.float32)
        buffer = torch.full((len(entries), stride), POISON, dtype=torch.uint8, device=device)
        out = buffer[:, 64 : 64 + 4 * k].view(torch.float32)
        ops.gather_gradients(gradients.to(device), plan.places, out=out)
        assert bool((buffer[:, :64] == POISON).all()), "gather_gradients wrote beyond its part"
        for row, (source, record) in enumerate(origins):
            returned[source][record] = out[row].cpu()

        # And forward through the lists: sums over a record's entries.
        rows = torch.arange(padded, dtype=torch.float32).remainder(8)[:, None].expand(padded, 32).to(torch.bfloat16)
        if padded:
            summed = ops.combine_rows(rows.contiguous().to(device), None, plan.places).cpu().float()
            for row, record_places in enumerate(places):
                assert float(summed[row, 0]) == sum(p % 8 for p in record_places)

    for rank in range(ranks):
        got = ops.return_gradients(ids[rank].to(device), plans[rank].records, returned[rank].to(device), local_experts)
        expected = torch.zeros(tokens[rank], k)
        for token, experts in enumerate(ids[rank].tolist()):
            seen = {}
            for slot, e in enumerate(experts):
                if e >= 0:
                    owner = e // local_experts
                    record = next(
                        r for r in plans[rank].records[token].tolist() if _rank_of(plans[rank].table, r) == owner
                    )
                    expected[token, slot] = returned[rank][record, seen.get(owner, 0)]
                    seen[owner] = seen.get(owner, 0) + 1
        assert_same("returned gradients", got, expected)
        named = ids[rank] >= 0
        assert bool((got.cpu()[named] > 0).all()) and bool((got.cpu()[~named] == 0).all())


def _rank_of(table: torch.Tensor, record: int) -> int:
    ends = table[:, -1].cpu().cumsum(0)
    return int((ends <= record).sum())
