# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The activation between an expert's two GEMMs, forward and backward, from and to quantized rows.

An activation is h = f(gate) * up with f(g) = g * sigmoid(z(g)). DeepSpeed AutoEP's four (deepspeed/moe/ep_experts.py):

    swiglu           z = g
    swiglu_clamped   z = g; gate clamped to at most `limit`, up to [-limit, limit]
    swiglu_oai       z = alpha * g; clamped likewise; up + 1 in place of up
    geglu_tanh       z = 2 sqrt(2/pi) (g + 0.044715 g^3), which makes f the tanh form of GELU

f'(g) = s + f(g) (1 - s) z'(g), s = sigmoid(z). All arithmetic is FP32; products are taken in the order written here.
"""

import math
from typing import NamedTuple

import torch

from ds_fp4 import formats
from ds_fp4.formats import FP8_GROUP, ColumnLayout, checks, e4m3
from ds_fp4.formats import rows as row_pieces

from .layout import (
    BF16,
    LOWEST_EXPONENT,
    SCALE_LAYOUTS,
    Pair,
    check_choice,
    check_out_rows,
    check_rows,
    check_scales,
    new_rows,
    new_scales,
    quantize_fp8_rows,
)

ACTIVATIONS = ("swiglu", "swiglu_clamped", "swiglu_oai", "geglu_tanh")
SAVED_FORMATS = (None, "mxfp4", "fp8")
GATE_UP_FORMATS = ("mxfp4", "fp8", "bf16")

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


class SwigluForward(NamedTuple):
    """q float8_e4m3fn [R, I] and scales FP32 [R, I/128] of weight * h; what is kept of gate_up, a pair or None."""

    q: torch.Tensor
    scales: torch.Tensor
    saved: Pair | None


class SwigluBackward(NamedTuple):
    """Results of `swiglu_backward`; P = padded rows.

    Attributes:
        row, row_scales: d_gate_up as FP8 rows, float8_e4m3fn [R, 2I] and FP32 [R, 2I/128].
        col, col_scales: d_gate_up as FP8 columns, float8_e4m3fn [2I * P] and FP32 [2I, P/128].
        h_col, h_col_scales: weight * h as FP8 columns, float8_e4m3fn [I * P] and FP32 [I, P/128].
        weights: FP32 [R], gradient of the routing weights: the sum over I of dh * h.
    """

    row: torch.Tensor
    row_scales: torch.Tensor
    col: torch.Tensor
    col_scales: torch.Tensor
    h_col: torch.Tensor
    h_col_scales: torch.Tensor
    weights: torch.Tensor


def clamped(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate as f takes it, and the factor beside f(gate)."""
    if activation in ("swiglu_clamped", "swiglu_oai"):
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate, up + 1.0 if activation == "swiglu_oai" else up


def _sigmoid_and_slope(gate: torch.Tensor, activation: str, alpha: float) -> tuple[torch.Tensor, torch.Tensor | float]:
    """sigmoid(z(gate)) and z'(gate)."""
    if activation == "swiglu_oai":
        return torch.sigmoid(gate * alpha), alpha
    if activation == "geglu_tanh":
        square = gate * gate
        z = gate * (square * (_GELU_LINEAR * _GELU_CUBIC) + _GELU_LINEAR)
        # Bounded, since the sigmoid's slope is zero where the square overflows, and zero times infinity is NaN.
        return torch.sigmoid(z), square.clamp(max=1e30) * (3 * _GELU_LINEAR * _GELU_CUBIC) + _GELU_LINEAR
    return torch.sigmoid(gate), 1.0


