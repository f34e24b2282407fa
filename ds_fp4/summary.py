# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What rank 0 says once after start: which layers, which codec on each leg, what that saves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch.distributed as torch_dist

from ds_fp4.codec import make_codec
from ds_fp4.config import BLOCK, LEGS, LayerRecipe
from ds_fp4.version import __version__

if TYPE_CHECKING:
    from ds_fp4.engine import Plan

_BF16_BYTES = 2


def leg_bytes(recipe: LayerRecipe, hidden: int) -> dict[str, int]:
    """Bytes that one routed token takes on each leg; legs without a codec are counted as BF16."""
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


def summary_lines(plan: Plan) -> list[str]:
    """The summary, a line an item."""
    what = (
        f"MXFP4/FP8 all-to-all in {len(plan.compressed)} of {len(plan.layers)} MoE layers, recipe {plan.config.recipe}"
        if plan.layers
        else "no MoE layer in this part of the model, so nothing but checkpointing"
    )
    lines = [f"{BLOCK} {__version__}: {what}"]
    kinds: dict[tuple[LayerRecipe, int, int, str], list[str]] = {}
    for layer in plan.compressed:
        kinds.setdefault((plan.recipes[layer.name], layer.hidden, layer.ep_size, layer.implementation), []).append(
            layer.name
        )
    for (recipe, hidden, ep_size, implementation), names in kinds.items():
        lines.append(
            f"  {shorten(names)}: {implementation}, hidden {hidden}, expert-parallel size {ep_size}, "
            f"scale rounding {recipe.scale_rounding}, experts computed by DeepSpeed (codec level)"
        )
        sizes = leg_bytes(recipe, hidden)
        for direction, legs in (("forward", LEGS[:2]), ("backward", LEGS[2:])):
            total, bf16 = sum(sizes[leg] for leg in legs), 2 * _BF16_BYTES * hidden
            detail = " + ".join(f"{leg} {getattr(recipe, leg)} {sizes[leg]}" for leg in legs)
            lines.append(
                f"    {direction}: {detail} = {total} bytes per routed token, {total / bf16:.2f}x of BF16's {bf16}"
            )
    untouched = [layer.name for layer in plan.layers if layer not in plan.compressed]
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
    return lines


def log_summary(plan: Plan) -> None:
    """Print the summary on rank 0."""
    # Not through DeepSpeed's logger, which shows warnings only unless told otherwise.
    if not torch_dist.is_initialized() or torch_dist.get_rank() == 0:
        print("\n".join(summary_lines(plan)), flush=True)
