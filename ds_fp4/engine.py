# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The hook on DeepSpeed's engine that `import ds_fp4` installs.

`DeepSpeedEngine._configure_distributed_model` is the one place that every way of building an engine passes through
(`deepspeed.initialize` however it was imported, Accelerate, the Hugging Face Trainer), where AutoEP's layers are
already in and the optimizer is still to come. Around it:

    before   plan: validate the block, find the layers, load the kernels; agree with all ranks  (nothing sent yet)
    DeepSpeed's own method
    after    apply: swap the layers' classes; rank 0 prints the summary
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ds_fp4 import compat, gemm
from ds_fp4.all_to_all import make_legs
from ds_fp4.config import (
    BLOCK,
    ConfigError,
    DsFp4Config,
    LayerRecipe,
    ResolvedConfig,
    asks_for_fp8_experts,
    flatten,
    has_block,
    parse_block,
)
from ds_fp4.experts import weights_changed
from ds_fp4.integrations import autoep, checkpointing, classic, expert_level
from ds_fp4.integrations.layers import MoELayer
from ds_fp4.integrations.seam import SeamError, restore_class, swap_class
from ds_fp4.startup import Announcement, agree
from ds_fp4.summary import log_summary, shorten
from ds_fp4.version import __version__

_HOOKED = "_configure_distributed_model"
# After each of these the expert weights may be others: the optimizer's step, and what loads weights.
_CHANGE_WEIGHTS = ("_take_model_step", "load_checkpoint", "load_module_state_dict")


