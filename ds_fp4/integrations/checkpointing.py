# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.checkpointing` of the JSON block: which modules are checkpointed, and who else checkpoints through ds_fp4.

    modules in `scope`                       their class is swapped for a subclass whose call is checkpointed
    model.gradient_checkpointing_enable()    the function that transformers gives its layers is replaced
    deepspeed.checkpointing.checkpoint       its autograd function is replaced by a shim, which is DeepSpeed's own
                                             but in the forward of a model whose engine asked for packed inputs

Class swapping leaves parameters, their names, hooks and checkpoints as they are (as `seam` does for codecs). A
module's call is what is recomputed, not its forward: ZeRO-3 gathers parameters in hooks.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from deepspeed.utils import logger

from ds_fp4.checkpointing import TORCH_OPTIONS, CheckpointOptions, redirecting, redirection
from ds_fp4.config import BLOCK, CheckpointingConfig, ConfigError
from ds_fp4.integrations import classic
from ds_fp4.integrations.layers import MoELayer
from ds_fp4.integrations.seam import SeamError

_INSTALLED = "_ds_fp4_checkpointing"
_HF_FUNCTION = "_gradient_checkpointing_func"
# Of DeepSpeed's `activation_checkpointing` block, and the names of the module's switches that they set.
_DEEPSPEED_FEATURES = {
    "partition_activations": "PARTITION_ACTIVATIONS",
    "contiguous_memory_optimization": "CONTIGUOUS_CHECKPOINTING",
    "cpu_checkpointing": "CPU_CHECKPOINT",
}
_INSTEAD = {"cpu_checkpointing": f'{BLOCK}.checkpointing.offload = "cpu" does that for packed activations'}


def options_of(config: CheckpointingConfig, scale_rounding: str) -> CheckpointOptions:
    """What the block says about keeping inputs."""
    return CheckpointOptions(config.format, config.exact, config.offload, scale_rounding)


# --- which modules ---


def find_targets(
    model: torch.nn.Module, layers: list[MoELayer], scope: str | list[str], own_saving: Collection[str] = ()
) -> dict[str, torch.nn.Module]:
    """The modules to checkpoint, by name, in the model's order.

    Args:
        model: the whole model.
        layers: its MoE layers.
        scope: "experts" for the module that computes each MoE layer's experts; "layers" for every member of the
            ModuleList (of the Sequential, where there is none) that holds a MoE layer, the dense ones among them too;
            or patterns of module names, none of them for what the model checkpoints by itself only. A module inside
            another that is checkpointed is not checkpointed again.
        own_saving: names of the layers whose experts pack what they save by themselves: "experts" leaves them out, so
            that no second copy is kept.

    Raises ConfigError for a MoE layer outside of any module list. Patterns that match nothing: `idle_patterns`.
    """
    modules = _callable_modules(model)
    if scope == "experts":
        names = {module: name for name, module in modules.items()}
        return {names[layer.experts]: layer.experts for layer in layers if layer.name not in own_saving}
    if scope == "layers":
        wanted = _layer_names(model, layers)
    else:
        wanted = {name for name in modules if any(fnmatch.fnmatchcase(name, pattern) for pattern in scope)}
    return {
        name: module
        for name, module in modules.items()
        if name in wanted and not any(parent in wanted for parent in _parents(name))
    }


def idle_patterns(model: torch.nn.Module, scope: str | list[str]) -> dict[str, str]:
    """For patterns in `scope` that match no module: the key and the pattern, and why. In another pipeline stage they
    may."""
    modules, idle = _callable_modules(model), {}
    for pattern in scope if isinstance(scope, list) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in modules):
            close = difflib.get_close_matches(pattern, modules, 3, 0.4)
            idle[f"{BLOCK}.checkpointing.scope: {pattern}"] = "matches no module" + (
                f". Similar names: {', '.join(close)}" if close else ""
            )
    return idle


def _callable_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if name and _can_be_called(module)}


def _can_be_called(module: torch.nn.Module) -> bool:
    return not isinstance(
        module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    )


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _layer_names(model: torch.nn.Module, layers: list[MoELayer]) -> set[str]:
    by_name = dict(model.named_modules())
    holders = set()
    for layer in layers:
        around = [*_parents(layer.name), ""]
        # The innermost ModuleList (a model may be stages of layers), the outermost Sequential (a layer may be
        # built of smaller ones).
        lists = [name for name in around if isinstance(by_name[name], torch.nn.ModuleList)]
        sequences = [name for name in around if isinstance(by_name[name], torch.nn.Sequential)]
        if not lists and not sequences:
            raise ConfigError(
                f'{BLOCK}.checkpointing.scope = "layers": {layer.name} is not inside a ModuleList or Sequential, so '
                "which modules are layers is unknown; give a list of patterns of module names"
            )
        holders.add(lists[0] if lists else sequences[-1])
    return {f"{holder}.{child}".lstrip(".") for holder in holders for child, _ in by_name[holder].named_children()}


