# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench kernels`: the fused and routing kernels.

Bytes are what must move: each input read once, however often it is gathered, each output written once. Index lists
and scales count too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ds_fp4 import formats, ops
from ds_fp4.bench.case import Case, Made, nbytes
from ds_fp4.bench.conversion_cases import zipf_sizes

# Rows (before padding), hidden and intermediate width, local experts, experts a token.
MODELS = {
    "DeepSeek-V3": (65536, 7168, 2048, 32, 8),
    "Qwen3-235B": (65536, 4096, 1536, 64, 8),
    "Mixtral": (16384, 4096, 14336, 8, 2),
}


def _randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def _swiglu_eager(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return (F.silu(gate) * up) * weights[:, None].to(gate_up.dtype)


def make_swiglu_forward(device: torch.device, rows: int, width: int, save: str | None) -> Made:
    gate_up, weights = _randn(rows, 2 * width, device=device), torch.rand(rows, device=device)
    out = ops.swiglu_forward(gate_up, weights, save=save, scale_layout="gemm")

    def run():
        return ops.swiglu_forward(gate_up, weights, save=save, scale_layout="gemm", out=out)

    return (
        run,
        nbytes(gate_up, weights, out.q, out.scales, out.saved),
        functools.partial(_swiglu_eager, gate_up, weights),
    )


def make_swiglu_backward(
    device: torch.device, sizes: list[int], width: int, gate_up_format: str, activation: str = "swiglu"
) -> Made:
    rows = sum(formats.padded_sizes(sizes))
    gate_up, weights = _randn(rows, 2 * width, device=device), torch.rand(rows, device=device)
    dh = _randn(rows, width, device=device)
    group_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    saved = gate_up
    if gate_up_format != "bf16":
        saved = ops.swiglu_forward(gate_up, weights, save=gate_up_format).saved
    options = {
        "gate_up_format": gate_up_format, "activation": activation, "scale_layout": "gemm", "padded_rows": rows,
    }  # fmt: skip
    out = ops.swiglu_backward(dh, weights, saved, group_sizes, **options)

    def run():
        return ops.swiglu_backward(dh, weights, saved, group_sizes, out=out, **options)

    def eager():
        gate, up = gate_up.chunk(2, dim=1)
        d = dh * weights[:, None].to(dh.dtype)
        s = torch.sigmoid(gate)
        f = gate * s
        return torch.cat([d * up * (s + f * (1 - s)), d * f], dim=1), f * up, (dh * f * up).float().sum(1)

    moved = nbytes(dh, weights, saved, group_sizes, *out)
    return run, moved, eager if activation == "swiglu" else None


def _lists(count: int, rows: int, length: int, device: torch.device) -> torch.Tensor:
    """int32 [count, length]: distinct rows, in no order."""
    return torch.randperm(rows, device=device)[: count * length].to(torch.int32).view(count, length)


def make_combine(device: torch.device, count: int, k: int, length: int, row_format: str, out_format: str) -> Made:
    rows = count * length
    x = _randn(rows, k, device=device)
    source = {
        "bf16": lambda: x,
        "mxfp4": lambda: ops.bf16_to_fp4_row(x),
        "fp8": lambda: ops.bf16_to_fp8_row(x, scale_dtype=torch.uint8),
    }[row_format]()
    lists = _lists(count, rows, length, device)
    options = {"row_format": row_format, "out_format": out_format}
    out = ops.combine_rows(source, None, lists, **options)

    def run():
        return ops.combine_rows(source, None, lists, out=out, **options)

    peer = None
    if row_format == "bf16" and out_format == "bf16":
        peer = functools.partial(lambda: x[lists.to(torch.int64)].float().sum(1).to(torch.bfloat16))
    return run, nbytes(source, lists, out), peer


def make_gather(device: torch.device, rows: int, record_bytes: int, repeat: float) -> Made:
    records = torch.randint(0, 256, (rows, record_bytes), dtype=torch.uint8, device=device)
    count = int(rows * repeat)
    index = (torch.randperm(count, device=device) % rows).to(torch.int32)
    out = ops.gather_rows(records, index)

    def run():
        return ops.gather_rows(records, index, out=out)

    def eager():
        return torch.index_select(records, 0, index)

    return run, nbytes(records, out, index), eager


def _random_ids(device: torch.device, tokens: int, k: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device=device).topk(k, dim=1).indices


def make_plan_send(device: torch.device, tokens: int, k: int, ranks: int, local_experts: int) -> Made:
    ids = _random_ids(device, tokens, k, ranks * local_experts)
    plan = ops.plan_send(ids, ranks, local_experts)

    def run():
        return ops.plan_send(ids, ranks, local_experts)

    def eager():
        flat = ids.view(-1)
        return torch.argsort(flat, stable=True), torch.bincount(flat, minlength=ranks * local_experts)

    return run, nbytes(ids, *plan), eager


def make_pack(device: torch.device, tokens: int, k: int, ranks: int, local_experts: int) -> Made:
    ids, scores = _random_ids(device, tokens, k, ranks * local_experts), torch.rand(tokens, k, device=device)
    plan = ops.plan_send(ids, ranks, local_experts)
    count = int(plan.table[:, -1].sum())
    out = ops.pack_routing(ids, scores, plan.tokens[:count], plan.records, local_experts)

    def run():
        return ops.pack_routing(ids, scores, plan.tokens[:count], plan.records, local_experts, out=out)

    return run, nbytes(ids, scores, plan.tokens[:count], plan.records, out), None


def make_plan_receive(device: torch.device, tokens: int, k: int, local_experts: int) -> Made:
    """All tokens' experts on one rank."""
    ids, scores = _random_ids(device, tokens, k, local_experts), torch.rand(tokens, k, device=device)
    plan = ops.plan_send(ids, 1, local_experts)
    routing = ops.pack_routing(ids, scores, plan.tokens, plan.records, local_experts)
    padded = sum(formats.padded_sizes(plan.table[0, :-1].tolist()))
    received = ops.plan_receive(routing, k, local_experts, padded)

    def run():
        return ops.plan_receive(routing, k, local_experts, padded)

    return run, nbytes(routing, *received), None


def make_gather_gradients(device: torch.device, tokens: int, k: int, local_experts: int) -> Made:
    """All tokens' experts on one rank."""
    ids, scores = _random_ids(device, tokens, k, local_experts), torch.rand(tokens, k, device=device)
    plan = ops.plan_send(ids, 1, local_experts)
    routing = ops.pack_routing(ids, scores, plan.tokens, plan.records, local_experts)
    padded = sum(formats.padded_sizes(plan.table[0, :-1].tolist()))
    places = ops.plan_receive(routing, k, local_experts, padded).places
    gradients = torch.rand(padded, device=device)
    out = ops.gather_gradients(gradients, places)

    def run():
        return ops.gather_gradients(gradients, places, out=out)

    return run, nbytes(gradients, places, out), None


def make_return_gradients(device: torch.device, tokens: int, k: int, ranks: int, local_experts: int) -> Made:
    ids = _random_ids(device, tokens, k, ranks * local_experts)
    plan = ops.plan_send(ids, ranks, local_experts)
    gradients = torch.rand(int(plan.table[:, -1].sum()), k, device=device)
    out = ops.return_gradients(ids, plan.records, gradients, local_experts)

    def run():
        return ops.return_gradients(ids, plan.records, gradients, local_experts)

    # Of the gradients' k slots a record, those in use: one for each of a token's experts.
    return run, nbytes(ids, plan.records, out, out), None


def _shape(*numbers: int) -> str:
    return "[" + ", ".join(str(n) for n in numbers) + "]"


def _case(name: str, shapes: str, make: Callable[..., Made], *arguments: object, peer: str = "") -> Case:
    required = name in ("swiglu_forward save=mxfp4", "swiglu_backward mxfp4") and shapes.startswith("DeepSeek-V3")
    return Case(name, shapes, lambda device: make(device, *arguments), peer, required)


def _model_cases(model: str, rows: int, hidden: int, width: int, experts: int, k: int) -> list[Case]:
    tokens = rows // k
    shape = f"{model} {_shape(rows, 2 * width)}"
    cases = [
        _case(f"swiglu_forward save={save}", shape, make_swiglu_forward, rows, width, save, peer="torch eager, BF16")
        for save in ("mxfp4", "fp8", None)
    ]
    even, shape = [rows // experts] * experts, f"{model} {_shape(rows, width)}, {experts} experts"
    cases += [
        _case(f"swiglu_backward {saved}", shape, make_swiglu_backward, even, width, saved, peer="torch eager, BF16")
        for saved in ("mxfp4", "fp8", "bf16")
    ]
    # Two of a token's experts on its rank; all eight; a token's records from two and from six ranks.
    for row_format, out_format, length, count in (
        ("bf16", "mxfp4", 2, 2 * tokens),
        ("bf16", "fp8", 2, 2 * tokens),
        ("bf16", "bf16", 8, tokens),
        ("mxfp4", "bf16", 2, 2 * tokens),
        ("fp8", "bf16", 6, tokens),
    ):
        name, shape = f"combine_rows {row_format}->{out_format} x{length}", f"{model} {_shape(count, hidden)}"
        peer = "torch eager" if (row_format, out_format) == ("bf16", "bf16") else ""
        cases.append(_case(name, shape, make_combine, count, hidden, length, row_format, out_format, peer=peer))
    record = -(-(hidden // 2 + hidden // 32) // 16) * 16
    shape = f"{model} {_shape(4 * tokens, record)} bytes"
    cases.append(_case("gather_rows", shape, make_gather, 2 * tokens, record, 2.0, peer="torch index_select"))
    return cases


def _other_cases() -> list[Case]:
    rows, width = 65536, 2048
    shape, even, eager = f"{_shape(rows, width)}, 32 experts", [rows // 32] * 32, "torch eager, BF16"
    backward = make_swiglu_backward
    ragged = zipf_sizes(rows, 32)
    torch_plan = "torch argsort, bincount"
    return [
        _case("swiglu_backward mxfp4", f"{shape}, Zipf, 4 empty", backward, ragged, width, "mxfp4", peer=eager),
        _case("swiglu_backward mxfp4 geglu_tanh", shape, backward, even, width, "mxfp4", "geglu_tanh"),
        _case("swiglu_backward mxfp4 swiglu_oai", shape, backward, even, width, "mxfp4", "swiglu_oai"),
        _case(
            "swiglu_forward save=mxfp4", f"{_shape(256, 2 * width)} small", make_swiglu_forward, 256, width, "mxfp4"
        ),
        _case("swiglu_backward mxfp4", f"{_shape(256, width)} small", backward, [128, 128], width, "mxfp4"),
        _case(
            "combine_rows bf16->mxfp4 x2", f"{_shape(256, 7168)} small", make_combine, 256, 7168, 2, "bf16", "mxfp4"
        ),
        _case("gather_rows", f"{_shape(256, 3808)} bytes, small", make_gather, 256, 3808, 1.0),
        _case("plan_send", "8192 tokens, 8 of 256, 1 rank", make_plan_send, 8192, 8, 1, 256, peer=torch_plan),
        _case("plan_send", "16384 tokens, 8 of 256, 8 ranks", make_plan_send, 16384, 8, 8, 32, peer=torch_plan),
        _case("pack_routing", "8192 tokens, 8 of 256, 8 ranks", make_pack, 8192, 8, 8, 32),
        _case("plan_receive", "8192 records, 8 of 256", make_plan_receive, 8192, 8, 256),
        _case("plan_receive", "32768 records, 8 of 32", make_plan_receive, 32768, 8, 32),
        _case("gather_gradients", "32768 records, 8 of 32", make_gather_gradients, 32768, 8, 32),
        _case("return_gradients", "16384 tokens, 8 of 256, 8 ranks", make_return_gradients, 16384, 8, 8, 32),
    ]


CASES = [case for model, numbers in MODELS.items() for case in _model_cases(model, *numbers)] + _other_cases()
