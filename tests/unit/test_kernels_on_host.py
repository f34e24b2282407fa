# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The kernels' own sources, run on the host thread by thread (host_kernels), bit for bit against the reference."""

import contextlib
import functools

import pytest
import torch

from ds_fp4 import formats, ops
from ds_fp4.ops import kernels, launching
from tests import kernel_checks as checks
from tests import strategies
from tests.gpu import test_conversion_sweep as on_gpu

DTYPES = strategies.FLOAT_DTYPES
SCALES = ("fp32", "ue8m0", "gemm")
SOURCES = (torch.uint8, torch.float32)


@pytest.fixture(autouse=True)
def ops_on_host(host, monkeypatch):
    host.replace(monkeypatch)


def _sizes(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32)


# Shapes: one row, rows that are no multiple of 8, several tiles a row and several stripes of them, a short last group,
# rows of whole tiles of either size, widths of every alignment.
FP4_SHAPES = [(1, 32), (5, 1056), (4, 512), (9, 160), (19, 1024), (3, 2048)]
FP8_SHAPES = [(1, 16), (5, 1040), (8, 512), (9, 130), (3, 7), (17, 2576)]
INDICES = ("none", "random", "absent")


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("scale", SCALES)
def test_fp4_row_to_fp8_row(scale, index, aligned):
    for seed, (rows, k) in enumerate(FP4_SHAPES):
        for spread in (3, 24, 254):
            checks.check_fp4_row_to_fp8_row("cpu", rows, k, seed, index, scale, aligned, spread)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("scale", SCALES)
def test_fp8_row_to_fp8_row(scale, index, aligned):
    for seed, (rows, k) in enumerate(FP8_SHAPES):
        for source in SOURCES:
            checks.check_fp8_row_to_fp8_row("cpu", rows, k, seed, index, source, scale, aligned, spread=254)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("rounding", strategies.ROUNDINGS)
def test_fp8_row_to_fp4_row(rounding, index, aligned):
    for seed, (rows, k) in enumerate(FP4_SHAPES):
        for source in SOURCES:
            checks.check_fp8_row_to_fp4_row("cpu", rows, k, seed, index, source, rounding, aligned, spread=254)


@pytest.mark.parametrize("index", INDICES)
def test_warps_take_several_quads(index):
    for k in (3104, 3072):
        checks.check_fp4_row_to_fp8_row("cpu", 21, k, 0, index, "gemm", True, 24)
        checks.check_fp8_row_to_fp8_row("cpu", 21, k, 1, index, torch.uint8, "gemm", True, spread=24)
        checks.check_fp8_row_to_fp4_row("cpu", 21, k, 2, index, torch.uint8, "even", True, spread=24)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_values(dtype, aligned):
    for seed, kind in enumerate(strategies.FINITE_KINDS):
        index = INDICES[seed % 2]
        for rows, k in ((3, 1056), (1, 32)):
            rounding = strategies.ROUNDINGS[seed % 4]
            checks.check_bf16_to_fp4_row("cpu", kind, rows, k, seed, dtype, index, rounding, aligned)
            checks.check_fp4_row_to_bf16("cpu", rows, k, seed, dtype, index, aligned)
        for rows, k in ((3, 1160), (2, 9)):
            checks.check_bf16_to_fp8_row("cpu", kind, rows, k, seed, dtype, index, SCALES[seed % 3], aligned)
            checks.check_fp8_row_to_bf16("cpu", rows, k, seed, dtype, index, SOURCES[seed % 2], aligned)