# --- modules whose call is checkpointed ---


class CheckpointedModule:
    """Mixin of the swapped classes. Instances carry `ds_fp4_checkpoint_options`."""

    ds_fp4_checkpoint_options: CheckpointOptions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        # In eval there is no backward. Where transformers' own switch is on, that checkpoints (through ds_fp4, see
        # `_Redirected`).
        if not self.training or getattr(self, "gradient_checkpointing", False):
            return call(*args, **kwargs)
        kwargs = _without_cache(self, kwargs)
        return self.ds_fp4_checkpoint_options.checkpoint(functools.partial(call, **kwargs), *args)


# What transformers calls the keys and values of earlier tokens, which layers add to.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def _without_cache(module: torch.nn.Module, kwargs: dict) -> dict:
    """A call's keywords without an empty cache of keys and values: the recomputation would add to it once more.

    transformers, whose models make one unless told `use_cache=False`, does the same for its own checkpointing.
    Raises RuntimeError for a cache that holds something, which the module's result depends on.
    """
    caches = [key for key in _CACHES if kwargs.get(key) is not None]
    # Some layers only read what others have written.
    if not caches or getattr(module, "_can_checkpoint_with_cache", False):
        return kwargs
    index = next((m.layer_idx for m in module.modules() if isinstance(getattr(m, "layer_idx", None), int)), 0)
    for key in caches:
        length = getattr(kwargs[key], "get_seq_length", lambda _: 1)(index)
        if length:
            raise RuntimeError(
                f"{type(module).__name__} is checkpointed ({BLOCK}.checkpointing) and was called with {key} that hold "
                f"keys and values already, to which a recomputation would add again. Call the model without {key}, or "
                f"leave the module out of {BLOCK}.checkpointing.scope."
            )
    use_cache = {"use_cache": False} if kwargs.get("use_cache") else {}
    return {**kwargs, **dict.fromkeys(caches), **use_cache}


_swapped_classes: dict[type, type] = {}


def _swap(module: torch.nn.Module, options: CheckpointOptions) -> None:
    base = type(module)
    if base not in _swapped_classes:
        _swapped_classes[base] = type(
            f"Checkpointed{base.__name__}", (CheckpointedModule, base), {"__module__": __name__}
        )
    module.__class__ = _swapped_classes[base]
    module.ds_fp4_checkpoint_options = options


def _restore(module: torch.nn.Module) -> None:
    module.__class__ = type(module).__mro__[2]
    del module.ds_fp4_checkpoint_options


# --- Hugging Face ---


class _Redirected:
    """In the place of a checkpointing function that transformers gave its layers."""

    def __init__(self, original: Callable, options: CheckpointOptions, keywords: dict) -> None:
        self.original, self._options = original, options
        self._keywords = {key: keywords[key] for key in TORCH_OPTIONS if key in keywords}

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return self._options.checkpoint(functools.partial(function, **kwargs), *args, **self._keywords)


def redirected(function: Callable, options: CheckpointOptions) -> _Redirected | None:
    """ds_fp4's equivalent of a checkpointing function that transformers gave its layers; None for an unknown one."""
    keywords = {}
    inner = function
    while isinstance(inner, functools.partial):
        keywords = {**inner.keywords, **keywords}
        inner = inner.func
    if getattr(inner, "__qualname__", "").endswith("gradient_checkpointing_enable.<locals>.checkpoint_func"):
        # gradient_checkpointing_enable(offload=True): inputs in host memory.
        return _Redirected(function, replace(options, offload="cpu"), keywords)
    if inner in (torch.utils.checkpoint.checkpoint, deepspeed_checkpointing.checkpoint):
        return _Redirected(function, options, keywords)
    return None


def _redirect_hugging_face(model: torch.nn.Module, options: CheckpointOptions) -> None:
    unknown = set()
    for module in model.modules():
        function = module.__dict__.get(_HF_FUNCTION)
        if function is None or isinstance(function, _Redirected):
            continue
        replacement = redirected(function, options)
        if replacement is None:
            unknown.add(getattr(function, "__qualname__", repr(function)))
        else:
            setattr(module, _HF_FUNCTION, replacement)
    for name in unknown:
        logger.warning(
            f"{BLOCK}.checkpointing: the model's layers checkpoint through {name}, which ds_fp4 does not know; "
            "they keep BF16 activations. Use gradient_checkpointing_enable(), or leave it out."
        )


