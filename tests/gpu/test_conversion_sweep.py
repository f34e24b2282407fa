# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The conversion kernels on a GPU over a sweep of shapes and seeds, bit for bit against the reference on the host, and
what a training step asks of them."""

import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ds_fp4 import formats, ops
from tests import kernel_checks as checks
from tests import strategies

DTYPES = strategies.FLOAT_DTYPES
SCALES = ("fp32", "ue8m0", "gemm")
SOURCES = (torch.uint8, torch.float32)
INDICES = ("none", "random", "absent", "empty")
COLUMN_INDICES = ("none", "random", "absent")


@pytest.fixture
def device():
    return torch.device("cuda")


# Under compute-sanitizer a few examples take as long: DS_FP4_SWEEP=2.
sweep = settings(
    max_examples=int(os.environ.get("DS_FP4_SWEEP", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
rows = st.one_of(st.integers(0, 40), st.sampled_from([127, 128, 129, 1000]))
fp4_widths = st.integers(1, 72).map(lambda n: 32 * n)
fp8_widths = st.one_of(st.integers(1, 300), st.integers(1, 20).map(lambda n: 128 * n))
spreads = st.sampled_from([0, 3, 16, 40, 254])
aligned = st.booleans()
seeds = strategies.seeds()


# ---- rows ----


@sweep
@given(rows, fp4_widths, seeds, st.sampled_from(INDICES), st.sampled_from(SCALES), aligned, spreads)
def test_fp4_row_to_fp8_row(rows, k, seed, index, scale, aligned, spread):
    checks.check_fp4_row_to_fp8_row("cuda", rows, k, seed, index, scale, aligned, spread)


@sweep
@given(
    rows, fp8_widths, seeds, st.sampled_from(INDICES), st.sampled_from(SOURCES), st.sampled_from(SCALES), aligned,
    spreads,
)  # fmt: skip
def test_fp8_row_to_fp8_row(rows, k, seed, index, source, scale, aligned, spread):
    checks.check_fp8_row_to_fp8_row("cuda", rows, k, seed, index, source, scale, aligned, spread)


@sweep
@given(
    rows, fp4_widths, seeds, st.sampled_from(INDICES), st.sampled_from(SOURCES),
    st.sampled_from(strategies.ROUNDINGS), aligned, spreads,
)  # fmt: skip
@example(9, 2048, 0, "random", torch.uint8, "even", True, 16)  # rows of whole tiles
@example(1000, 1024, 1, "none", torch.float32, "floor", True, 254)
def test_fp8_row_to_fp4_row(rows, k, seed, index, source, rounding, aligned, spread):
    checks.check_fp8_row_to_fp4_row("cuda", rows, k, seed, index, source, rounding, aligned, spread)


values = (st.sampled_from(strategies.FINITE_KINDS), rows)


@sweep
@given(
    *values, fp4_widths, seeds, st.sampled_from(DTYPES), st.sampled_from(INDICES),
    st.sampled_from(strategies.ROUNDINGS), aligned,
)  # fmt: skip
def test_bf16_to_fp4_row(kind, rows, k, seed, dtype, index, rounding, aligned):
    checks.check_bf16_to_fp4_row("cuda", kind, rows, k, seed, dtype, index, rounding, aligned)


@sweep
@given(*values, fp8_widths, seeds, st.sampled_from(DTYPES), st.sampled_from(INDICES), st.sampled_from(SCALES), aligned)
def test_bf16_to_fp8_row(kind, rows, k, seed, dtype, index, scale, aligned):
    checks.check_bf16_to_fp8_row("cuda", kind, rows, k, seed, dtype, index, scale, aligned)


@sweep
@given(rows, fp4_widths, seeds, st.sampled_from(DTYPES), st.sampled_from(INDICES), aligned)
def test_fp4_row_to_bf16(rows, k, seed, dtype, index, aligned):
    checks.check_fp4_row_to_bf16("cuda", rows, k, seed, dtype, index, aligned)


@sweep
@given(rows, fp8_widths, seeds, st.sampled_from(DTYPES), st.sampled_from(INDICES), st.sampled_from(SOURCES), aligned)
def test_fp8_row_to_bf16(rows, k, seed, dtype, index, source, aligned):
    checks.check_fp8_row_to_bf16("cuda", rows, k, seed, dtype, index, source, aligned)


# ---- columns ----

layouts = st.sampled_from(["row", "gemm"])
column_layouts = st.sampled_from(["row", "gemm", "blocks"])
column_indices = st.sampled_from(COLUMN_INDICES)


@sweep
@given(strategies.group_sizes(), fp4_widths, seeds, column_indices, column_layouts, aligned, spreads, st.booleans())
def test_fp4_row_to_fp8_col(sizes, k, seed, index, layout, aligned, spread, known):
    checks.check_fp4_row_to_fp8_col("cuda", sizes, k, seed, index, layout, aligned, spread, known)


@sweep
@given(
    strategies.group_sizes(), fp8_widths, seeds, column_indices, st.sampled_from(SOURCES), column_layouts, aligned,
    spreads, st.booleans(),
)  # fmt: skip
def test_fp8_row_to_fp8_col(sizes, k, seed, index, source, layout, aligned, spread, known):
    checks.check_fp8_row_to_fp8_col("cuda", sizes, k, seed, index, source, layout, aligned, spread, known)


@sweep
@given(
    st.sampled_from(strategies.FINITE_KINDS), strategies.group_sizes(), fp8_widths, seeds, st.sampled_from(DTYPES),
    column_indices, layouts, aligned,
)  # fmt: skip
def test_bf16_to_fp8_row_and_col(kind, sizes, k, seed, dtype, index, layout, aligned):
    checks.check_bf16_to_fp8_row_and_col("cuda", kind, sizes, k, seed, dtype, index, layout, aligned)


def test_many_groups():
    for seed, groups in enumerate((31, 33, 256, 300)):
        sizes = checks.sizes_for(3000, groups, seed)
        for layout in ("gemm", "blocks"):
            checks.check_fp4_row_to_fp8_col("cuda", sizes, 288, seed, "random", layout)
            checks.check_fp8_row_to_fp8_col("cuda", sizes, 256, seed, "none", torch.uint8, layout)
        checks.check_bf16_to_fp8_row_and_col("cuda", "gaussian", sizes, 256, seed, torch.bfloat16, "none", "gemm")


# ---- weights ----


@sweep
@given(
    st.sampled_from(strategies.FINITE_KINDS), st.integers(0, 3), st.integers(1, 300), st.integers(1, 300), seeds,
    st.sampled_from(DTYPES), st.booleans(), aligned, st.booleans(), st.sampled_from(list(formats.ORIENTATIONS)),
)  # fmt: skip
def test_weight_to_fp8(kind, experts, rows, k, seed, dtype, joined, aligned, poisoned, orientation):
    checks.check_weight_to_fp8(
        "cuda", kind, experts, rows, k, seed, dtype, joined, aligned, poisoned and experts > 0, orientation
    )


@sweep
@given(st.integers(0, 4), st.integers(1, 300), st.integers(1, 300), seeds, aligned)
def test_split_weight_gradient(experts, rows, k, seed, aligned):
    checks.check_split_weight_gradient("cuda", experts, rows, k, seed, aligned)


def test_weights_of_real_shapes(device):
    # DeepSeek-V3's experts, Qwen3's, and an I that is no multiple of 128.
    for rows, k in ((2048, 7168), (1536, 4096), (1416, 1024)):
        w1, w3 = (torch.randn(2, rows, k, device=device).bfloat16() * 0.02 for _ in range(2))
        both = formats.weight_to_fp8(w1, w3)
        checks.assert_same(ops.weight_to_fp8(w1, w3), both, f"{rows} {k}")
        checks.assert_same(ops.weight_to_fp8(w1, w3, orientation="rows"), (both[0], None), f"{rows} {k}")
        checks.assert_same(ops.weight_to_fp8(w1, w3, orientation="transposed"), (None, both[1]), f"{rows} {k}")
        w2 = torch.randn(2, k, rows, device=device).bfloat16()
        checks.assert_same(ops.weight_to_fp8(w2), formats.weight_to_fp8(w2), f"{k} {rows}")
        gradient = torch.randn(2, 2 * rows, k, device=device)
        checks.assert_same(ops.split_weight_gradient(gradient), formats.split_weight_gradient(gradient), f"{rows}")


# ---- every code under every scale ----


def _all_codes(scale: torch.Tensor):
    """Rows of all 256 codes, one a scale."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return codes.repeat(scale.numel(), 1), scale[:, None].repeat(1, 2)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_fp8_code_and_scale(device, source):
    if source == torch.uint8:
        scale = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    else:
        scale = torch.cat([1 << torch.arange(23), torch.arange(1, 256) << 23]).to(torch.int32).view(torch.float32)
    q, scales = _all_codes(scale)
    on_gpu = q.to(device), scales.to(device)
    for rounding in strategies.ROUNDINGS:
        expected = formats.fp8_row_to_fp4_row(q, scales, rounding)
        checks.assert_same(ops.fp8_row_to_fp4_row(*on_gpu, rounding), expected, rounding)
    for options in ({}, {"scale_dtype": torch.uint8}, {"scale_layout": "gemm"}):
        expected = formats.fp8_row_to_fp8_row(q, scales, **options)
        checks.assert_same(ops.fp8_row_to_fp8_row(*on_gpu, **options), expected, str(options))
    # Neighboring scales in one tile: every shift from 0 to the number of scales.
    sizes = torch.tensor([64] * (scale.numel() // 64) + [scale.numel() % 64], dtype=torch.int32)
    expected = formats.fp8_row_to_fp8_col(q, scales, sizes)
    checks.assert_same(ops.fp8_row_to_fp8_col(*on_gpu, sizes.to(device)), expected, "columns")
    for dtype in DTYPES:
        expected = formats.fp8_row_to_bf16(q, scales, dtype=dtype)
        checks.assert_same(ops.fp8_row_to_bf16(*on_gpu, dtype=dtype), expected, str(dtype))


def check_every_fp4_code_and_pair_of_scales(device, scale_bytes):
    # In a group of four blocks: all pairs of two scale bytes, and the lowest.
    pairs = torch.cartesian_prod(scale_bytes, scale_bytes)
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64).repeat(len(pairs) // 4, 1)
    scales = torch.stack([pairs[:, 1], pairs[:, 0], pairs[:, 1], torch.zeros_like(pairs[:, 0])], 1).to(torch.uint8)
    for options in ({}, {"scale_dtype": torch.uint8}, {"scale_layout": "gemm"}):
        expected = formats.fp4_row_to_fp8_row(packed, scales, **options)
        got = ops.fp4_row_to_fp8_row(packed.to(device), scales.to(device), **options)
        checks.assert_same(got, expected, str(options))
    sizes = torch.full((len(scale_bytes),), len(scale_bytes), dtype=torch.int32)
    expected = formats.fp4_row_to_fp8_col(packed, scales, sizes)
    got = ops.fp4_row_to_fp8_col(packed.to(device), scales.to(device), sizes.to(device))
    checks.assert_same(got, expected, "columns")


def test_every_fp4_code_and_pair_of_scales(device):
    check_every_fp4_code_and_pair_of_scales(device, torch.arange(256))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_number(device, dtype):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for exponent in range(-20, 16, 3):
        leader = torch.tensor(1.25 * 2.0**exponent).to(dtype)
        below = values[values.isfinite() & (values.abs() <= leader)]
        below = below[: below.numel() // 127 * 127].view(-1, 127)
        x = torch.cat([leader.expand(below.shape[0], 1), below], 1).contiguous()
        for rounding in strategies.ROUNDINGS:
            expected = formats.bf16_to_fp4_row(x, rounding)
            checks.assert_same(ops.bf16_to_fp4_row(x.to(device), rounding), expected, f"{exponent} {rounding}")
        checks.assert_same(ops.bf16_to_fp8_row(x.to(device)), formats.bf16_to_fp8_row(x), str(exponent))


def test_nan_in_every_lane(device):
    for dtype in DTYPES:
        x = torch.randn(1024, 1024).to(dtype)
        bad = torch.tensor([float("nan"), float("inf"), -float("inf"), -float("nan")]).to(dtype)
        x[torch.arange(1024), torch.arange(1024)] = bad.repeat(256)
        checks.assert_same(ops.bf16_to_fp4_row(x.to(device)), formats.bf16_to_fp4_row(x), str(dtype))
        checks.assert_same(ops.bf16_to_fp8_row(x.to(device)), formats.bf16_to_fp8_row(x), str(dtype))
        sizes = torch.tensor([1000, 24], dtype=torch.int32)
        expected = formats.bf16_to_fp8_row_and_col(x, sizes)
        checks.assert_same(ops.bf16_to_fp8_row_and_col(x.to(device), sizes.to(device)), expected, str(dtype))


# ---- what a training step asks of them ----


def _conversions(device):
    """(name, call) of every conversion over small inputs; a call takes `out=`."""
    x = torch.randn(300, 1024, device=device).bfloat16()
    sizes = torch.tensor([0, 200, 0, 100], dtype=torch.int32, device=device)
    index = torch.randint(-1, 300, (300,), dtype=torch.int32, device=device)
    fp4, fp8 = ops.bf16_to_fp4_row(x), ops.bf16_to_fp8_row(x, scale_dtype=torch.uint8)
    w1, w3 = (torch.randn(2, 128, 256, device=device).bfloat16() for _ in range(2))
    gradient = torch.randn(2, 256, 256, device=device)
    columns = {"padded_rows": 384, "index": index, "scale_layout": "gemm"}
    return {
        "bf16_to_fp4_row": lambda **o: ops.bf16_to_fp4_row(x, index=index, **o),
        "fp4_row_to_bf16": lambda **o: ops.fp4_row_to_bf16(*fp4, index=index, **o),
        "bf16_to_fp8_row": lambda **o: ops.bf16_to_fp8_row(x, index=index, **o),
        "fp8_row_to_bf16": lambda **o: ops.fp8_row_to_bf16(*fp8, index=index, **o),
        "fp4_row_to_fp8_row": lambda **o: ops.fp4_row_to_fp8_row(*fp4, index=index, scale_layout="gemm", **o),
        "fp8_row_to_fp4_row": lambda **o: ops.fp8_row_to_fp4_row(*fp8, index=index, **o),
        "fp8_row_to_fp8_row": lambda **o: ops.fp8_row_to_fp8_row(*fp8, index=index, scale_layout="gemm", **o),
        "fp4_row_to_fp8_col": lambda **o: ops.fp4_row_to_fp8_col(*fp4, sizes, **columns, **o),
        "fp8_row_to_fp8_col": lambda **o: ops.fp8_row_to_fp8_col(*fp8, sizes, **columns, **o),
        "bf16_to_fp8_row_and_col": lambda **o: ops.bf16_to_fp8_row_and_col(x, sizes, **columns, **o),
        "weight_to_fp8": lambda **o: ops.weight_to_fp8(w1, w3, **o),
        "split_weight_gradient": lambda **o: ops.split_weight_gradient(gradient, **o),
    }


def _flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in _flat(part)]


def _bytes(result) -> list[torch.Tensor]:
    return [checks.bits(t.contiguous()) for t in _flat(result)]


def test_graph_capture_replays_without_allocating(device):
    for name, call in _conversions(device).items():
        out = call()
        expected = _bytes(out)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call(out=out)
        for t in _flat(out):
            t.view(torch.uint8).fill_(0xA5) if t.is_contiguous() else t.fill_(5)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        for a, b in zip(_bytes(out), expected, strict=True):
            assert torch.equal(a, b), name


def test_nothing_waits_for_the_gpu(device):
    for name, call in _conversions(device).items():
        out = call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(out=out)
        except RuntimeError as error:
            raise AssertionError(f"{name} waits: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_callers_stream(device):
    stream = torch.cuda.Stream()
    for name, call in _conversions(device).items():
        expected = _bytes(call())
        with torch.cuda.stream(stream):
            warm = call()  # so that the stream has its memory
            stream.synchronize()
            del warm
            torch.cuda._sleep(20_000_000)
            result = call()
            done = stream.record_event()
            assert not done.query(), f"{name} did not wait for its stream"
        stream.synchronize()
        for a, b in zip(_bytes(result), expected, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one():
    for name, call in _conversions(torch.device("cuda", 1)).items():
        with torch.cuda.device(1):
            expected = _bytes(call())
        assert torch.cuda.current_device() == 0
        for a, b in zip(_bytes(call()), expected, strict=True):
            assert torch.equal(a, b), name


def test_more_than_2_31_elements(device):
    # 300,000 rows that repeat 4096: all of them against a small conversion, columns in places.
    rows, k, period = 300_000, 7168, 4096
    base = torch.randn(period, k, device=device).bfloat16()
    index = (torch.arange(rows, device=device, dtype=torch.int32) % period).contiguous()
    fp4 = ops.bf16_to_fp4_row(base)
    small = ops.fp4_row_to_fp8_row(*fp4)
    wide = ops.bf16_to_fp4_row(base, index=index)
    assert wide[0].numel() * 2 > 2**31
    fp8 = ops.fp4_row_to_fp8_row(*wide)
    assert fp8[0].numel() > 2**31
    q = fp8[0].view(torch.uint8)
    for start in range(0, rows, period):
        n = min(period, rows - start)
        assert torch.equal(q[start : start + n], small[0].view(torch.uint8)[:n]), start
        assert torch.equal(fp8[1][start : start + n], small[1][:n]), start
    sizes = torch.tensor([rows - 100, 0, 100], dtype=torch.int32, device=device)
    padded = sum(formats.padded_sizes(sizes.tolist()))
    columns = ops.fp8_row_to_fp8_col(*fp8, sizes, padded_rows=padded)
    del fp8, wide
    # The last group's columns, against the reference over its own rows.
    own = ops.fp4_row_to_fp8_row(*fp4, index=index[-100:])
    expected = formats.fp8_row_to_fp8_col(own[0].cpu(), own[1].cpu(), torch.tensor([100], dtype=torch.int32))
    checks.assert_same(columns[0][-k * 128 :], expected[0], "last group")
    checks.assert_same(columns[1][:, -1:].contiguous(), expected[1], "last group's scales")
    # A tile beyond element 2^31, against the reference over its rows.
    tile = (rows - 100) // 128 - 1
    own = ops.fp4_row_to_fp8_row(*fp4, index=index[tile * 128 : (tile + 1) * 128])
    expected = formats.fp8_row_to_fp8_col(own[0].cpu(), own[1].cpu(), torch.tensor([128], dtype=torch.int32))
    group = columns[0].view(torch.uint8)[: k * (padded - 128)].view(k, padded - 128)
    got = group[:, tile * 128 : (tile + 1) * 128].contiguous()
    checks.assert_same(got, expected[0].view(torch.uint8).view(k, 128), "tile")


def test_more_than_2_32_bytes_of_repeated_parts():
    # 8.8e9 values: even their FP4 codes pass 2^32 bytes, which is where an unsigned offset would begin anew.
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB")
    checks.check_repeated("cuda", repeats=300, rows=4096, k=7168)


def test_large_ragged_groups_with_gather(device):
    sizes = checks.sizes_for(20000, 32, 3)
    for k in (7168, 2048):
        x = torch.randn(5000, k, device=device).bfloat16() * torch.rand(5000, 1, device=device).bfloat16()
        index = torch.randint(-1, 5000, (20000,), dtype=torch.int32, device=device)
        on_gpu = sizes.to(device)
        fp4, fp8 = ops.bf16_to_fp4_row(x), ops.bf16_to_fp8_row(x, scale_dtype=torch.uint8)
        for layout in ("row", "gemm"):
            options = {"index": index, "scale_layout": layout}
            # The reference on the GPU: seconds instead of minutes.
            expected = formats.fp4_row_to_fp8_col(*fp4, on_gpu, **options)
            checks.assert_same(ops.fp4_row_to_fp8_col(*fp4, on_gpu, **options), expected, f"fp4 {k} {layout}")
            expected = formats.fp8_row_to_fp8_col(*fp8, on_gpu, **options)
            checks.assert_same(ops.fp8_row_to_fp8_col(*fp8, on_gpu, **options), expected, f"fp8 {k} {layout}")
            expected = formats.bf16_to_fp8_row_and_col(x, on_gpu, **options)
            checks.assert_same(ops.bf16_to_fp8_row_and_col(x, on_gpu, **options), expected, f"both {k} {layout}")
        expected = formats.fp4_row_to_fp8_row(*fp4, index=index, scale_layout="gemm")
        got = ops.fp4_row_to_fp8_row(*fp4, index=index, scale_layout="gemm")
        assert got[1].stride() == (1, 20000)
        checks.assert_same(got, expected, f"rows {k}")