def test_rows_too_long_for_the_kernels_are_converted_in_parts(host, monkeypatch):
    monkeypatch.setattr(launching, "LONGEST_ROW", 600)
    monkeypatch.setattr(launching, "PART_VALUES", 256)
    launched = len(host.launched)
    for rows, k, aligned in ((1, 608, True), (3, 1056, True), (2, 800, False)):
        for scale in SCALES:
            checks.check_fp4_row_to_fp8_row("cpu", rows, k, 0, "none", scale, aligned, 24)
            checks.check_fp8_row_to_fp8_row("cpu", rows, k + 3, 0, "none", torch.uint8, scale, aligned, spread=254)
            checks.check_bf16_to_fp8_row("cpu", "gaussian", rows, k + 3, 0, torch.bfloat16, "none", scale, aligned)
        checks.check_fp8_row_to_fp4_row("cpu", rows, k, 0, "none", torch.float32, "even", aligned, spread=254)
        checks.check_bf16_to_fp4_row("cpu", "gaussian", rows, k, 0, torch.bfloat16, "none", "even", aligned)
        checks.check_fp4_row_to_bf16("cpu", rows, k, 0, torch.bfloat16, "none", aligned)
        checks.check_fp8_row_to_bf16("cpu", rows, k + 3, 0, torch.bfloat16, "none", torch.float32, aligned)
    assert len(host.launched) - launched > 3 * 13 * 2
    # Rows of few values, but too many bytes apart.
    launched = len(host.launched)
    checks.check_bf16_to_fp4_row("cpu", "gaussian", 3, 512, 0, torch.bfloat16, "none", "even", True)
    assert len(host.launched) - launched == 3 * 2
    with pytest.raises(ValueError, match="convert without an index"):
        checks.check_fp4_row_to_bf16("cpu", 2, 608, 0, torch.bfloat16, "random", True)


def test_whole_tiles_that_are_not_aligned(host):
    # 32 values a lane write 16 bytes, 16 write 8: outputs at 8 bytes get the latter, vectors all the same.
    q, scales = strategies.random_fp8(9, 2048, 0, torch.uint8, 24)
    expected = formats.fp8_row_to_fp4_row(q, scales)
    for offset, template in ((0, "32, true"), (8, "16, true"), (1, "16, false")):
        packed = torch.zeros(9, 1024 + 16, dtype=torch.uint8)[:, offset : offset + 1024]
        got = ops.fp8_row_to_fp4_row(q, scales, out=(packed, torch.empty_like(expected[1])))
        checks.assert_same(got, expected, template)
        assert host.launched[-1] == f"fp8_row_to_fp4_row<false, {template}>"


def test_not_finite_in_every_lane():
    on_gpu.test_nan_in_every_lane("cpu")


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_fp8_code_and_scale(source):
    on_gpu.test_every_fp8_code_and_scale("cpu", source)


def test_every_fp4_code_and_pairs_of_scales():
    ends_and_middle = torch.cat([torch.arange(10), torch.arange(118, 140, 3), torch.arange(246, 256)])
    on_gpu.check_every_fp4_code_and_pair_of_scales("cpu", ends_and_middle)


SIZES = [
    (_sizes(1), 32),
    (_sizes(0, 130, 0, 128, 3, 0), 288),
    (_sizes(300), 512),
    (_sizes(*[0] * 40, 129, *[1] * 3), 96),  # more groups than a warp has lanes
]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("layout", ["row", "gemm", "blocks"])
@pytest.mark.parametrize("index", INDICES)
def test_fp4_row_to_fp8_col(index, layout, aligned):
    for seed, (sizes, k) in enumerate(SIZES):
        for spread in (3, 24, 254):
            checks.check_fp4_row_to_fp8_col("cpu", sizes, k, seed, index, layout, aligned, spread, known=seed % 2 == 0)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("layout", ["row", "gemm", "blocks"])
@pytest.mark.parametrize("index", INDICES)
def test_fp8_row_to_fp8_col(index, layout, aligned):
    for seed, (sizes, k) in enumerate([*SIZES, (_sizes(0, 5), 130), (_sizes(200), 7)]):
        for spread, source in ((3, torch.uint8), (24, torch.float32), (254, torch.float32), (254, torch.uint8)):
            checks.check_fp8_row_to_fp8_col("cpu", sizes, k, seed, index, source, layout, aligned, spread)