def _hook_gradient_checkpointing_enable() -> None:
    """Redirect also what is enabled after the engine was built. Does nothing where transformers is not in use."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return
    original = transformers.PreTrainedModel.gradient_checkpointing_enable
    if getattr(original, "_ds_fp4_hook", False):
        return

    @functools.wraps(original)
    def gradient_checkpointing_enable(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        installed = self.__dict__.get(_INSTALLED)
        if installed is not None:
            _redirect_hugging_face(self, installed.options)

    gradient_checkpointing_enable._ds_fp4_hook = True
    transformers.PreTrainedModel.gradient_checkpointing_enable = gradient_checkpointing_enable


# --- DeepSpeed's checkpointing function ---


@contextmanager
def _model_parallel_random_states(states: dict) -> Iterator[None]:
    """DeepSpeed's tracker of random states at `states`, as its own checkpointing does in a recomputation."""
    tracker = deepspeed_checkpointing.get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(now)


def _deepspeed_checkpoint(options: CheckpointOptions, function: Callable, args: tuple) -> Any:
    active = [key for key, switch in _DEEPSPEED_FEATURES.items() if getattr(deepspeed_checkpointing, switch)]
    if active:
        raise RuntimeError(_refusal(active[0], f"deepspeed.checkpointing.configure({active[0]}=True)"))
    states = deepspeed_checkpointing.get_cuda_rng_tracker().get_states()
    return options.checkpoint(
        function, *args, context_fn=lambda: (nullcontext(), _model_parallel_random_states(states))
    )


def _refusal(key: str, found: str) -> str:
    instead = f"; {_INSTEAD[key]}" if key in _INSTEAD else ""
    return (
        f"{found} cannot be combined with {BLOCK}.checkpointing.enabled = true, which keeps activations in a form of "
        f"its own. Set activation_checkpointing.{key} to false{instead}."
    )


def refuse_deepspeed_features(ds_config: dict) -> None:
    """Raise ConfigError for keys of DeepSpeed's `activation_checkpointing` block that change how inputs are kept."""
    block = ds_config.get("activation_checkpointing") or {}
    for key in _DEEPSPEED_FEATURES:
        if block.get(key):
            raise ConfigError(_refusal(key, f"activation_checkpointing.{key} = {block[key]!r}"))


def _install_deepspeed_shim() -> None:
    original = deepspeed_checkpointing.CheckpointFunction
    if getattr(original, "_ds_fp4_shim", False):
        return
    found = list(inspect.signature(original.forward).parameters)[1:]
    switches = [name for name in _DEEPSPEED_FEATURES.values() if not hasattr(deepspeed_checkpointing, name)]
    if found != ["run_function", "all_outputs", "args"] or switches:
        raise SeamError(
            f"DeepSpeed {deepspeed.__version__}: activation checkpointing's CheckpointFunction takes {found}, "
            f"expected [run_function, all_outputs, args]{', and lacks ' + ', '.join(switches) if switches else ''}. "
            "Install a tested release."
        )

    class Shim(original):
        _ds_fp4_shim = True

        @staticmethod
        def apply(function: Callable, all_outputs: list, *args: Any) -> Any:
            options = redirection()
            if options is None:
                return original.apply(function, all_outputs, *args)
            outputs = _deepspeed_checkpoint(options, function, args)
            all_outputs += [outputs] if torch.is_tensor(outputs) else outputs
            return outputs

    deepspeed_checkpointing.CheckpointFunction = Shim


# --- one model ---


class _Installed:
    """What was done to one model, apart from what can be read off its modules."""

    def __init__(self, model: torch.nn.Module, options: CheckpointOptions) -> None:
        self.options = options
        self.model = weakref.ref(model)
        self._open: list[Any] = []
        self.hooks = (
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def _enter(self, *_: Any) -> None:
        context = redirecting(self.options)
        context.__enter__()
        self._open.append(context)

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def __deepcopy__(self, memo: dict) -> _Installed:
        # A copied model has the same options; what there is to undo belongs to the original.
        return self


def install(model: torch.nn.Module, targets: dict[str, torch.nn.Module], options: CheckpointOptions) -> None:
    """Checkpoint `targets`, and everything that checkpoints by itself in `model`'s forward, with `options`."""
    remove(model)
    for module in targets.values():
        _swap(module, options)
    _redirect_hugging_face(model, options)
    _hook_gradient_checkpointing_enable()
    _install_deepspeed_shim()
    classic.keep_results_of_forward()
    installed = _Installed(model, options)
    for module in model.modules():
        if module is model or hasattr(module, "gradient_checkpointing_enable"):
            module.__dict__[_INSTALLED] = installed


def remove(model: torch.nn.Module) -> None:
    """Undo `install`; a model without it is left alone."""
    installed = model.__dict__.get(_INSTALLED)
    if installed is None:
        return
    for module in model.modules():
        module.__dict__.pop(_INSTALLED, None)
        function = module.__dict__.get(_HF_FUNCTION)
        if isinstance(function, _Redirected):
            setattr(module, _HF_FUNCTION, function.original)
        if isinstance(module, CheckpointedModule):
            _restore(module)
    if installed.model() is model:
        for hook in installed.hooks:
            hook.remove()
