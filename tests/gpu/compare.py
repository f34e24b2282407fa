# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Kernels against the reference, bit for bit: on the host, and the reference's own run on the GPU."""

import torch

from ds_fp4 import formats, ops

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS = tuple(formats.SCALE_ROUNDINGS)
SCALE_DTYPES = (torch.float32, torch.uint8)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(_BITS[t.element_size()])


def assert_same_bits(expected: torch.Tensor, got: torch.Tensor, what: object = "") -> None:
    assert expected.shape == got.shape and expected.dtype == got.dtype, what
    different = bits(expected.to(got.device)) != bits(got)
    if bool(different.any()):
        place = tuple(int(i) for i in different.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} differ, first at {place}: expected "
            f"{int(bits(expected)[place]):#x}, got {int(bits(got)[place]):#x}"
        )


def _as_tuple(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _to(device: str, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def check(call: str, *arguments, host: bool = True, **options):
    """Calls ds_fp4.ops.<call> with CUDA arguments and compares with the reference on the GPU, and on the host."""
    got = getattr(ops, call)(*arguments, **options)
    reference = getattr(formats, call)
    what = (call, [getattr(a, "shape", a) for a in arguments], {k: getattr(v, "shape", v) for k, v in options.items()})
    for expected, result in zip(_as_tuple(reference(*arguments, **options)), _as_tuple(got), strict=True):
        assert_same_bits(expected, result, ("GPU reference", *what))
    if host:
        on_host = reference(*(_to("cpu", a) for a in arguments), **{k: _to("cpu", v) for k, v in options.items()})
        for expected, result in zip(_as_tuple(on_host), _as_tuple(got), strict=True):
            assert_same_bits(expected, result.cpu(), ("host reference", *what))
    return got


def check_quantizers(x: torch.Tensor, host: bool = True, **options) -> None:
    """All quantizers of a CUDA tensor."""
    if x.shape[1] % formats.MXFP4_BLOCK == 0:
        for rounding in ROUNDINGS:
            check("bf16_to_fp4_row", x, rounding, host=host, **options)
    for scale_dtype in SCALE_DTYPES:
        check("bf16_to_fp8_row", x, scale_dtype=scale_dtype, host=host, **options)