def test_a_short_last_group_of_nothing_but_nan():
    """Blocks that are not there have no say, nor do those of NaN."""
    packed, scales = strategies.random_fp4(130, 160, 0)
    scales[:, 4] = 0xFF
    for layout in ("row", "gemm", "blocks"):
        outs = [checks.column_out(checks.Canvas("cpu"), 160, _sizes(130), layout) for _ in range(2)]
        for convert, out in zip((ops.fp4_row_to_fp8_col, formats.fp4_row_to_fp8_col), outs, strict=True):
            convert(packed, scales, _sizes(130), scale_layout=layout, out=out)
        checks.assert_same(*outs, layout)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bf16_to_fp8_row_and_col(dtype, layout, aligned):
    for seed, kind in enumerate(strategies.FINITE_KINDS):
        sizes, k = [*SIZES, (_sizes(0, 5), 130), (_sizes(200), 7)][seed % 6]
        index = INDICES[seed % 3]
        checks.check_bf16_to_fp8_row_and_col("cpu", kind, sizes, k, seed, dtype, index, layout, aligned)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_to_fp8(dtype, aligned):
    shapes = [(2, 128, 128), (1, 64, 132), (2, 72, 256), (1, 200, 36), (3, 1, 5)]
    for seed, kind in enumerate(strategies.FINITE_KINDS):
        experts, rows, k = shapes[seed % len(shapes)]
        for joined in (True, False):
            for orientation in formats.ORIENTATIONS:
                checks.check_weight_to_fp8(
                    "cpu", kind, experts, rows, k, seed, dtype, joined, aligned, seed % 2 == 1, orientation
                )


def test_rows_of_weights_need_no_aligned_columns(host):
    # N = 132 is no multiple of 16, which only transposed codes ask for.
    for orientation, vector in (("rows", "true"), ("transposed", "false"), ("both", "false")):
        checks.check_weight_to_fp8("cpu", "gaussian", 2, 132, 64, 0, torch.bfloat16, False, orientation=orientation)
        assert host.launched[-1] == f"weight_to_fp8<Bf16, {vector}>", orientation


def test_weights_whose_rows_are_too_far_apart_are_refused():
    # Memory that nobody touches. Kernels multiply rows by strides of 32 bits.
    w1 = torch.empty((1 << 30) + 4, dtype=torch.bfloat16).as_strided((1, 2, 4), (1 << 30, 1 << 30, 1))
    with pytest.raises(ValueError, match="a row stride in bytes below 2"):
        ops.weight_to_fp8(w1)


@pytest.mark.parametrize("aligned", [True, False])
def test_split_weight_gradient(aligned):
    for seed, (experts, rows, k) in enumerate([(1, 1, 8), (3, 40, 264), (2, 3, 5), (0, 2, 8)]):
        checks.check_split_weight_gradient("cpu", experts, rows, k, seed, aligned)


