# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level without quantization: FP32 records and FP32 GEMMs in the places of the packed ones.

What is left is everything else: routing, the exchange, sums, autograd and what DeepSpeed does with the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_fp4.experts.records import RecordFormat
from ds_fp4.experts.weights import WeightCache, split_kinds, stacked
from ds_fp4.gemm import Groups
from ds_fp4.reference.activation import SwigluBackward, activate, activation_backward


class ExactRecords(RecordFormat):
    """Rows of FP32 values."""

    def __init__(self, like: RecordFormat) -> None:
        self.hidden = like.hidden
        self.front_bytes = self._data_bytes = 4 * like.hidden
        self.record_bytes = self.front_bytes + like.record_bytes - like.front_bytes
        self.tail_data_bytes = like.tail_data_bytes

    def rows(self, records: torch.Tensor) -> torch.Tensor:
        return records[:, : self.front_bytes].view(torch.float32)

    def encode(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        self.rows(records).copy_(x)
        return records

    def sum_into(self, rows: torch.Tensor, places: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        self.rows(records).copy_(_sums(rows, places))
        return records

    def sums(self, records: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        return _sums(self.rows(records), lists)

    def values(self, records: torch.Tensor) -> torch.Tensor:
        return self.rows(records)

    def gemm_rows(self, records: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sums(self.rows(records), order[:, None]), None

    def gemm_columns(self, records: torch.Tensor, order: torch.Tensor, padded_sizes: torch.Tensor, scale_layout: str):
        return self.gemm_rows(records, order)


def _sums(rows: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return padded[lists.to(torch.int64)].sum(1)  # -1 is the row of zeros


class ExactCompute:
    """FP32 in place of FP8; operands are (tensor, None), columns are rows."""

    column_scale_layout = "gemm"

    def __init__(self, spec, recomputes_gate_up: bool) -> None:
        self._activation = (spec.activation, spec.alpha, spec.limit)
        self.recomputes_gate_up = recomputes_gate_up

    @staticmethod
    def quantize_weights(weights: Sequence[torch.Tensor], operand: str) -> tuple[torch.Tensor, None]:
        w1, w2, w3 = (
            (kind if isinstance(kind, torch.Tensor) else torch.stack(list(kind))).detach().float()
            for kind in split_kinds(weights, stacked(weights))
        )
        weight = torch.cat([w1, w3], dim=1) if operand.startswith("w13") else w2
        return weight.transpose(1, 2) if operand.endswith("_t") else weight, None

    def gemm(self, a, b, groups: Groups) -> torch.Tensor:
        starts = groups.padded_offsets.tolist()
        parts = [a[0][starts[e] : starts[e + 1]] @ weight.t() for e, weight in enumerate(b[0])]
        return torch.cat(parts) if parts else a[0]

    def weight_gradient(self, a, b, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        starts = groups.padded_offsets.tolist()
        for e in range(len(groups.sizes)):
            rows = slice(starts[e], starts[e + 1])
            gradient = a[0][rows].t() @ b[0][rows]
            for out, part in zip(outs, gradient.split([o.shape[1] for o in outs]), strict=True):
                out[e] = part

    def activate(self, gate_up: torch.Tensor, weights: torch.Tensor):
        h = activate(*gate_up.chunk(2, dim=1), *self._activation) * weights[:, None]
        return (h, None), () if self.recomputes_gate_up else (gate_up,)

    def activate_backward(self, dh, weights, saved, group_sizes) -> SwigluBackward:
        gate, up = saved[0].chunk(2, dim=1)
        h, d_gate, d_up = activation_backward(gate, up, dh, weights[:, None], *self._activation)
        d = torch.cat([d_gate, d_up], dim=1)
        return SwigluBackward(d, None, d, None, h * weights[:, None], None, (dh * h).sum(1))


def make_exact(experts) -> None:
    """Put exact pieces into an `ExpertLayer`."""
    for leg in ("dispatch", "combine", "combine_backward", "dispatch_backward"):
        setattr(experts, leg, ExactRecords(getattr(experts, leg)))
    experts.compute = ExactCompute(experts.spec, experts.compute.recomputes_gate_up)
    experts.cache = WeightCache(True, experts.compute.quantize_weights)


def experts_of(engine) -> list:
    """The `ExpertLayer` of every layer at the expert level."""
    return [m.ds_fp4_experts for m in engine.module.modules() if "ds_fp4_experts" in m.__dict__]


def gradients_of(engine) -> dict[str, torch.Tensor | None]:
    """Every parameter's whole gradient, by name, in FP32."""
    from deepspeed.utils import safe_get_full_grad

    found = {}
    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter) if engine.zero_optimization() else parameter.grad
        found[name] = None if gradient is None else gradient.detach().float().clone()
    return found
