# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What rank 0 says once after start: which layers, which codec on each leg, what that saves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch.distributed as torch_dist

from ds_fp4.codec import make_codec
from ds_fp4.config import BLOCK, LEGS, LayerRecipe, expert_keys
from ds_fp4.experts import LayerSpec, record_formats
from ds_fp4.version import __version__

if TYPE_CHECKING:
    from ds_fp4.engine import Plan
    from ds_fp4.integrations.layers import MoELayer

_BF16_BYTES = 2


def leg_bytes(recipe: LayerRecipe, hidden: int, spec: LayerSpec | None = None) -> dict[str, int]:
    """Bytes of a row on each leg.

    Args:
        spec: of a layer at the expert level, whose records carry the routing too. Without one: the codec level's rows,
            and those of legs without a codec in BF16.
    """
    if spec is not None:
        return {leg: records.record_bytes for leg, records in record_formats(spec, recipe).items()}
    bytes_per_token = {}
    for leg in LEGS:
        codec = make_codec(getattr(recipe, leg), hidden, recipe.scale_rounding)
        bytes_per_token[leg] = _BF16_BYTES * hidden if codec is None else codec.record_bytes
    return bytes_per_token


def shorten(names: list[str]) -> str:
    """['model.layers.0.mlp', 'model.layers.1.mlp', 'head.moe'] -> 'model.layers.{0-1}.mlp, head.moe'."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        number = re.search(r"(?<![^.])\d+(?![^.])", name)
        key = (name[: number.start()], name[number.end() :]) if number else (name, "")
        groups.setdefault(key, []).extend([int(number.group())] if number else [])
    texts = []
    for (head, tail), numbers in groups.items():
        if len(numbers) < 2:
            texts.append(f"{head}{numbers[0] if numbers else ''}{tail}")
            continue
        spans: list[list[int]] = []
        for number in sorted(numbers):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        inside = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        texts.append(f"{head}{{{inside}}}{tail}")
    return ", ".join(texts)


def _level(plan: Plan, layer: MoELayer, recipe: LayerRecipe) -> str:
    """Who computes a layer's experts."""
    if layer.name not in plan.gemms:
        return "experts computed by DeepSpeed (codec level)"
    gemms = plan.gemms[layer.name]
    names = " and ".join(dict.fromkeys([gemms.forward.name, gemms.weight_gradient.name]))
    kept = "recomputed from the tokens" if recipe.recompute == "fc1" else f"kept in {recipe.saved_activations}"
    return f"experts computed in FP8 by {names} (expert level), gate and up projections {kept}"


def _checkpoints_layers(plan: Plan) -> bool:
    """Whether what is checkpointed are whole layers, or with `scope: []` whatever the model does by itself."""
    return plan.config.checkpointing.scope in ("layers", []) or any(
        layer.name.startswith(f"{name}.") for name in plan.checkpointed for layer in plan.layers
    )


def _without_effect(plan: Plan) -> dict[str, str]:
    """Keys of `experts` that change nothing in any layer they are for, by full path, and why."""
    idle: dict[str, str] = {}
    effective = set()
    for layer in plan.layers:
        recipe = plan.recipes[layer.name]
        for key, path in expert_keys(plan.config, layer.name).items():
            if key != "compute" and layer.name not in plan.gemms:
                idle.setdefault(path, "experts that it is for are not computed in FP8")
            elif key == "saved_activations" and recipe.recompute == "fc1":
                idle.setdefault(path, 'with experts.recompute "fc1" gate and up are not kept')
            else:
                effective.add(path)
    return {path: why for path, why in idle.items() if path not in effective}


def summary_lines(plan: Plan) -> list[str]:
    """The summary, a line an item."""
    changed = [layer for layer in plan.layers if layer in plan.compressed or layer in plan.expert_level]
    what = (
        f"MXFP4/FP8 in {len(changed)} of {len(plan.layers)} MoE layers, recipe {plan.config.recipe}"
        if plan.layers
        else "no MoE layer in this part of the model, so nothing but checkpointing"
    )
    lines = [f"{BLOCK} {__version__}: {what}"]
    kinds: dict[tuple[LayerRecipe, int, int, str, str, LayerSpec | None], list[str]] = {}
    for layer in changed:
        recipe = plan.recipes[layer.name]
        spec = layer.expert_level.spec(layer.module) if layer.name in plan.gemms else None
        kind = (recipe, layer.hidden, layer.ep_size, layer.implementation, _level(plan, layer, recipe), spec)
        kinds.setdefault(kind, []).append(layer.name)
    for (recipe, hidden, ep_size, implementation, level, spec), names in kinds.items():
        lines.append(
            f"  {shorten(names)}: {implementation}, hidden {hidden}, expert-parallel size {ep_size}, "
            f"scale rounding {recipe.scale_rounding}, {level}"
        )
        if ep_size == 1:
            continue
        unit = "routed token" if spec is None else "token and rank"
        sizes = leg_bytes(recipe, hidden, spec)
        for direction, legs in (("forward", LEGS[:2]), ("backward", LEGS[2:])):
            total, bf16 = sum(sizes[leg] for leg in legs), 2 * _BF16_BYTES * hidden
            detail = " + ".join(f"{leg} {getattr(recipe, leg)} {sizes[leg]}" for leg in legs)
            lines.append(f"    {direction}: {detail} = {total} bytes per {unit}, {total / bf16:.2f}x of BF16's {bf16}")
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.not_at_expert_level.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"  not computed in FP8: {shorten(names)}: {reason}")
    lines += [f"  no effect: {path}: {why}" for path, why in _without_effect(plan).items()]
    untouched = [layer.name for layer in plan.layers if layer not in changed]
    if untouched:
        lines.append(f"  as DeepSpeed does it: {shorten(untouched)}")
    checkpointing = plan.config.checkpointing
    if checkpointing.enabled:
        lines.append(
            f"  checkpointed, inputs kept in {checkpointing.format}"
            f"{' in host memory' if checkpointing.offload == 'cpu' else ''}, "
            f"forward on {'the same' if checkpointing.exact else 'the original'} values: "
            f"{shorten(list(plan.checkpointed)) or 'no module by name'}"
        )
        if checkpointing.format == "mxfp4" and checkpointing.exact and _checkpoints_layers(plan):
            lines.append(
                "    this rounds every layer's input in the forward pass too, which moved the loss by over 0.61 %: "
                'set checkpointing.exact to false or its format to "fp8" where the loss counts (docs/checkpointing.md)'
            )
    return lines


def log_summary(plan: Plan) -> None:
    """Print the summary on rank 0."""
    # Not through DeepSpeed's logger, which shows warnings only unless told otherwise.
    if not torch_dist.is_initialized() or torch_dist.get_rank() == 0:
        print("\n".join(summary_lines(plan)), flush=True)