def _leaves(result) -> list[torch.Tensor]:
    """Tensors of a nested tuple, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for part in result if part is not None for leaf in _leaves(part)]


def test_repeated_parts(monkeypatch):
    checks.check_repeated("cpu", repeats=4, rows=128, k=256)
    # Every output is looked at to its end: a wrong last value of any is found.
    for name, outputs in (
        ("split_weight_gradient", 2),
        ("fp8_row_to_fp4_row", 2),
        ("fp8_row_to_fp8_row", 2),
        ("fp4_row_to_fp8_col", 2),
        ("bf16_to_fp8_row_and_col", 4),
        ("weight_to_fp8", 4),
    ):
        convert = getattr(ops, name)
        for number in range(outputs):

            @functools.wraps(convert)
            def wrong(x, *args, convert=convert, number=number, outputs=outputs, **options):
                result = convert(x, *args, **options)
                leaves = _leaves(result)
                assert len(leaves) == outputs or options["orientation"] != "both"
                if x.numel() > 128 * 256 and number < len(leaves):
                    leaves[number].view(-1)[-1:].view(torch.uint8)[-1] ^= 1
                return result

            with monkeypatch.context() as patched, pytest.raises(AssertionError, match=name):
                patched.setattr(ops, name, wrong)
                checks.check_repeated("cpu", repeats=4, rows=128, k=256)


@pytest.mark.parametrize("name", ["no rows", "no groups", "empty groups"])
def test_nothing_to_do(host, name):
    sizes = {"no rows": _sizes(0), "no groups": _sizes(), "empty groups": _sizes(0, 0, 0)}[name]
    launched = len(host.launched)
    for index in ("none", "random"):
        checks.check_fp4_row_to_fp8_row("cpu", 0, 64, 0, "empty" if index == "random" else index, "gemm")
    for layout in ("row", "blocks"):
        checks.check_fp4_row_to_fp8_col("cpu", sizes, 64, 0, "none", layout)
        checks.check_fp8_row_to_fp8_col("cpu", sizes, 64, 0, "none", torch.uint8, layout)
    checks.check_bf16_to_fp8_row_and_col("cpu", "gaussian", sizes, 64, 0, torch.bfloat16, "none")
    # An index of nothing but -1 needs no input rows; that is the one launch.
    assert len(host.launched) - launched <= 1


@pytest.mark.parametrize(
    "sizes, padded_rows, stops",
    [
        ((128, 72), 256, False),
        ((128, 100), 256, True),  # more rows than there are
        ((200,), 128, True),  # more padded rows than the output has
        ((72, 300), 256, True),  # the second group's
        ((100,), 256, False),  # fewer of both: what nobody asked for is left as it was
    ],
)
def test_group_sizes_that_do_not_add_up_stop_the_kernels(monkeypatch, sizes, padded_rows, stops):
    # Of tensors on a GPU the sizes are not looked at before.
    rows, k = 200, 96
    outputs = formats.bf16_to_fp8_row_and_col(torch.zeros(rows, k), _sizes(128, 72))
    rows_out, columns_out = outputs
    x = torch.ones(rows, k)
    fp4, fp8 = formats.bf16_to_fp4_row(x), formats.bf16_to_fp8_row(x)
    for name in ("fp4_row_to_fp8_col", "fp8_row_to_fp8_col"):
        monkeypatch.setattr(formats.checks, f"prepare_{name}", lambda *_: (padded_rows, columns_out))
    monkeypatch.setattr(
        formats.checks, "prepare_bf16_to_fp8_row_and_col", lambda *_: (padded_rows, rows_out, columns_out)
    )
    for index in (None, torch.arange(rows, dtype=torch.int32)):
        for call in (
            lambda index=index: ops.fp4_row_to_fp8_col(*fp4, _sizes(*sizes), index=index),
            lambda index=index: ops.fp8_row_to_fp8_col(*fp8, _sizes(*sizes), index=index),
            lambda index=index: ops.bf16_to_fp8_row_and_col(x, _sizes(*sizes), index=index),
        ):
            with pytest.raises(RuntimeError, match="trap") if stops else contextlib.nullcontext():
                call()


def test_every_instantiation_ran(host, request):
    if request.config.option.keyword:
        pytest.skip("only some of the tests ran")
    assert set(host.numbers) == {f"{k.name}<{t}>" for k in kernels.KERNELS.values() for t in k.instantiations}
    # Those of kernels.cu; test_fused_kernels_host.py runs the others, which have no tiles.
    tiled = [kernel for kernel in kernels.KERNELS.values() if kernel.tile is not None]
    missing = {f"{kernel.name}<{t}>" for kernel in tiled for t in kernel.instantiations} - set(host.launched)
    assert not missing  # this test comes last
