# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The `ds_fp4` block of a DeepSpeed JSON: its keys, its presets, and what each layer ends up with.

A preset (`recipe`) stands for all other keys; every key may be overridden alone. What a layer uses is therefore never
read from the block directly but from the `LayerRecipe` that `DsFp4Config.layer_recipe` resolves.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, BeforeValidator, StrictBool, ValidationError
from pydantic_core import PydanticCustomError

BLOCK = "ds_fp4"

CodecName = Literal["bf16", "fp8", "mxfp4"]
RecipeName = Literal["bf16", "fp8", "mxfp4"]
GemmName = Literal["auto", "deepgemm", "cublas", "emulation"]
ScaleRounding = Literal["floor", "rceil", "ceil", "even"]
# Keys for which "auto" is a value of their own.
_AUTO_KEYS = ("gemm", "wgrad_gemm")
LEGS = ("dispatch_forward", "combine_forward", "combine_backward", "dispatch_backward")


class ConfigError(ValueError):
    """The `ds_fp4` block is invalid. Each line of the message names one key with its full path."""


class _Block(DeepSpeedConfigModel):
    def __init__(self, **data: Any) -> None:
        # DeepSpeed's own __init__ drops "auto" values and swallows a key called "strict"; here both are errors.
        BaseModel.__init__(self, **data)


class AllToAllConfig(_Block):
    """Codec of each leg of the expert-parallel all-to-all; an absent key follows the recipe."""

    dispatch_forward: CodecName | None = None
    combine_forward: CodecName | None = None
    combine_backward: CodecName | None = None
    dispatch_backward: CodecName | None = None


class ExpertsConfig(_Block):
    """How the experts compute and what they keep for backward; an absent key follows the recipe."""

    compute: Literal["bf16", "fp8"] | None = None
    saved_activations: CodecName | None = None
    recompute: Literal["activation", "fc1"] | None = None
    gemm: GemmName | None = None
    wgrad_gemm: GemmName | None = None
    weight_cache: Literal["step", "none"] | None = None


def _check_scope(value: Any) -> Any:
    patterns = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    if value not in ("experts", "layers") and not patterns:
        raise PydanticCustomError(
            "scope", 'allowed values are "experts", "layers" or a list of patterns of module names'
        )
    return value


class CheckpointingConfig(_Block):
    """Activation checkpointing that keeps packed inputs."""

    enabled: StrictBool = False
    format: Literal["fp8", "mxfp4"] = "fp8"
    exact: StrictBool = True
    scope: Annotated[str | list[str], BeforeValidator(_check_scope)] = "layers"
    offload: Literal["none", "cpu"] = "none"


class LayerOverride(_Block):
    """What differs in the layers whose module name matches a pattern of `layers`."""

    recipe: RecipeName | None = None
    scale_rounding: ScaleRounding | None = None
    all_to_all: AllToAllConfig = AllToAllConfig()
    experts: ExpertsConfig = ExpertsConfig()


