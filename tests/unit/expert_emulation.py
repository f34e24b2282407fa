# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""An expert layer's quantization steps written a second time, with floats and ordinary matmuls.

Values are quantized and decoded at once, nothing is packed; every GEMM's output is rounded to BF16. Nothing of
`ds_fp4.experts`, `ds_fp4.gemm` or `ds_fp4.formats` is used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    """FP32 values of MXFP4 rows: blocks of 32, the scale of the maximum rounded to a code of one mantissa bit."""
    blocks = x.float().unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))  # mantissa in [0.5, 1)
    scale = _power_of_two(exponent - 1 + (mantissa >= 0.875).int() - 2)
    v = blocks / scale
    step = torch.where(v.abs() < 2, 0.5, torch.where(v.abs() < 4, 1.0, 2.0))
    return ((torch.round(v / step) * step).clamp(-6, 6) * scale).flatten(-2)


def _fp8_scale(amax: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(amax.clamp(min=1e-30) / 448)
    return _power_of_two(exponent - (mantissa == 0.5).int())


def _e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fp8(x: torch.Tensor) -> torch.Tensor:
    """FP32 values of FP8 rows: a scale per 128."""
    return _fp8_rows(x)[0]


def _fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and each value's scale."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = _fp8_scale(groups.abs().amax(-1, keepdim=True))
    return _e4m3(groups, scale).flatten(-2), scale.expand_as(groups).flatten(-2)


def fp8_columns(x: torch.Tensor) -> torch.Tensor:
    """FP32 values of FP8 columns made from FP8 rows of one expert: a scale per column and 128 rows, the largest."""
    if x.shape[0] == 0:
        return x.float()
    tiles = (rows.split(128) for rows in _fp8_rows(x))
    return torch.cat([_e4m3(values, scales.amax(0, keepdim=True)) for values, scales in zip(*tiles, strict=True)])


def weights_fp8(w: torch.Tensor) -> torch.Tensor:
    """FP32 values of FP8 weights [E, N, K]: a scale per 128 x 128."""
    tiles = w.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    return _e4m3(tiles, _fp8_scale(tiles.abs().amax((2, 4), keepdim=True))).flatten(3).flatten(1, 2)


ROWS = {"mxfp4": mxfp4, "fp8": fp8, "bf16": lambda x: x.to(torch.bfloat16).float()}


def _activation(gate: torch.Tensor, up: torch.Tensor, name: str, alpha: float, limit: float) -> torch.Tensor:
    if name in ("swiglu_clamped", "swiglu_oai"):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if name == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return F.silu(gate) * up


def _bf16_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).to(torch.bfloat16).float()


def emulate(x, scores, expert_ids, weights, dy, recipe, ep_size=1, activation="swiglu", alpha=1.702, limit=7.0):
    """What an expert layer gives for all tokens of its group.

    Args:
        x, dy: [T, H], all ranks' tokens and output gradients, rank by rank. scores, expert_ids: [T, k].
        weights: w1, w2, w3 of all experts. recipe: a LayerRecipe.

    Returns:
        dict of output, x, scores, w1, w2, w3: output and gradients, FP32 but rounded to BF16 where the layer does.
    """
    tokens, experts = x.shape[0], weights[0].shape[0]
    w1, w2, w3 = (weights_fp8(w.detach()) for w in weights)
    xq, dyq = ROWS[recipe.dispatch_forward](x), ROWS[recipe.combine_backward](dy)
    # What a rank adds up for each token, before it is sent home.
    partial, partial_dx = (torch.zeros(ep_size, *x.shape) for _ in range(2))
    result = {"scores": torch.zeros(tokens, expert_ids.shape[1])}
    gradients = {name: torch.zeros(w.shape) for name, w in zip(("w1", "w2", "w3"), weights, strict=True)}
    for e in range(experts):
        token, slot = torch.nonzero(expert_ids == e, as_tuple=True)
        rank = e // (experts // ep_size)
        weight = scores[token, slot].float()[:, None]
        rows = xq[token]
        gate_up = _bf16_matmul(rows, torch.cat([w1[e], w3[e]]).t())
        h = fp8(_activation(*gate_up.chunk(2, -1), activation, alpha, limit) * weight)
        partial[rank].index_add_(0, token, _bf16_matmul(h, w2[e].t()))

        if recipe.recompute != "fc1":
            gate_up = ROWS[recipe.saved_activations](gate_up)
        dh = _bf16_matmul(dyq[token], w2[e])
        gate, up = (half.clone().requires_grad_() for half in gate_up.chunk(2, -1))
        with torch.enable_grad():
            h = _activation(gate, up, activation, alpha, limit)
        d = torch.cat(torch.autograd.grad(h, (gate, up), dh * weight), -1)
        h = h.detach()
        result["scores"][token, slot] = (dh.double() * h.double()).sum(-1).float()
        partial_dx[rank].index_add_(0, token, _bf16_matmul(fp8(d), torch.cat([w1[e], w3[e]])))
        # FP4 rows whose norms spread as little as here become columns exactly; FP8 rows are rounded once more.
        columns = rows if recipe.dispatch_forward == "mxfp4" else fp8_columns(rows)
        w13 = fp8_columns(d).t() @ columns
        gradients["w1"][e], gradients["w3"][e] = w13.chunk(2)
        gradients["w2"][e] = fp8_columns(dyq[token]).t() @ fp8_columns(h * weight)

    def sent_home(partial: torch.Tensor, name: str) -> torch.Tensor:
        if ep_size == 1:
            name = "bf16"  # sums that are not sent anywhere are not quantized
        if name == "mxfp4":
            partial = partial.to(torch.bfloat16)
        return ROWS[name](partial).sum(0).to(torch.bfloat16).float()

    return {
        **result,
        **gradients,
        "output": sent_home(partial, recipe.combine_forward),
        "x": sent_home(partial_dx, recipe.dispatch_backward),
    }