@dataclass
class Plan:
    """What ds_fp4 is going to do to one engine.

    Attributes:
        recipes: by layer name.
        gemms: the GEMM libraries of each layer at the expert level, by name.
        not_at_expert_level: why, by name, for layers whose recipe computes in FP8 and that stay at the codec level.
        checkpointed: by module name.
    """

    config: DsFp4Config
    layers: list[MoELayer]
    recipes: dict[str, LayerRecipe]
    gemms: dict[str, gemm.GemmBackends] = field(default_factory=dict)
    not_at_expert_level: dict[str, str] = field(default_factory=dict)
    checkpointed: dict[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def expert_level(self) -> list[MoELayer]:
        """The layers whose experts ds_fp4 computes."""
        return [layer for layer in self.layers if layer.name in self.gemms]

    @property
    def compressed(self) -> list[MoELayer]:
        """The layers at the codec level: only their traffic changes."""
        return [
            layer
            for layer in self.layers
            if layer.ep_size > 1 and self.recipes[layer.name].changes_all_to_all and layer.name not in self.gemms
        ]


def install() -> None:
    """Wrap the engine's method, once per process."""
    original = getattr(DeepSpeedEngine, _HOOKED)
    if getattr(original, "_ds_fp4_hook", False):
        return

    @functools.wraps(original)
    def configure_distributed_model(self: DeepSpeedEngine, model: torch.nn.Module) -> Any:
        plan = _plan_with_all_ranks(self, model)
        result = original(self, model)
        # The model may come from an earlier engine that had another block.
        checkpointing.remove(model)
        for layer in find_layers(model):
            expert_level.restore(layer.module)
            restore_class(layer.module)
        if plan is not None:
            apply(plan, model)
            log_summary(plan)
        return result

    configure_distributed_model._ds_fp4_hook = True
    setattr(DeepSpeedEngine, _HOOKED, configure_distributed_model)
    for name in _CHANGE_WEIGHTS:
        if hasattr(DeepSpeedEngine, name):
            setattr(DeepSpeedEngine, name, _ending_an_epoch(getattr(DeepSpeedEngine, name)))


def _check_epochs() -> None:
    """Raise SeamError if a method that changes weights is not hooked: FP8 copies of them would go stale unnoticed."""
    for name in _CHANGE_WEIGHTS:
        if not getattr(getattr(DeepSpeedEngine, name, None), "_ds_fp4_hook", False):
            raise SeamError(
                f"DeepSpeed {deepspeed.__version__}: DeepSpeedEngine.{name}, after which FP8 weights are made anew, "
                f'is not there or was replaced. Install a tested release, or set {BLOCK}.experts.compute to "bf16".'
            )


def _ending_an_epoch(method: Callable) -> Callable:
    @functools.wraps(method)
    def changes_weights(*args: Any, **kwargs: Any) -> Any:
        weights_changed()  # frees the copies before the optimizer needs memory
        try:
            return method(*args, **kwargs)
        finally:
            weights_changed()

    changes_weights._ds_fp4_hook = True
    return changes_weights


def _plan_with_all_ranks(engine: DeepSpeedEngine, model: torch.nn.Module) -> Plan | None:
    announcement = Announcement(version=__version__)
    plan = None
    cause = None
    try:
        plan = make_plan(engine._config._param_dict, model, engine.device, announcement, engine.mpu)
    except Exception as error:
        cause = error
        announcement.error = f"{type(error).__name__}: {error}"
    try:
        agree(announcement)
    except Exception as error:
        raise error from cause
    return plan


def make_plan(
    ds_config: dict, model: torch.nn.Module, device: torch.device, announcement: Announcement, mpu: Any = None
) -> Plan | None:
    """Validate everything that can be before anything is sent; None if ds_fp4 is not enabled.

    Args:
        ds_config: the whole DeepSpeed configuration.
        model: with AutoEP's layers already in place.
        device: where the model will train.
        announcement: filled in with what the other ranks have to know, as far as it is known when an error is raised.
        mpu: the engine's description of tensor and pipeline parallelism, if it has one.

    Raises ConfigError for the block, RuntimeError for versions and kernels.
    """
    if not has_block(ds_config):
        return None
    config = parse_block(ds_config[BLOCK])
    announcement.block = flatten(config)
    if not config.enabled:
        return None
    announcement.moe_requests = config.moe_requests
    compat.check_deepspeed()
    layers = find_layers(model, mpu)
    announcement.moe_layers = len(layers)
    if any(layer.implementation == "AutoEP" for layer in layers):
        compat.check_transformers()
    resolved = ResolvedConfig(config, [layer.name for layer in layers])
    announcement.idle_patterns |= resolved.idle
    plan = Plan(config, layers, resolved.recipes)
    _plan_expert_level(plan, device, announcement)
    if config.checkpointing.enabled:
        own_saving = {layer.name for layer in plan.expert_level}
        scope = config.checkpointing.scope
        plan.checkpointed = checkpointing.find_targets(model, layers, scope, own_saving)
        announcement.idle_patterns |= checkpointing.idle_patterns(model, scope)
    _refuse_what_cannot_work(plan, ds_config)
    if plan.compressed:
        classic.install()
        autoep.install()
    if (plan.compressed or plan.expert_level or config.checkpointing.enabled) and device.type == "cuda":
        from ds_fp4 import ops

        ops.load_kernels(device)
    return plan


def _plan_expert_level(plan: Plan, device: torch.device, announcement: Announcement) -> None:
    """Which layers' experts are computed in FP8, by which libraries.

    Raises ConfigError where a layer that cannot be was asked for by name and not by a preset.
    """
    faults: dict[tuple[str, str], list[str]] = {}
    for layer in plan.layers:
        recipe = plan.recipes[layer.name]
        if recipe.compute != "fp8":
            continue
        asked = asks_for_fp8_experts(plan.config, layer.name)
        obstacle = layer.expert_obstacle
        gemms = None
        if obstacle is None:
            try:
                gemms = gemm.choose(recipe.gemm, recipe.wgrad_gemm, device)
            except RuntimeError as error:
                obstacle, asked = str(error), asked or (recipe.gemm, recipe.wgrad_gemm) != ("auto", "auto")
        announcement.experts_by[layer.name] = "DeepSpeed" if gemms is None else [backend.name for backend in gemms]
        if gemms is not None:
            plan.gemms[layer.name] = gemms
        elif asked:
            faults.setdefault((layer.implementation, obstacle), []).append(layer.name)
        else:
            plan.not_at_expert_level[layer.name] = obstacle
    if faults:
        lines = [
            f"{BLOCK}.experts.compute = 'fp8': {shorten(names)} ({implementation}) cannot be computed in FP8: "
            f'{obstacle}. Set experts.compute to "bf16" there, in the block or in {BLOCK}.layers'
            for (implementation, obstacle), names in faults.items()
        ]
        raise ConfigError("\n".join(lines))
    if plan.gemms:
        _check_epochs()
    for level in {layer.expert_level for layer in plan.expert_level}:
        level.check_seam()


def find_layers(model: torch.nn.Module, mpu: Any = None) -> list[MoELayer]:
    """Every MoE layer of the model; `mpu` as in `make_plan`."""
    return [*classic.find(model, mpu), *autoep.find(model)]


def _refuse_what_cannot_work(plan: Plan, ds_config: dict) -> None:
    if plan.config.checkpointing.enabled:
        checkpointing.refuse_deepspeed_features(ds_config)
    faults: dict[tuple[str, str], list[str]] = {}
    for layer in plan.compressed:
        if layer.obstacle:
            faults.setdefault((layer.implementation, layer.obstacle), []).append(layer.name)
    if faults:
        lines = [f"{shorten(names)} ({kind}): {obstacle}" for (kind, obstacle), names in faults.items()]
        raise ConfigError("\n".join(lines))
    if (plan.compressed or plan.expert_level) and ds_config.get("compile", {}).get("deepcompile"):
        raise ConfigError(
            "compile.deepcompile = True: DeepCompile traces through the MoE layers, whose codecs cannot be "
            f'traced. Set compile.deepcompile to false, or {BLOCK}.recipe to "bf16"'
        )


def apply(plan: Plan, model: torch.nn.Module) -> None:
    """Swap the classes of the layers that change and of the modules that are checkpointed."""
    for layer in plan.expert_level:
        layer.expert_level.take_over(layer.module, plan.recipes[layer.name], plan.gemms[layer.name])
    for layer in plan.compressed:
        swap_class(layer.module, layer.name, make_legs(plan.recipes[layer.name], layer.hidden))
    if plan.config.checkpointing.enabled:
        options = checkpointing.options_of(plan.config.checkpointing, plan.config.scale_rounding)
        checkpointing.install(model, plan.checkpointed, options)
    if (
        not plan.compressed
        and not plan.expert_level
        and any(recipe.changes_all_to_all for recipe in plan.recipes.values())
    ):
        logger.warning(
            f"{BLOCK}: every MoE layer has expert-parallel size 1, so nothing is sent and no codec is used. Set "
            "ep_size (deepspeed.moe.layer.MoE) or expert_parallel.autoep_size above 1 to send tokens in MXFP4."
        )