def _recipe_name_as_override(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else value


class DsFp4Config(_Block):
    """The whole block. `enabled` has no default: a block that forgot it would otherwise train unchanged, silently."""

    enabled: StrictBool
    recipe: RecipeName = "mxfp4"
    scale_rounding: ScaleRounding = "even"
    all_to_all: AllToAllConfig = AllToAllConfig()
    experts: ExpertsConfig = ExpertsConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    layers: dict[str, Annotated[LayerOverride, BeforeValidator(_recipe_name_as_override)]] = {}

    @property
    def moe_requests(self) -> list[str]:
        """The keys by which the block itself, not a default, asks for something that only MoE layers can do."""
        nothing = {"recipe": "bf16", "all_to_all": AllToAllConfig(), "experts": ExpertsConfig(), "layers": {}}
        keys = [key for key in nothing if key in self.model_fields_set and getattr(self, key) != nothing[key]]
        return [f"{BLOCK}.{key}" for key in keys]


@dataclass(frozen=True)
class LayerRecipe:
    """Everything one MoE layer needs to know, presets expanded."""

    dispatch_forward: CodecName
    combine_forward: CodecName
    combine_backward: CodecName
    dispatch_backward: CodecName
    scale_rounding: ScaleRounding
    compute: str
    saved_activations: str
    recompute: str
    gemm: str = "auto"
    wgrad_gemm: str = "auto"
    weight_cache: str = "none"

    @property
    def changes_all_to_all(self) -> bool:
        """Whether any leg differs from what DeepSpeed sends by itself."""
        return any(getattr(self, leg) != "bf16" for leg in LEGS)


def _preset(dispatch: str, combine: str, backward: str, compute: str, saved: str) -> dict[str, str]:
    return dict(
        dispatch_forward=dispatch,
        combine_forward=combine,
        combine_backward=backward,
        dispatch_backward=backward,
        compute=compute,
        saved_activations=saved,
        recompute="activation",
    )


# bf16 is DeepSpeed untouched, fp8 the strong baseline, mxfp4 the asymmetric recipe of arXiv 2603.02731 but for two
# things (docs/results.md): FP4 on the combine leg costs as much loss again as on the dispatch leg; gate_up kept in FP8
# gives a loss 0.58 % above BF16's in place of 0.61 %, at the same speed.
PRESETS: dict[str, dict[str, str]] = {
    "bf16": _preset("bf16", "bf16", "bf16", "bf16", "bf16"),
    "fp8": _preset("fp8", "fp8", "fp8", "fp8", "fp8"),
    "mxfp4": _preset("mxfp4", "fp8", "fp8", "fp8", "fp8"),
}


def _set_keys(block: AllToAllConfig | ExpertsConfig) -> dict[str, str]:
    return {key: value for key, value in block.model_dump().items() if value is not None}


def has_block(ds_config: dict) -> bool:
    """Whether the DeepSpeed configuration has a `ds_fp4` key.

    Raises `ConfigError` for a key that differs from it in case and punctuation only, which DeepSpeed would ignore.
    """
    for key in ds_config:
        if key != BLOCK and re.sub(r"[^a-z0-9]", "", str(key).lower()) == "dsfp4":
            raise ConfigError(f'{key}: unknown key; did you mean "{BLOCK}"?')
    return BLOCK in ds_config


def parse_block(block: Any) -> DsFp4Config:
    """Validate the raw value of the `ds_fp4` key.

    Raises `ConfigError` with one line per fault: the key's full path, the value found and the values allowed.
    """
    if not isinstance(block, dict):
        raise ConfigError(f'{BLOCK} = {block!r}: expected an object such as {{"enabled": true, "recipe": "mxfp4"}}')
    faults = list(_faults_before_pydantic(block, BLOCK))
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        return DsFp4Config.model_validate(block)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None


def _faults_before_pydantic(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{path}: the key {key!r} is not a string"
            else:
                yield from _faults_before_pydantic(item, f"{path}.{key}")
    elif value == "auto" and path.rsplit(".", 1)[-1] not in _AUTO_KEYS:
        yield f'{path} = "auto": nothing fills in "auto" here; give a value or leave the key out'


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for fault in error.errors():
        location = [str(part) for part in fault["loc"]]
        path = ".".join([BLOCK, *location])
        kind = fault["type"]
        if kind == "extra_forbidden":
            allowed = _allowed_keys(location[:-1])
            close = difflib.get_close_matches(location[-1], allowed, 1)
            hint = f' Did you mean "{close[0]}"?' if close else ""
            lines.append(f"{path}: unknown key; allowed keys here: {', '.join(allowed)}.{hint}")
        elif kind == "missing":
            lines.append(f"{path}: missing; set it to true or false")
        elif kind == "literal_error":
            lines.append(f"{path} = {fault['input']!r}: allowed values are {fault['ctx']['expected']}")
        elif kind in ("model_type", "dict_type", "model_attributes_type"):
            lines.append(f"{path} = {fault['input']!r}: expected an object")
        elif kind.startswith("bool"):
            lines.append(f"{path} = {fault['input']!r}: expected true or false")
        else:
            lines.append(f"{path} = {fault['input']!r}: {fault['msg']}")
    return lines


def _allowed_keys(location: list[str]) -> list[str]:
    model: Any = DsFp4Config
    for part in location:
        if model is DsFp4Config and part == "layers":
            model = dict
        elif model is dict:
            model = LayerOverride
        else:
            model = model.model_fields[part].annotation
    return list(model.model_fields)


class ResolvedConfig:
    """A validated block bound to the names of the model's MoE layers.

    Args:
        config: the validated block.
        layer_names: module names of every MoE layer, in the model's order; with pipeline parallelism of this stage.

    Attributes:
        recipes: by layer name.
        idle: for patterns in `layers` that decide for none of these layers, their keys' full paths and why: they match
            none, or earlier patterns come first wherever they do. A fault, unless they decide for a layer of another
            pipeline stage.
    """

    def __init__(self, config: DsFp4Config, layer_names: list[str]) -> None:
        self.config = config
        self.recipes = {name: layer_recipe(config, name) for name in layer_names}
        self.idle: dict[str, str] = {}
        deciding = {_first_match(config, name) for name in layer_names}
        for pattern in config.layers:
            if pattern in deciding:
                continue
            matched = [name for name in layer_names if fnmatch.fnmatchcase(name, pattern)]
            if not matched:
                self.idle[f"{BLOCK}.layers.{pattern}"] = (
                    f"matches none of the model's MoE layers: {', '.join(layer_names)}"
                )
                continue
            earlier = dict.fromkeys(f'"{_first_match(config, name)}"' for name in matched)
            self.idle[f"{BLOCK}.layers.{pattern}"] = (
                f"has no effect, because {', '.join(earlier)} above it matches the same layers and the first match "
                "decides. Put the narrower pattern first"
            )


def _first_match(config: DsFp4Config, name: str) -> str | None:
    """The pattern in `layers` that decides for the MoE layer called `name`."""
    return next((pattern for pattern in config.layers if fnmatch.fnmatchcase(name, pattern)), None)


def layer_recipe(config: DsFp4Config, name: str) -> LayerRecipe:
    """The recipe of the MoE layer called `name`: the block's, or that of the first matching pattern in `layers`."""
    keys = {**PRESETS[config.recipe], **_set_keys(config.all_to_all), **_set_keys(config.experts)}
    rounding = config.scale_rounding
    pattern = _first_match(config, name)
    if pattern is not None:
        override = config.layers[pattern]
        # Another recipe starts afresh: keys that were set for the block's recipe say nothing about this one.
        if override.recipe is not None:
            keys = dict(PRESETS[override.recipe])
        keys.update(_set_keys(override.all_to_all), **_set_keys(override.experts))
        rounding = override.scale_rounding or rounding
    return LayerRecipe(scale_rounding=rounding, **keys)


def expert_keys(config: DsFp4Config, name: str) -> dict[str, str]:
    """The keys of `experts` that the block, not a preset, sets for the MoE layer called `name`; their full paths."""
    paths = {key: f"{BLOCK}.experts.{key}" for key in _set_keys(config.experts)}
    pattern = _first_match(config, name)
    if pattern is not None:
        override = config.layers[pattern]
        if override.recipe is not None:
            paths = {}
        paths |= {key: f"{BLOCK}.layers.{pattern}.experts.{key}" for key in _set_keys(override.experts)}
    return paths


def asks_for_fp8_experts(config: DsFp4Config, name: str) -> bool:
    """Whether `experts.compute` of the MoE layer called `name` is "fp8" because the block says so, not its preset."""
    pattern = _first_match(config, name)
    override = config.layers[pattern] if pattern is not None else None
    if override is not None and (override.experts.compute is not None or override.recipe is not None):
        return override.experts.compute == "fp8"
    return config.experts.compute == "fp8"


def flatten(config: DsFp4Config) -> dict[str, str]:
    """Full key path -> value of everything the ranks must agree on, presets expanded."""
    flat = {f"{BLOCK}.enabled": config.enabled}
    if not config.enabled:
        return flat
    flat[f"{BLOCK}.recipe"] = config.recipe
    everywhere = asdict(layer_recipe(config.model_copy(update={"layers": {}}), ""))
    for key, value in everywhere.items():
        section = "all_to_all." if key in LEGS else "" if key == "scale_rounding" else "experts."
        flat[f"{BLOCK}.{section}{key}"] = value
    for key, value in config.checkpointing.model_dump().items():
        flat[f"{BLOCK}.checkpointing.{key}"] = value
    for pattern, override in config.layers.items():
        flat[f"{BLOCK}.layers.{pattern}"] = override.model_dump(exclude_none=True)
    # The order of patterns matters (the first match wins).
    if config.layers:
        flat[f"{BLOCK}.layers"] = list(config.layers)
    return flat
