# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The GPU tests of shapes, gathering and memory layouts without a GPU.

The kernels' sources run on the host (see `host_kernels`), with the parameters, the grid and the choice between vector
and single accesses that `ds_fp4.ops` would launch them with on a GPU of one multiprocessor.
"""

import pytest
import torch

from ds_fp4 import ops
from tests.gpu import test_conversions as on_gpu


@pytest.fixture(autouse=True)
def launches(host, monkeypatch):
    """Host tensors go through `ops` as CUDA tensors would; the list of instantiations that were launched."""
    host.replace(monkeypatch)
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(host, "launched", [])
    return host.launched


@pytest.mark.parametrize("dtype", on_gpu.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_shapes(dtype, rows):
    on_gpu.test_shapes(dtype, rows)


@pytest.mark.parametrize("dtype", on_gpu.FLOAT_DTYPES, ids=str)
def test_not_finite_in_every_lane(dtype):
    on_gpu.test_not_finite_in_every_lane(dtype, float("nan"))


@pytest.mark.parametrize("dtype", on_gpu.FLOAT_DTYPES, ids=str)
def test_arbitrary_records_decode(dtype):
    on_gpu.test_arbitrary_records_decode(dtype)


@pytest.mark.parametrize("width", [96, 100, 1056])
def test_gathering(width):
    on_gpu.test_gathering(width)


@pytest.mark.parametrize("width", [32, 2880])
@pytest.mark.parametrize(("start", "extra"), [(0, 0), (0, 16), (4, 12), (8, 8), (1, 0), (3, 7)])
def test_records(width, start, extra):
    on_gpu.test_records(width, start, extra)


@pytest.mark.parametrize("dtype", on_gpu.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_strided_values(dtype, offset):
    on_gpu.test_strided_values(dtype, offset)


def test_fp32_scales_of_another_layout():
    on_gpu.test_fp32_scales_of_another_layout()


def test_vector_access_is_used_where_it_can_be(launches):
    x = torch.randn(3, 7168).to(torch.bfloat16)
    record = torch.zeros(3, 3808, dtype=torch.uint8)  # 3584 bytes of codes, 224 of scales: rows 16-byte aligned
    ops.bf16_to_fp4_row(x, out=(record[:, :3584], record[:, 3584:]))
    ops.fp4_row_to_bf16(record[:, :3584], record[:, 3584:])
    ops.bf16_to_fp8_row(x)
    ops.bf16_to_fp8_row(x[:, 1:])  # rows begin 2 bytes past an aligned address
    ops.bf16_to_fp8_row(x[:, :100])  # the last unit is not whole
    ops.bf16_to_fp4_row(x[:1, 8:40])  # 16 bytes past
    assert launches == [
        "bf16_to_fp4_row<Bf16, true>",
        "fp4_row_to_bf16<Bf16, true>",
        "bf16_to_fp8_row<Bf16, true>",
        "bf16_to_fp8_row<Bf16, false>",
        "bf16_to_fp8_row<Bf16, false>",
        "bf16_to_fp4_row<Bf16, true>",
    ]
