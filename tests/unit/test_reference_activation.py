# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""swiglu_forward and swiglu_backward in PyTorch: against DeepSpeed's activations and autograd in FP64, and their
layout."""

import pytest
import torch
from deepspeed.moe.ep_experts import apply_expert_activation
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp4 import formats, reference
from tests import fused_checks, strategies
from tests.fused_checks import assert_same, fp8_columns_value, fp8_rows_value

# No BF16 value is the limit itself, where the gradient of torch's clamp is 1 up to torch 2.13 and 0 since.
ALPHA, LIMIT = 1.25, 2.001


def _exact(gate_up: torch.Tensor, weights: torch.Tensor, dh: torch.Tensor, activation: str):
    """FP64 weight * h, its gradients by autograd, and the routing weights' gradient."""
    gate_up = gate_up.double().requires_grad_()
    weights = weights.double().requires_grad_()
    gate, up = gate_up.chunk(2, dim=1)
    h = apply_expert_activation(gate, up, activation, ALPHA, LIMIT, fused=False)
    weighted = h * weights[:, None]
    weighted.backward(dh.double())
    return weighted.detach(), gate_up.grad, weights.grad


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("kind", ["gaussian", "student_t"])
def test_against_autograd(activation, kind):
    """FP8 rounds each value by up to 1/16; without it the arithmetic agrees to FP32's precision."""
    rows, width = 128, 256
    gate_up = strategies.make(kind, rows, 2 * width, seed=1) * 1.5
    dh = strategies.make("gaussian", rows, width, seed=2)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(3)) + 0.1
    h, d_gate_up, d_weights = _exact(gate_up, weights, dh, activation)
    forward = reference.swiglu_forward(gate_up, weights, activation=activation, alpha=ALPHA, limit=LIMIT, save=None)
    assert _relative_error(fp8_rows_value(forward.q, forward.scales)[0], h) < 0.035
    backward = reference.swiglu_backward(
        dh, weights, gate_up, torch.tensor([rows], dtype=torch.int32), gate_up_format="bf16", activation=activation,
        alpha=ALPHA, limit=LIMIT,
    )  # fmt: skip
    assert _relative_error(fp8_rows_value(backward.row, backward.row_scales)[0], d_gate_up) < 0.035
    assert _relative_error(fp8_columns_value(backward.col, backward.col_scales, [rows])[0].t(), d_gate_up) < 0.035
    assert _relative_error(fp8_columns_value(backward.h_col, backward.h_col_scales, [rows])[0].t(), h) < 0.035
    assert _relative_error(backward.weights.double(), d_weights) < 1e-6
    # Before quantization.
    gate, up = gate_up.float().chunk(2, dim=1)
    own_h, d_gate, d_up = reference.activation.activation_backward(
        gate, up, dh.float(), weights[:, None], activation, ALPHA, LIMIT
    )
    assert _relative_error(own_h.double() * weights[:, None], h) < 1e-6
    assert _relative_error(torch.cat([d_gate, d_up], dim=1).double(), d_gate_up) < 1e-6


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_clamped_and_extreme_values(activation):
    """Gradients beyond the limits are zero; no finite input within reach of FP32 gives NaN."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 2.0, 2.5, -2.0, -2.5, 80.0, -80.0, 1e4, -1e4, 1e20, -1e20, 3e38, -3e38]
    )
    gate, up = torch.meshgrid(values, torch.tensor([0.5, -0.5, 2.0, -2.0, 3.0, -3.0]), indexing="ij")
    gate, up = gate.reshape(1, -1), up.reshape(1, -1)
    one = torch.ones(1, 1)
    h, d_gate, d_up = reference.activation.activation_backward(
        gate, up, torch.ones_like(gate), one, activation, ALPHA, LIMIT
    )
    for t in (h, d_gate, d_up):
        assert not t.isnan().any(), (gate[t.isnan()], up[t.isnan()])
    inputs = [gate.double().requires_grad_(), up.double().requires_grad_()]
    expected = apply_expert_activation(*inputs, activation, ALPHA, LIMIT, fused=False)
    torch.testing.assert_close(h, expected.detach().float(), rtol=1e-5, atol=1e-30)
    small = gate.abs() < 1e15  # GELU's derivative in torch is NaN beyond
    expected[small].sum().backward()
    torch.testing.assert_close(d_gate.double()[small], inputs[0].grad[small], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d_up.double()[small], inputs[1].grad[small], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["swiglu_clamped", "swiglu_oai"])
def test_the_limit_itself_has_a_gradient(activation):
    gate, up = torch.tensor([[2.0, 1.0, 1.0]]), torch.tensor([[1.0, 2.0, -2.0]])
    one = torch.ones(1, 1)
    _, d_gate, d_up = reference.activation.activation_backward(gate, up, torch.ones(1, 3), one, activation, ALPHA, 2.0)
    assert bool((d_gate != 0).all()) and bool((d_up != 0).all())


@pytest.mark.parametrize("save, scale_layout", [("mxfp4", "row"), ("fp8", "gemm"), (None, "gemm")])
def test_forward_is_conversions_put_together(save, scale_layout):
    gate_up = strategies.make("gaussian", 33, 512, seed=0)
    weights = torch.rand(33)
    forward = reference.swiglu_forward(gate_up, weights, save=save, scale_layout=scale_layout)
    gate, up = gate_up.float().chunk(2, dim=1)
    q, scales = formats.bf16_to_fp8_row((torch.nn.functional.silu(gate) * up) * weights[:, None])
    fused_checks.assert_nearly_same(
        "h", *fused_checks._interleave(fp8_rows_value(forward.q, forward.scales), fp8_rows_value(q, scales))
    )
    assert forward.scales.stride() == ((2, 1) if scale_layout == "row" else (1, 36))
    if save == "mxfp4":
        fused_checks.assert_same_parts("saved", forward.saved, formats.bf16_to_fp4_row(gate_up))
    elif save == "fp8":
        expected = formats.bf16_to_fp8_row(gate_up, scale_dtype=torch.uint8)
        fused_checks.assert_same_parts("saved", forward.saved, expected)
    else:
        assert forward.saved is None


def test_gemm_layout_has_normal_scales():
    gate_up = torch.full((4, 256), 2.0**-66, dtype=torch.bfloat16)
    gate_up[1] = 0.0
    forward = reference.swiglu_forward(gate_up, None, save=None, scale_layout="gemm")
    assert bool((forward.scales == 2.0**-126).all())
    # h = gate^2 / 2 = 2^-133, in units of 2^-126.
    assert fp8_rows_value(forward.q, forward.scales)[0][0, 0] == 2.0**-133
    row = reference.swiglu_forward(gate_up, None, save=None)
    assert bool((row.scales.view(torch.int32) == 0x00400000).all())


def test_padding_gives_zeros_whatever_it_holds():
    sizes, width = [3, 0, 130], 128
    padded = fused_checks.padded_rows_of(sizes)
    real = fused_checks.real_rows(sizes)
    gate_up, dh = torch.randn(padded, 2 * width).bfloat16(), torch.randn(padded, width).bfloat16()
    weights = torch.rand(padded)
    group_sizes = torch.tensor(sizes, dtype=torch.int32)

    def run():
        return reference.swiglu_backward(dh, weights, gate_up, group_sizes, gate_up_format="bf16", scale_layout="gemm")

    gate_up[~real], dh[~real], weights[~real] = 0, 0, 0
    clean = run()
    gate_up[~real], dh[~real], weights[~real] = torch.nan, torch.inf, torch.nan
    for name, a, b in zip(clean._fields, clean, run(), strict=True):
        assert_same(name, a, b)
    # And the same from rows without padding.
    compact = reference.swiglu_backward(
        dh[real],
        weights[real],
        gate_up[real],
        group_sizes,
        gate_up_format="bf16",
        scale_layout="gemm",
        padded_input=False,
    )
    for name in ("col", "col_scales", "h_col", "h_col_scales"):
        assert_same(name, getattr(compact, name), getattr(clean, name))
    for name in ("row", "row_scales", "weights"):
        assert_same(name, getattr(compact, name), getattr(clean, name)[real])


def test_non_finite_values_reach_the_outputs():
    gate_up, dh = torch.ones(128, 256).bfloat16(), torch.ones(128, 128).bfloat16()
    gate_up[5, 7] = torch.nan
    dh[9, 3] = torch.inf
    sizes = torch.tensor([128], dtype=torch.int32)
    forward = reference.swiglu_forward(gate_up, None, save="mxfp4")
    assert bool(fp8_rows_value(forward.q, forward.scales)[0][5].isnan().all())
    backward = reference.swiglu_backward(dh, None, forward.saved, sizes)
    values = fp8_rows_value(backward.row, backward.row_scales)[0]
    assert bool(values[5].isnan().any()) and bool(values[9].isnan().any()) and not bool(values[6].isnan().any())
    columns = fp8_columns_value(backward.col, backward.col_scales, [128])[0]
    assert torch.equal(columns.t().isnan(), values.isnan())
    assert backward.weights[5].isnan() and backward.weights[9].isinf()


@settings(deadline=None, max_examples=15)
@given(
    sizes=strategies.group_sizes(max_groups=3, max_size=140),
    kind=st.sampled_from(["gaussian", "student_t", "zero_blocks", "wide_rows"]),
    gate_up_format=st.sampled_from(reference.activation.GATE_UP_FORMATS),
    scale_layout=st.sampled_from(["row", "gemm"]),
    seed=st.integers(0, 1000),
)
def test_columns_are_those_of_the_rows(sizes, kind, gate_up_format, scale_layout, seed):
    """The check that kernels get, on the reference itself."""
    fused_checks.check_swiglu_backward(
        "cpu", sizes.tolist(), 128, kind, gate_up_format=gate_up_format, scale_layout=scale_layout, seed=seed
    )


def _forward(**changes):
    arguments = {"gate_up": torch.zeros(4, 256).bfloat16(), "weights": torch.zeros(4)} | changes
    return reference.swiglu_forward(arguments.pop("gate_up"), arguments.pop("weights"), **arguments)


def _backward(**changes):
    arguments = {
        "dh": torch.zeros(128, 128).bfloat16(),
        "weights": torch.zeros(128),
        "gate_up": torch.zeros(128, 256).bfloat16(),
        "group_sizes": torch.tensor([100], dtype=torch.int32),
        "gate_up_format": "bf16",
    } | changes
    inputs = [arguments.pop(name) for name in ("dh", "weights", "gate_up", "group_sizes")]
    return reference.swiglu_backward(*inputs, **arguments)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _forward(gate_up=torch.zeros(4, 256)), "torch.bfloat16"),
        (lambda: _forward(gate_up=torch.zeros(4, 128).bfloat16()), "multiple of 256"),
        (lambda: _forward(gate_up=torch.zeros(4, 264).bfloat16()[:, 1:257]), "multiples of 16 bytes"),
        (lambda: _forward(weights=torch.zeros(5)), r"shape \(4,\)"),
        (lambda: _forward(activation="relu"), "'swiglu', 'swiglu_clamped', 'swiglu_oai', 'geglu_tanh', got 'relu'"),
        (lambda: _forward(save="bf16"), "None, 'mxfp4', 'fp8', got 'bf16'"),
        (lambda: _forward(scale_layout="column"), "'row', 'gemm', got 'column'"),
        (lambda: _forward(scale_rounding="up"), "scale_rounding"),
        (lambda: _backward(dh=torch.zeros(128, 64).bfloat16()), "multiple of 128"),
        (lambda: _backward(gate_up=torch.zeros(128, 128).bfloat16()), "128 rows of 256 values"),
        (lambda: _backward(gate_up_format="mxfp4"), "pair"),
        (lambda: _backward(group_sizes=torch.tensor([100])), "int32"),
        (lambda: _backward(group_sizes=torch.tensor([200], dtype=torch.int32)), "add up to the 128 rows"),
        (lambda: _backward(padded_rows=256), "must be dh's 128 rows"),
        (lambda: _backward(padded_rows=100), "multiple of 128"),
        (lambda: _backward(padded_input=False), "add up to the 128 rows"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
