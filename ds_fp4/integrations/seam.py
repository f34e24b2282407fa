# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""How a codec gets between a DeepSpeed MoE layer and its all-to-all.

DeepSpeed's layers call a module-level autograd function twice per forward, for dispatch and then for combine:

    layer.forward ── enter_layer(layer) ─┐
        router, permutation              │ frame on a thread-local stack
        AllToAll.apply(...)   1st call ──┤ -> dispatch leg
        experts                          │
        AllToAll.apply(...)   2nd call ──┤ -> combine leg
    ─────────────────────────────────────┘ frame popped

The layer's class is swapped for a subclass whose forward pushes a frame (parameters, their names and checkpoints stay
as they are; wrapping in another module would rename them), and the function is replaced by a shim that asks the frame
which leg it is. Without a frame the shim is DeepSpeed's own function. The stack is thread-local, because autograd
recomputes checkpointed layers on its own threads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import deepspeed
import torch

from ds_fp4.all_to_all import Leg


class SeamError(RuntimeError):
    """DeepSpeed no longer has the shape that ds_fp4 hooks into."""


class _Frame:
    def __init__(self, layer_name: str, legs: tuple[Leg, Leg]) -> None:
        self.layer_name = layer_name
        self.legs = legs
        self.calls = 0

    def next_leg(self) -> Leg:
        self.calls += 1
        if self.calls > len(self.legs):
            raise SeamError(
                f"{self.layer_name}: DeepSpeed {deepspeed.__version__} made a third all-to-all in one forward; "
                "ds_fp4 knows dispatch and combine only. Set ds_fp4.enabled to false and report this version."
            )
        return self.legs[self.calls - 1]


_stack = threading.local()


def _frames() -> list[_Frame]:
    if not hasattr(_stack, "frames"):
        _stack.frames = []
    return _stack.frames


@contextmanager
def enter_layer(layer_name: str, legs: tuple[Leg, Leg]):
    """All-to-alls made on this thread inside the context belong to this layer."""
    frames = _frames()
    frame = _Frame(layer_name, legs)
    frames.append(frame)
    try:
        yield
    finally:
        frames.pop()
    if frame.calls != len(legs):
        raise SeamError(
            f"{layer_name}: DeepSpeed {deepspeed.__version__} made {frame.calls} all-to-all calls in one forward, "
            f"expected {len(legs)}, so its traffic would not be compressed. Set ds_fp4.enabled to false and "
            "report this version."
        )


class CodecLayer:
    """Mixin of the swapped layer classes. Instances carry `ds_fp4_name` and `ds_fp4_legs`."""

    ds_fp4_name: str
    ds_fp4_legs: tuple[Leg, Leg]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Collectives and thread-local state: a compiled model runs this layer eagerly, between two graphs.
        with enter_layer(self.ds_fp4_name, self.ds_fp4_legs):
            return super().forward(*args, **kwargs)


_swapped_classes: dict[type, type] = {}


def swap_class(layer: torch.nn.Module, name: str, legs: tuple[Leg, Leg]) -> None:
    """Make `layer` an instance of a subclass of its class that sends its traffic through `legs`."""
    base = type(layer)
    if not issubclass(base, CodecLayer):
        if base not in _swapped_classes:
            _swapped_classes[base] = type(f"Fp4{base.__name__}", (CodecLayer, base), {"__module__": __name__})
        layer.__class__ = _swapped_classes[base]
    layer.ds_fp4_name = name
    layer.ds_fp4_legs = legs


def restore_class(layer: torch.nn.Module) -> None:
    """Undo `swap_class`; a layer that was never swapped is left alone."""
    if isinstance(layer, CodecLayer):
        layer.__class__ = next(base for base in type(layer).__mro__[1:] if not issubclass(base, CodecLayer))
        del layer.ds_fp4_name, layer.ds_fp4_legs


def install_shim(
    module: ModuleType, attribute: str, parameters: list[str], adapt: Callable[..., torch.Tensor]
) -> None:
    """Replace the autograd function `module.attribute` by a shim; does nothing if that was already done.

    Args:
        module, attribute: where DeepSpeed's layers look the function up.
        parameters: names of its forward's arguments after ctx, in order, as in the tested releases.
        adapt: called as `adapt(leg, *arguments)` when a layer that ds_fp4 swapped is running on this thread.

    Raises SeamError if the function is missing or takes other arguments.
    """
    original = getattr(module, attribute, None)
    if getattr(original, "_ds_fp4_shim", False):
        return
    found = list(inspect.signature(original.forward).parameters)[1:] if original is not None else None
    if found != parameters:
        raise SeamError(
            f"DeepSpeed {deepspeed.__version__}: {module.__name__}.{attribute} was expected to take {parameters}, "
            f"but {'it does not exist' if found is None else f'takes {found}'}. Install a tested release."
        )

    class Shim:
        _ds_fp4_shim = True

        @staticmethod
        def apply(*args: Any) -> torch.Tensor:
            frames = _frames()
            return adapt(frames[-1].next_leg(), *args) if frames else original.apply(*args)

    setattr(module, attribute, Shim)
