# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What a GEMM backend must do, as checks that tests on the host and on a GPU share.

Operands come from the reference conversions, so that no kernel of ours is needed; expected values are computed in FP64
from the very codes and scales that the backend gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ds_fp4 import formats
from ds_fp4.formats.columns import block_scales_size, column_blocks
from ds_fp4.gemm import Backend, Groups
from ds_fp4.gemm.backend import Pair

E4M3_NAN = 0x7F
BF16_ROUNDING = 2.0**-8
# Tensor cores keep about 14 bits of a sum of products of FP8 numbers before it is promoted to FP32.
RELATIVE_FP32 = 1e-3
RELATIVE_BF16 = 1e-2


class Operands(NamedTuple):
    """Inputs of both GEMMs of one problem, on the device of the test; columns also with a scale for 128 of them."""

    groups: Groups
    rows: Pair
    weights: Pair
    left: Pair
    right: Pair
    left_shared: Pair
    right_shared: Pair


def gemm_scales(scales: torch.Tensor) -> torch.Tensor:
    """A copy of [rows, tiles] with strides (1, rows rounded up to 4); what lies between is NaN."""
    rows, tiles = scales.shape
    out = torch.full((tiles, -(-rows // 4) * 4), torch.nan, dtype=torch.float32, device=scales.device)[:, :rows].t()
    return out.copy_(scales)


def real_rows(groups: Groups) -> torch.Tensor:
    return groups.m_indices >= 0


def random_rows(groups: Groups, width: int, generator: torch.Generator) -> torch.Tensor:
    """BF16 [P, width] of Gaussian rows with a spread of norms, zeros on padding."""
    device = groups.m_indices.device
    x = torch.randn(groups.padded_rows, width, generator=generator, device=device)
    x *= 2.0 ** torch.randint(-3, 4, (groups.padded_rows, 1), generator=generator, device=device)
    x[groups.m_indices < 0] = 0
    return x.bfloat16()


def columns(x: torch.Tensor, groups: Groups) -> tuple[Pair, Pair]:
    """BF16 [P, width] as FP8 columns with a scale for each, and with one for 128; between scales there is NaN."""
    sizes = torch.tensor(groups.sizes, dtype=torch.int32, device=x.device)
    # Values and scales of their own, so that one cannot be taken for the other.
    q, scales = formats.bf16_to_fp8_row_and_col(x, sizes)[1]
    n = block_scales_size(x.shape[1], groups.padded_rows, len(groups.sizes))
    codes = torch.empty(x.numel(), dtype=torch.float8_e4m3fn, device=x.device)
    out = codes, torch.full((n,), torch.nan, device=x.device)
    shared = formats.fp8_row_to_fp8_col(*formats.bf16_to_fp8_row(x), sizes, scale_layout="blocks", out=out)
    return (q, gemm_scales(scales)), shared


def operands(device: str, counts: Sequence[int], n: int, k: int, seed: int = 0) -> Operands:
    """A random problem: rows [P, K], weights [E, N, K]; left and right are columns of [P, N] and [P, K]."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = Groups.of(counts, device)
    q, scales = formats.bf16_to_fp8_row(random_rows(groups, k, generator))
    weights = torch.randn(len(counts), n, k, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
    (left, left_shared), (right, right_shared) = (
        columns(random_rows(groups, width, generator), groups) for width in (n, k)
    )
    weights = formats.weight_to_fp8(weights)[0]
    return Operands(groups, (q, gemm_scales(scales)), weights, left, right, left_shared, right_shared)


def rights(backend: Backend, problem: Operands) -> list[Pair]:
    """The right columns in the layouts that the backend takes."""
    return [problem.right, *([problem.right_shared] if backend.column_scale_layout == "blocks" else [])]


def decoded_rows(pair: Pair) -> torch.Tensor:
    q, scales = pair
    return q.double() * scales.double().repeat_interleave(128, 1)[:, : q.shape[1]]


def expected_grouped_gemm(problem: Operands) -> torch.Tensor:
    """FP64 [P, N]."""
    (q, scales), groups = problem.weights, problem.groups
    n, k = q.shape[1:]
    blocks = scales.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :k]
    parts = decoded_rows(problem.rows).split(groups.sizes)
    products = [part @ (q[e].double() * blocks[e]).t() for e, part in enumerate(parts)]
    return torch.cat(products) if products else torch.empty(0, n, dtype=torch.float64, device=q.device)


def decoded_columns(pair: Pair, width: int, groups: Groups) -> list[torch.Tensor]:
    """FP64 [width, p_e] of each expert."""
    columns_of_a_scale = 128 if pair[1].dim() == 1 else 1
    return [
        decoded_rows((codes, tiles.repeat_interleave(columns_of_a_scale, 0)[:width]))
        for codes, tiles in column_blocks(*pair, groups.sizes, width)
    ]


def expected_weight_gradient(problem: Operands, left: Pair | None = None, right: Pair | None = None) -> torch.Tensor:
    """FP64 [E, N, K]; of the problem's columns with a scale for each where no others are given."""
    n, k = problem.left[1].shape[0], problem.right[1].shape[0]
    lefts = decoded_columns(left or problem.left, n, problem.groups)
    rights = decoded_columns(right or problem.right, k, problem.groups)
    products = [a @ b.t() for a, b in zip(lefts, rights, strict=True)]
    return (
        torch.stack(products) if products else torch.empty(0, n, k, dtype=torch.float64, device=problem.left[0].device)
    )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN and infinities count as infinite."""
    difference = float((got.double() - expected).norm())
    return difference / max(float(expected.norm()), 1e-30) if difference == difference else float("inf")


def new_outs(problem: Operands, parts: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients to write to, full of NaN."""
    device, k = problem.left[0].device, problem.right[1].shape[0]
    shape = len(problem.groups.sizes)
    return [torch.full((shape, n, k), torch.nan, dtype=dtype, device=device) for n in parts]


def check_grouped_gemm(
    backend: Backend, problem: Operands, limit: float = RELATIVE_BF16, wait: Callable[[], None] = lambda: None
) -> torch.Tensor:
    out = backend.grouped_gemm(problem.rows, problem.weights, problem.groups)
    wait()
    expected = expected_grouped_gemm(problem)
    assert out.dtype == torch.bfloat16 and out.shape == expected.shape
    real = real_rows(problem.groups)
    error = relative_error(out[real], expected[real])
    assert error <= limit, f"relative error {error:.2e} of {backend.name}'s grouped GEMM, at most {limit:.0e} allowed"
    return out


def check_weight_gradient(
    backend: Backend,
    problem: Operands,
    parts: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    limit: float | None = None,
    wait: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Returns what columns with a scale for each give. Of a backend that can, those that share them are tried too."""
    limit = limit or (RELATIVE_FP32 if dtype == torch.float32 else RELATIVE_BF16)
    cases = {"": (problem.left, problem.right)}
    if backend.column_scale_layout == "blocks":
        cases["b in blocks, "] = (problem.left, problem.right_shared)
        if not any(width % 128 for width in parts[:-1]):
            cases["a in blocks, "] = (problem.left_shared, problem.right)
    first = None
    for what, (left, right) in cases.items():
        outs = new_outs(problem, parts, dtype)
        backend.weight_gradient(left, right, problem.groups, outs)
        wait()
        expected = expected_weight_gradient(problem, left, right)
        got = torch.cat(outs, dim=1)
        for expert, size in enumerate(problem.groups.sizes):
            if size == 0:
                assert not bool(got[expert].any()), (
                    f"{what}expert {expert} has no rows and a gradient that is not zero"
                )
            else:
                # Each expert on its own: one that is wrong must not hide among many.
                error = relative_error(got[expert], expected[expert])
                assert error <= limit, (
                    f"{what}relative error {error:.2e} of {backend.name}'s gradient of expert {expert}"
                )
        first = first or outs
    return first


def poison_padding(problem: Operands) -> Operands:
    """The same rows with NaN codes and NaN scales on padding."""
    q, scales = problem.rows
    padding = ~real_rows(problem.groups)
    q, scales = q.clone(), gemm_scales(scales)
    q.view(torch.uint8)[padding] = E4M3_NAN
    scales[padding] = torch.nan
    return problem._replace(rows=(q, scales))


def check_poisoned_padding(backend: Backend, problem: Operands, wait: Callable[[], None] = lambda: None) -> None:
    """Rows of the output are the same bits whatever padding holds."""
    clean = backend.grouped_gemm(problem.rows, problem.weights, problem.groups)
    poisoned = poison_padding(problem)
    got = backend.grouped_gemm(poisoned.rows, poisoned.weights, poisoned.groups)
    wait()
    real = real_rows(problem.groups)
    assert torch.equal(got[real], clean[real]), "NaN padding reached rows of tokens"
