# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench kernels`: the conversions, at the shapes of three models."""

from __future__ import annotations

import torch

from ds_fp4 import formats, ops
from ds_fp4.bench import peers
from ds_fp4.bench.case import Case, nbytes

# Tokens by hidden size, routed rows by the experts' intermediate size.
ROW_SHAPES = {
    "DeepSeek-V3 hidden": (32768, 7168),
    "DeepSeek-V3 expert": (65536, 2048),
    "Qwen3-235B, Mixtral hidden": (32768, 4096),
    "Qwen3-235B expert": (65536, 1536),
    "Mixtral expert": (16384, 14336),
}
SMALL = (256, 7168)
# Routed rows by width, over experts whose sizes follow Zipf's law, one in eight of them empty.
GROUP_SHAPES = {
    "DeepSeek-V3 hidden": (65536, 7168, 32),
    "DeepSeek-V3 expert": (65536, 2048, 32),
    "Qwen3-235B hidden": (65536, 4096, 128),
    "Qwen3-235B expert": (65536, 1536, 128),
    "Mixtral hidden": (32768, 4096, 8),
    "Mixtral expert": (32768, 14336, 8),
}
SMALL_GROUPS = (256, 7168, 8)
# Rows that an expert layer receives per row that its experts compute: DeepSeek-V3, top 8, 2 ranks.
ROWS_A_TOKEN = 4
# Compiling a peer takes seconds: only where a target is set.
COMPILED_PEERS = ("DeepSeek-V3 hidden", "DeepSeek-V3 expert")
# The comparisons that are made first, each at one shape.
REQUIRED = {
    "bf16_to_fp4_row", "fp4_row_to_fp8_row", "fp4_row_to_fp8_col", "fp8_row_to_fp8_col", "bf16_to_fp8_row",
}  # fmt: skip


def zipf_sizes(rows: int, groups: int) -> list[int]:
    """Sizes that add up to `rows`: group i of those in use has a share proportional to 1/i; every eighth is empty."""
    used = [i for i in range(groups) if i % 8 != 7]
    total = sum(1 / (n + 1) for n in range(len(used)))
    sizes = [0] * groups
    for n, i in enumerate(used):
        sizes[i] = int(rows / (n + 1) / total)
    sizes[0] += rows - sum(sizes)
    return sizes


def _values(rows: int, k: int, device: torch.device) -> torch.Tensor:
    """BF16 Gaussian rows of different magnitudes."""
    x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
    return x.mul_(torch.rand(rows, 1, device=device, dtype=torch.bfloat16).add_(0.1))


