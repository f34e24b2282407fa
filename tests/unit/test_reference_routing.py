# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The routing plan in PyTorch against a walk over tokens in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp4 import reference
from tests.routing_checks import check_exchange

KINDS = ["uniform", "skewed", "one_rank", "dropped"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks, local_experts, k", [(1, 8, 8), (2, 4, 1), (4, 8, 8), (8, 2, 5), (3, 40, 32)])
def test_exchange(kind, ranks, local_experts, k):
    check_exchange("cpu", kind, [17 + 5 * r for r in range(ranks)], k, local_experts)


@pytest.mark.parametrize("tokens", [[0, 30], [0, 0], [200, 1, 0]])
def test_ranks_without_tokens(tokens):
    check_exchange("cpu", "uniform", tokens, 2, 4, dtype=torch.int32)


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    k=st.integers(1, 6),
    local_experts=st.integers(6, 20),
    seed=st.integers(0, 1000),
)
def test_any_exchange(kind, tokens, k, local_experts, seed):
    check_exchange("cpu", kind, tokens, k, local_experts, seed=seed)


def test_repeated_experts():
    """A token that names an expert twice has two rows there and one record."""
    ids = torch.tensor([[3, 3, 0], [1, 5, 1]])
    plan = reference.plan_send(ids, 2, 3)
    assert plan.tokens.tolist() == [0, 1, 0, 1] and plan.records.tolist() == [[2, 0, -1], [1, 3, -1]]
    assert plan.table.tolist() == [[1, 2, 0, 2], [2, 0, 1, 2]]


def test_a_table_to_write_to():
    ids, tables = torch.tensor([[3, 3, 0], [1, 5, 1]]), torch.full((2, 2, 4), -7, dtype=torch.int32)
    plan = reference.plan_send(ids, 2, 3, table=tables[0])
    assert plan.table.data_ptr() == tables.data_ptr()
    assert tables.tolist() == [[[1, 2, 0, 2], [2, 0, 1, 2]], [[-7] * 4] * 2]
    for table, message in (
        (tables[0].long(), "torch.int32"),
        (tables[0, :, :3], r"shape \(2, 4\)"),
        (torch.zeros(2, 8, dtype=torch.int32)[:, :4], "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.plan_send(ids, 2, 3, table=table)


def test_routing_bytes():
    assert [reference.routing_bytes(k) for k in (1, 2, 8, 32)] == [16, 16, 48, 192]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: reference.plan_send(torch.zeros(4, 33, dtype=torch.int64), 1, 64), "1 to 32 experts"),
        (lambda: reference.plan_send(torch.full((4, 2), 8), 2, 4), "0 to 7"),
        (lambda: reference.plan_send(torch.zeros(4, 2), 2, 4), "torch.int32 or torch.int64"),
        (lambda: reference.plan_send(torch.zeros(4, 2, dtype=torch.int64), 2, 4096), "1 to 1024"),
        (lambda: reference.plan_receive(torch.zeros(3, 40, dtype=torch.uint8), 8, 4, 128), "48 bytes"),
        (lambda: reference.plan_receive(torch.zeros(3, 48, dtype=torch.uint8), 8, 4, 100), "multiple of 128"),
        (lambda: reference.plan_receive(torch.zeros(3, 48, dtype=torch.uint8), 8, 4, 0), "at least 128"),
        (lambda: reference.gather_gradients(torch.zeros(3), torch.zeros(4, 2)), "int32"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
