# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The routing plan's kernels on a GPU: against a walk in Python, and against the PyTorch reference at full size."""

import pytest
import torch

from ds_fp4 import formats, ops, reference
from tests.fused_checks import assert_same, assert_same_parts
from tests.routing_checks import check_exchange, random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda"
KINDS = ["uniform", "skewed", "one_rank", "dropped"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ranks, local_experts, k", [(1, 8, 8), (1, 3, 1), (2, 4, 1), (4, 8, 8), (8, 2, 5), (3, 40, 32)]
)
def test_exchange(kind, ranks, local_experts, k):
    check_exchange(GPU, kind, [300 + 45 * r for r in range(ranks)], k, local_experts)


@pytest.mark.parametrize("tokens", [[0, 30], [0, 0], [700, 1, 0]], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks_without_tokens(tokens, k):
    check_exchange(GPU, "uniform", tokens, k, 8, dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tokens, ranks, local_experts, k", [(8192, 1, 256, 8), (16384, 8, 32, 8), (40000, 2, 64, 6), (100_000, 64, 8, 8)]
)
def test_full_size_against_the_reference(kind, tokens, ranks, local_experts, k):
    ids = random_ids(kind, tokens, k, ranks * local_experts, seed=tokens)
    scores = torch.rand(tokens, k)
    expected = reference.plan_send(ids, ranks, local_experts)
    got = ops.plan_send(ids.to(GPU), ranks, local_experts)
    assert_same_parts("send", got, expected)
    count = int(expected.table[:, -1].sum())
    packed = reference.pack_routing(ids, scores, expected.tokens[:count], expected.records, local_experts)
    got_packed = ops.pack_routing(ids.to(GPU), scores.to(GPU), got.tokens[:count], got.records, local_experts)
    assert_same("routing", got_packed, packed)
    # As if all records of the last rank that has any had come from here.
    splits = expected.table[:, -1].tolist()
    rank = max(r for r in range(ranks) if splits[r])
    start = sum(splits[:rank])
    mine = packed[start : start + splits[rank]]
    padded = sum(formats.padded_sizes(expected.table[rank, :-1].tolist()))
    expected_order = reference.plan_receive(mine, k, local_experts, padded)
    got_order = ops.plan_receive(mine.to(GPU), k, local_experts, padded)
    assert_same_parts("receive", got_order, expected_order)
    # More room than needed is filled with padding.
    roomy = ops.plan_receive(mine.to(GPU), k, local_experts, padded + 256)
    assert_same("order", roomy.order[:padded], expected_order.order)
    assert bool((roomy.order[padded:] == -1).all() and (roomy.m_indices[padded:] == -1).all())
    gradients = torch.rand(padded)
    expected_gradients = reference.gather_gradients(gradients, expected_order.places)
    assert_same("gradients", ops.gather_gradients(gradients.to(GPU), got_order.places), expected_gradients)
    home = torch.rand(count, k)
    assert_same(
        "returned",
        ops.return_gradients(ids.to(GPU), got.records, home.to(GPU), local_experts),
        reference.return_gradients(ids, expected.records, home, local_experts),
    )


def test_graph_capture_and_no_synchronization():
    ids = random_ids("uniform", 2000, 8, 64).to(GPU)
    scores = torch.rand(2000, 8, device=GPU)
    warm = ops.plan_send(ids, 4, 16)
    count = int(warm.table[:, -1].sum())
    padded = sum(formats.padded_sizes([int(n) for n in warm.table[:, :-1].flatten()]))

    def layer():
        plan = ops.plan_send(ids, 4, 16)
        packed = ops.pack_routing(ids, scores, plan.tokens[:count], plan.records, 16)
        received = ops.plan_receive(packed, 8, 16, padded)
        gradients = ops.gather_gradients(received.weights, received.places)
        return plan, packed, received, ops.return_gradients(ids, plan.records, gradients, 16)

    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, expected, strict=True):
        assert_same_parts("replay", got, want)
    # A weight goes out with its record and comes back to its slot.
    assert torch.equal(expected[-1], scores)