def _records(*parts: torch.Tensor, multiple: int = 128) -> list[torch.Tensor]:
    """Copies of the parts side by side in one record a row, as they arrive from other ranks.

    A record's length is a multiple of 128 bytes, so that rows begin where cache lines do.
    """
    widths = [t.shape[1] * t.element_size() for t in parts]
    length = -(-sum(widths) // multiple) * multiple
    records = torch.empty(parts[0].shape[0], length, dtype=torch.uint8, device=parts[0].device)
    views, start = [], 0
    for t, width in zip(parts, widths, strict=True):
        views.append(records[:, start : start + width].view(t.dtype))
        views[-1].copy_(t)
        start += width
    return views


def _fp4(rows: int, k: int, device: torch.device):
    return _records(*ops.bf16_to_fp4_row(_values(rows, k, device)))


def _fp8(rows: int, k: int, device: torch.device):
    q, scales = ops.bf16_to_fp8_row(_values(rows, k, device), scale_dtype=torch.uint8)
    return _records(q.view(torch.uint8), scales)


def _into(call, *args, **kwargs):
    """The call with its outputs made once; the outputs."""
    out = call(*args, **kwargs)
    return lambda: call(*args, **kwargs, out=out), out


def _row_case(name: str, device: torch.device, rows: int, k: int, compiled: bool):
    if name == "bf16_to_fp4_row":
        x = _values(rows, k, device)
        run, out = _into(ops.bf16_to_fp4_row, x)
        peer = peers.quantize_fp4(x) if compiled else None
        return run, nbytes(x, *out), peer
    if name == "bf16_to_fp8_row":
        x = _values(rows, k, device)
        run, out = _into(ops.bf16_to_fp8_row, x, scale_layout="gemm")
        return run, nbytes(x, *out), peers.quantize_fp8(x)
    if name.startswith("fp4"):
        packed, scales = _fp4(rows, k, device)
        decode = peers.decode_fp4(packed.contiguous(), scales.contiguous()) if compiled else None
        if name == "fp4_row_to_bf16":
            run, out = _into(ops.fp4_row_to_bf16, packed, scales)
            return run, nbytes(packed, scales, out), decode
        run, out = _into(ops.fp4_row_to_fp8_row, packed, scales, scale_layout="gemm")
        return run, nbytes(packed, scales, *out), peers.then(decode, peers.quantize_fp8)
    q, scales = _fp8(rows, k, device)
    plain = q.contiguous().view(torch.float8_e4m3fn), ops.fp8_row_to_fp8_row(q, scales)[1]
    decode = peers.decode_fp8(*plain)
    if name == "fp8_row_to_bf16":
        run, out = _into(ops.fp8_row_to_bf16, q, scales)
        return run, nbytes(q, scales, out), decode
    if name == "fp8_row_to_fp8_row":
        run, out = _into(ops.fp8_row_to_fp8_row, q, scales, scale_layout="gemm")
        return run, nbytes(q, scales, *out), None
    run, out = _into(ops.fp8_row_to_fp4_row, q, scales)
    return run, nbytes(q, scales, *out), peers.then(decode, peers.quantize_fp4) if compiled else None


def _routed_case(name: str, device: torch.device, rows: int, k: int, groups: int, compiled: bool):
    """Received records through the expert-order index into padded GEMM rows."""
    unique = rows // ROWS_A_TOKEN
    sizes = zipf_sizes(rows, groups)
    padded = formats.padded_sizes(sizes)
    index, start = [], 0
    order = torch.randperm(rows, device=device).to(torch.int32) % unique
    for size, length in zip(sizes, padded, strict=True):
        expert = torch.full((length,), -1, dtype=torch.int32, device=device)
        expert[:size] = order[start : start + size].sort().values
        index.append(expert)
        start += size
    index = torch.cat(index)
    rows_of_peer = index.clamp(min=0)  # plain PyTorch has no zero rows in a gather
    if name == "fp4_row_to_fp8_row":
        source = _fp4(unique, k, device)
        decode = peers.decode_fp4(source[0].contiguous(), source[1].contiguous()) if compiled else None
        peer = peers.then(peers.then(decode, lambda x: peers.gathered(x, rows_of_peer)), peers.quantize_fp8)
    else:
        source = _fp8(unique, k, device)
        peer = peers.both(*[peers.gathered(t.contiguous(), rows_of_peer) for t in source])
    run, out = _into(getattr(ops, name), *source, scale_layout="gemm", index=index)
    return run, nbytes(*source, index, *out), peer


def _column_case(name: str, device: torch.device, rows: int, k: int, groups: int, gather: bool, compiled: bool):
    sizes = zipf_sizes(rows, groups)
    padded_rows = sum(formats.padded_sizes(sizes))
    group_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    input_rows, index = rows, None
    if gather:
        input_rows = rows // ROWS_A_TOKEN
        order = torch.randperm(rows, device=device).to(torch.int32) % input_rows
        index = torch.cat([part.sort().values for part in order.split(sizes)])
    options = {"padded_rows": padded_rows, "scale_layout": "gemm", "index": index}
    padding = peers.padding_index(sizes, index, device)
    if name == "fp4_row_to_fp8_col":
        source = _fp4(input_rows, k, device)
        decode = peers.decode_fp4(source[0].contiguous(), source[1].contiguous()) if compiled else None
    elif name == "fp8_row_to_fp8_col":
        source = _fp8(input_rows, k, device)
        plain = source[0].contiguous().view(torch.float8_e4m3fn), ops.fp8_row_to_fp8_row(*source)[1]
        decode = peers.decode_fp8(*plain)
    else:
        source = [_values(input_rows, k, device)]
        decode = lambda: source[0]  # noqa: E731
    padded = peers.then(decode, lambda x: peers.gathered(x, padding))
    peer = peers.then(padded, peers.quantize_fp8_transposed)
    if name == "bf16_to_fp8_row_and_col":
        peer = peers.both(peers.quantize_fp8(source[0]), peer)
    run, out = _into(getattr(ops, name), *source, group_sizes, **options)
    read = [*source] if index is None else [*source, index]
    return run, nbytes(*read, *out), peer


def _cases() -> list[Case]:
    cases = []

    def add(name, shapes, make, *args):
        required = name in REQUIRED and shapes.endswith("DeepSeek-V3 hidden") and "routed" not in shapes
        cases.append(Case(name, shapes, lambda device: make(name, device, *args), required=required))

    for name in (
        "bf16_to_fp4_row", "fp4_row_to_bf16", "bf16_to_fp8_row", "fp8_row_to_bf16",
        "fp4_row_to_fp8_row", "fp8_row_to_fp4_row", "fp8_row_to_fp8_row",
    ):  # fmt: skip
        for model, (rows, k) in ROW_SHAPES.items():
            add(name, f"[{rows}, {k}] {model}", _row_case, rows, k, model in COMPILED_PEERS)
        add(name, f"[{SMALL[0]}, {SMALL[1]}] small", _row_case, *SMALL, False)
    for name in ("fp4_row_to_fp8_row", "fp8_row_to_fp8_row"):
        for model, (rows, k, groups) in GROUP_SHAPES.items():
            shapes = f"[{rows}, {k}] routed, {groups} experts, {model}"
            add(name, shapes, _routed_case, rows, k, groups, model == "DeepSeek-V3 hidden")
    for name in ("fp4_row_to_fp8_col", "fp8_row_to_fp8_col", "bf16_to_fp8_row_and_col"):
        for model, (rows, k, groups) in GROUP_SHAPES.items():
            shapes = f"[{rows}, {k}] {groups} experts, {model}"
            add(name, shapes, _column_case, rows, k, groups, False, model in COMPILED_PEERS)
        rows, k, groups = GROUP_SHAPES["DeepSeek-V3 hidden"]
        add(name, f"[{rows}, {k}] {groups} experts, routed", _column_case, rows, k, groups, True, False)
        rows, k, groups = SMALL_GROUPS
        add(name, f"[{rows}, {k}] {groups} experts, small", _column_case, rows, k, groups, False, False)
    return cases


CASES = _cases()