def activate(
    gate: torch.Tensor, up: torch.Tensor, activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    """h of FP32 gate and up."""
    gate, up = clamped(gate, up, activation, limit)
    return (gate * _sigmoid_and_slope(gate, activation, alpha)[0]) * up


def activation_backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    d: torch.Tensor,
    weight: torch.Tensor,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h, and the gradients of gate and up from `d`, that of weight * h. All FP32, `weight` one a row.

    A clamped gate or up gets no gradient where it is beyond the limit; NaN passes through. At the limit itself it gets
    one, as from torch's own clamp up to torch 2.13 (since 2.14 that gives none there).
    """
    inner_gate, factor = clamped(gate, up, activation, limit)
    s, slope = _sigmoid_and_slope(inner_gate, activation, alpha)
    f = inner_gate * s
    d = d * weight
    d_gate = (d * factor) * (f * (1.0 - s) * slope + s)
    d_up = d * f
    if activation in ("swiglu_clamped", "swiglu_oai"):
        d_gate = d_gate.masked_fill(gate > limit, 0.0)
        d_up = d_up.masked_fill((up > limit) | (up < -limit), 0.0)
    return f * factor, d_gate, d_up


def check_weights(weights: torch.Tensor | None, rows: int, device: torch.device) -> None:
    if weights is None:
        return
    checks.check_tensor("weights", weights, checks.FP32, device, 1)
    checks.check_shape("weights", weights, (rows,))


def check_alignment(name: str, t: torch.Tensor, alignment: int) -> None:
    """Rows (or the whole of a 1-D tensor) start at multiples of `alignment` bytes."""
    row_bytes = t.stride(0) * t.element_size() if t.dim() == 2 and t.shape[0] > 1 else 0
    if t.numel() and (t.data_ptr() % alignment or row_bytes % alignment):
        raise ValueError(
            f"{name} must have rows that start at multiples of {alignment} bytes, got address {t.data_ptr():#x} and "
            f"{row_bytes} bytes from row to row; pass a contiguous copy"
        )


def prepare_swiglu_forward(
    gate_up: torch.Tensor,
    weights: torch.Tensor | None,
    activation: str,
    save: str | None,
    scale_rounding: str,
    scale_layout: str,
    out: SwigluForward | None,
) -> SwigluForward:
    """Checks the arguments of `swiglu_forward`; its outputs, those given or new ones."""
    checks.check_tensor("gate_up", gate_up, BF16, None, 2)
    checks.check_width("gate_up", gate_up.shape[1], 2 * FP8_GROUP)
    check_alignment("gate_up", gate_up, 16)
    rows, width, device = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device
    check_weights(weights, rows, device)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("save", save, SAVED_FORMATS)
    check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    checks.check_scale_rounding(scale_rounding)
    if out is None:
        q = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
        scales = new_scales(rows, width // FP8_GROUP, scale_layout, device)
        return SwigluForward(q, scales, None if save is None else new_rows(rows, 2 * width, save, device))
    out = SwigluForward(*out)
    checks.check_tensor("out's q", out.q, e4m3.CODE_DTYPES, device, 2)
    checks.check_shape("out's q", out.q, (rows, width))
    check_alignment("out's q", out.q, 8)
    check_scales("out's scales", out.scales, (rows, width // FP8_GROUP), device)
    if (out.saved is None) != (save is None):
        raise ValueError(
            f"out's saved must be {'None' if save is None else 'a pair'} for save={save!r}, got {out.saved}"
        )
    if save is not None:
        check_out_rows("out's saved", out.saved, rows, 2 * width, save, device)
        check_alignment("out's saved", out.saved[0], 4 if save == "mxfp4" else 8)
        if out.saved[1].dtype != torch.uint8:
            raise ValueError(f"out's saved scales must be torch.uint8 (UE8M0), got {out.saved[1].dtype}")
    return out


@torch.no_grad()
def swiglu_forward(
    gate_up: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    save: str | None = "mxfp4",
    scale_rounding: str = "even",
    scale_layout: str = "row",
    out: SwigluForward | None = None,
) -> SwigluForward:
    """weight * activation(gate_up) as FP8 rows, and gate_up as it is kept for backward.

    The activation and its product with the weight are FP32 and are quantized as `formats.bf16_to_fp8_row` would, with
    FP32 scales. `saved` has the bits of `formats.bf16_to_fp4_row` or `bf16_to_fp8_row` (UE8M0 scales) of gate_up.

    Args:
        gate_up: BF16 [R, 2I], gate in the first I columns, I a multiple of 128; rows at multiples of 16 bytes.
        weights: FP32 [R], the rows' routing weights; None for 1.
        activation: one of `ACTIVATIONS`; alpha and limit as DeepSpeed's, used by those that have them.
        save: "mxfp4", "fp8" or None: what to keep of gate_up.
        scale_rounding: of MXFP4.
        scale_layout: "row": scales contiguous. "gemm": strides (1, R rounded up to 4) and no scale below 2^-126: the
            nearest normal one, with codes rounded under it.
        out: a SwigluForward to write to and return; scales may have any strides.

    Returns:
        SwigluForward(q, scales, saved); saved is None or the pair (packed, scales) or (q, scales).

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or choice.
    """
    out = prepare_swiglu_forward(gate_up, weights, activation, save, scale_rounding, scale_layout, out)
    for piece in row_pieces.pieces(gate_up.shape[0], gate_up.shape[1], gate_up.device):
        gate, up = gate_up[piece].to(torch.float32).chunk(2, dim=1)
        h = activate(gate, up, activation, alpha, limit)
        if weights is not None:
            h = h * weights[piece, None]
        quantize_fp8_rows(h, out.q[piece], out.scales[piece], LOWEST_EXPONENT[scale_layout])
    if save == "mxfp4":
        formats.bf16_to_fp4_row(gate_up, scale_rounding, out=out.saved)
    elif save == "fp8":
        formats.bf16_to_fp8_row(gate_up, scale_dtype=torch.uint8, out=out.saved)
    return out


def prepare_swiglu_backward(
    dh: torch.Tensor,
    weights: torch.Tensor | None,
    gate_up: torch.Tensor | Pair,
    group_sizes: torch.Tensor,
    gate_up_format: str,
    padded_rows: int | None,
    padded_input: bool,
    activation: str,
    scale_layout: str,
    out: SwigluBackward | None,
) -> tuple[int, SwigluBackward]:
    """Checks the arguments of `swiglu_backward`; the padded rows, and the outputs given or new ones."""
    checks.check_tensor("dh", dh, BF16, None, 2)
    checks.check_width("dh", dh.shape[1], FP8_GROUP)
    check_alignment("dh", dh, 16)
    (rows, width), device = dh.shape, dh.device
    check_weights(weights, rows, device)
    check_choice("gate_up_format", gate_up_format, GATE_UP_FORMATS)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    got = check_rows("gate_up", gate_up, gate_up_format)
    if got != (rows, 2 * width, device):
        raise ValueError(
            f"gate_up must have {rows} rows of {2 * width} values on {device} (twice dh's), got {got[0]} of {got[1]} "
            f"on {got[2]}"
        )
    data = gate_up if gate_up_format == "bf16" else gate_up[0]
    check_alignment("gate_up", data, {"mxfp4": 4, "fp8": 8, "bf16": 16}[gate_up_format])
    if gate_up_format == "fp8" and gate_up[1].dtype != torch.uint8:
        raise ValueError(f"gate_up's scales must be torch.uint8 (UE8M0), got {gate_up[1].dtype}")
    checks.check_tensor("group_sizes", group_sizes, checks.INT32, device, 1)
    if padded_rows is None:
        padded_rows = rows if padded_input else ColumnLayout.of(group_sizes).padded_rows
    if not isinstance(padded_rows, int) or padded_rows < 0 or padded_rows % FP8_GROUP:
        raise ValueError(f"padded_rows must be a multiple of {FP8_GROUP} (an int), got {padded_rows!r}")
    if padded_input and padded_rows != rows:
        raise ValueError(f"padded_rows must be dh's {rows} rows with padded_input, got {padded_rows}")
    if dh.is_cpu:
        sizes = group_sizes.tolist()
        needed = sum(formats.padded_sizes(sizes))
        total = needed if padded_input else sum(sizes)
        if min(sizes, default=0) < 0 or total != rows or needed != padded_rows:
            kind = "padded to 128 each, " if padded_input else ""
            raise ValueError(
                f"group_sizes must be non-negative and, {kind}add up to the {rows} rows (padded_rows {padded_rows}), "
                f"got {sizes}"
            )
    groups, tiles = width // FP8_GROUP, padded_rows // FP8_GROUP
    if out is None:
        e4m3_dtype = torch.float8_e4m3fn
        return padded_rows, SwigluBackward(
            torch.empty(rows, 2 * width, dtype=e4m3_dtype, device=device),
            new_scales(rows, 2 * groups, scale_layout, device),
            torch.empty(2 * width * padded_rows, dtype=e4m3_dtype, device=device),
            new_scales(2 * width, tiles, scale_layout, device),
            torch.empty(width * padded_rows, dtype=e4m3_dtype, device=device),
            new_scales(width, tiles, scale_layout, device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )
    out = SwigluBackward(*out)
    checks.check_tensor("out's row", out.row, e4m3.CODE_DTYPES, device, 2)
    checks.check_shape("out's row", out.row, (rows, 2 * width))
    check_alignment("out's row", out.row, 8)
    check_scales("out's row_scales", out.row_scales, (rows, 2 * groups), device)
    for name, columns in (("col", 2 * width), ("h_col", width)):
        q = getattr(out, name)
        checks.check_tensor(f"out's {name}", q, e4m3.CODE_DTYPES, device, 1)
        checks.check_shape(f"out's {name}", q, (columns * padded_rows,))
        check_alignment(f"out's {name}", q, 16)
        check_scales(f"out's {name}_scales", getattr(out, f"{name}_scales"), (columns, tiles), device)
    checks.check_tensor("out's weights", out.weights, checks.FP32, device, 1)
    checks.check_shape("out's weights", out.weights, (rows,))
    return padded_rows, out


def _decode(gate_up: torch.Tensor | Pair, gate_up_format: str) -> torch.Tensor:
    if gate_up_format == "mxfp4":
        return formats.fp4_row_to_bf16(*gate_up, dtype=torch.float32)
    if gate_up_format == "fp8":
        return formats.fp8_row_to_bf16(*gate_up, dtype=torch.float32)
    return gate_up.to(torch.float32)


@torch.no_grad()
def swiglu_backward(
    dh: torch.Tensor,
    weights: torch.Tensor | None,
    gate_up: torch.Tensor | Pair,
    group_sizes: torch.Tensor,
    *,
    gate_up_format: str = "mxfp4",
    padded_rows: int | None = None,
    padded_input: bool = True,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    scale_layout: str = "row",
    out: SwigluBackward | None = None,
) -> SwigluBackward:
    """The activation's backward pass, straight into the operands of the GEMMs that follow.

    d_gate_up is quantized to FP8 rows as `formats.bf16_to_fp8_row` would quantize the FP32 gradients. Its columns are
    the columns of those rows, `formats.fp8_row_to_fp8_col` bit for bit, so that data and weight gradients come from
    the same values; so are the columns of weight * h, from rows quantized as in `swiglu_forward`.

    Rows of a group (expert) lie one after the other. With `padded_input` groups start at multiples of 128 rows and the
    rows between are padding: whatever they hold, they give zeros.

    Args:
        dh: BF16 [R, I], gradient of weight * h, I a multiple of 128; rows at multiples of 16 bytes.
        weights: FP32 [R]; None for 1.
        gate_up: MXFP4 (packed, scales) or FP8 (q, UE8M0 scales) rows of 2I values, or BF16 [R, 2I].
        group_sizes: int32 [E], rows of each group without padding, zero included. On a GPU their sum is not checked.
        gate_up_format: "mxfp4", "fp8" or "bf16".
        padded_rows: P, the sum of group sizes rounded up to 128 each; R with `padded_input`. If None without
            `padded_input`, a GPU is waited for to learn it.
        padded_input: whether rows lie at padded places; R = P then, else R is the sum of the group sizes.
        activation, alpha, limit, scale_layout: as in `swiglu_forward`; the layout is that of all scales.
        out: a SwigluBackward to write to and return; scales may have any strides.

    Returns:
        SwigluBackward.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or choice, or (host tensors) sizes that do not add up.
    """
    padded_rows, out = prepare_swiglu_backward(
        dh, weights, gate_up, group_sizes, gate_up_format, padded_rows, padded_input, activation, scale_layout, out
    )
    rows, width = dh.shape
    lowest = LOWEST_EXPONENT[scale_layout]
    layout = ColumnLayout.of(group_sizes, padded_rows)
    source = layout.source_rows()  # [P]: unpadded row or -1
    real = (source >= 0)[:, None] if padded_input else None

    def zero_padding(t: torch.Tensor) -> torch.Tensor:
        return t if real is None else t.masked_fill(~real, 0.0)

    values = zero_padding(_decode(gate_up, gate_up_format))
    d = zero_padding(dh.to(torch.float32))
    weight = torch.ones(rows, 1, device=dh.device) if weights is None else weights[:, None]
    weight = zero_padding(weight)
    h, d_gate, d_up = activation_backward(*values.chunk(2, dim=1), d, weight, activation, alpha, limit)
    out.weights.copy_((d.double() * h.double()).sum(1))
    h_q, h_scales = torch.empty_like(h, dtype=torch.float8_e4m3fn), torch.empty_like(h[:, : width // FP8_GROUP])
    quantize_fp8_rows(torch.cat([d_gate, d_up], dim=1), out.row, out.row_scales, lowest)
    quantize_fp8_rows(h * weight, h_q, h_scales, lowest)
    index = None
    if padded_input:
        index = torch.nonzero(source >= 0).flatten().to(torch.int32)
    for q, scales, col, col_scales in (
        (out.row, out.row_scales, out.col, out.col_scales),
        (h_q, h_scales, out.h_col, out.h_col_scales),
    ):
        scales = scales if scales.stride(-1) == 1 else scales.contiguous()
        result = formats.fp8_row_to_fp8_col(q, scales, group_sizes, padded_rows=padded_rows, index=index)
        col.view(torch.uint8).copy_(result[0].view(torch.uint8))
        # Through integers: a copy of FP32 values might flush subnormal ones.
        col_scales.view(torch.int32).copy_(result[1].view(torch.int32))
    return out
