# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench kernels`: expert weights and their gradients."""

from __future__ import annotations

import torch

from ds_fp4 import ops
from ds_fp4.bench import peers
from ds_fp4.bench.case import Case, nbytes

# Experts of a rank, intermediate and hidden size.
WEIGHTS = {
    "DeepSeek-V3": (32, 2048, 7168),
    "Qwen3-235B": (32, 1536, 4096),
    "Mixtral": (4, 14336, 4096),
}
# By the case's name, what is made: both from one read, or one alone.
_ORIENTATIONS = {
    "weight_to_fp8": "both",
    "weight_to_fp8 rows": "rows",
    "weight_to_fp8 transposed": "transposed",
}


def _weight_case(device: torch.device, experts: int, rows: int, k: int, joined: bool, orientation: str = "both"):
    parts = [torch.randn(experts, rows, k, device=device, dtype=torch.bfloat16) for _ in range(1 + joined)]
    out = ops.weight_to_fp8(*parts, orientation=orientation)
    aligned = rows % 128 == 0 and k % 128 == 0
    peer = peers.quantize_weights(torch.cat(parts, dim=1), orientation) if aligned else None
    moved = nbytes(*parts, *out)
    return lambda: ops.weight_to_fp8(*parts, orientation=orientation, out=out), moved, peer


def _gradient_case(device: torch.device, experts: int, rows: int, k: int):
    gradient = torch.randn(experts, 2 * rows, k, device=device)
    out = ops.split_weight_gradient(gradient)

    def peer():
        return gradient[:, :rows].to(torch.bfloat16), gradient[:, rows:].to(torch.bfloat16)

    return lambda: ops.split_weight_gradient(gradient, out=out), nbytes(gradient, *out), peer


def _cases() -> list[Case]:
    cases = []
    for model, (e, i, h) in WEIGHTS.items():
        joined, down = f"[{e}, {i} + {i}, {h}] {model} gate, up", f"[{e}, {h}, {i}] {model} down"
        for name, o in _ORIENTATIONS.items():
            cases.append(Case(name, joined, lambda d, e=e, i=i, h=h, o=o: _weight_case(d, e, i, h, True, o)))
            cases.append(Case(name, down, lambda d, e=e, i=i, h=h, o=o: _weight_case(d, e, h, i, False, o)))
        cases.append(Case("split_weight_gradient", joined, lambda d, e=e, i=i, h=h: _gradient_case(d, e, i, h)))
    for name, o in _ORIENTATIONS.items():
        cases.append(Case(name, "[2, 128, 512] small", lambda d, o=o: _weight_case(d, 2, 128, 512, False, o)))
    cases.append(Case("split_weight_gradient", "[2, 128, 512] small", lambda d: _gradient_case(d, 2, 64, 512)))
    return sorted(cases, key=lambda case: case.name)


CASES = _cases()
