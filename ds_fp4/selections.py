# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Selections (which experts, which tokens) that a recomputation takes over from the forward.

A recomputation from packed values sees slightly different scores. A router that chose again would send some tokens to
other experts: other shapes than backward expects, other splits than the peers expect, gradients of other experts. So
while the forward runs, every selection by floating-point values is recorded (`torch.topk`, `sort`, `argsort`,
`argmax`, `argmin`, `max` and `min` along a dimension, `kthvalue`, `multinomial`), as small integers; the recomputation
is given the recorded indices, and gathers its own values by them. Routing weights are thus recomputed, routing is not.

Selections inside compiled or scripted functions are not seen.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

# Functions that return (values, indices): position of `dim` among the positional arguments, and its default.
_VALUES_AND_INDICES = {
    "topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "max": (1, None), "min": (1, None), "kthvalue": (2, -1)
}  # fmt: skip
# Functions that return indices only, and are not differentiated. (argsort is, internally, a sort.)
_INDICES = ("argmax", "argmin", "multinomial")
_NAMES = {
    getattr(owner, name): name for name in (*_VALUES_AND_INDICES, *_INDICES) for owner in (torch, torch.Tensor)
}  # fmt: skip

_depth = threading.local()


class RoutingError(RuntimeError):
    """A recomputation selects other things than its forward did."""


class _Take(torch.autograd.Function):
    """The values at given indices along a dimension; like topk, sort and max it saves the indices and nothing else."""

    @staticmethod
    def forward(ctx, source, indices, dim, squeezed):
        ctx.dim, ctx.squeezed, ctx.shape = dim, squeezed, source.shape
        ctx.save_for_backward(indices)
        values = source.gather(dim, indices.unsqueeze(dim) if squeezed else indices)
        return values.squeeze(dim) if squeezed else values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        if ctx.squeezed:
            grad, indices = grad.unsqueeze(ctx.dim), indices.unsqueeze(ctx.dim)
        return grad.new_zeros(ctx.shape).scatter(ctx.dim, indices, grad), None, None, None


def _narrow(indices: torch.Tensor, limit: int) -> torch.Tensor:
    """Indices below `limit` in the fewest bytes."""
    return indices.to(torch.int16 if limit <= 1 << 15 else torch.int32 if limit <= 1 << 31 else torch.int64)


@dataclass(frozen=True)
class _Made:
    """One selection: the function, its input's shape, the dimension (None for functions that return indices only)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    indices: torch.Tensor


class Selections:
    """The selections of one forward, in order: `recording()` goes around it, `replaying()` around a recomputation."""

    def __init__(self) -> None:
        self._made: list[_Made] = []

    def recording(self) -> TorchFunctionMode:
        """Context that notes what is selected on this thread."""
        return _Recording(self._made)

    def replaying(self) -> TorchFunctionMode:
        """Context that hands out what was noted, from the first on.

        Raises RoutingError at a selection whose function, input shape or dimension is not the forward's.
        """
        return _Replaying(self._made)


class _Selecting(TorchFunctionMode):
    def __init__(self, made: list[_Made]) -> None:
        super().__init__()
        self.made = made

    def __enter__(self):
        _depth.count = getattr(_depth, "count", 0) + 1
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        _depth.count -= 1
        return super().__exit__(*exception)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _NAMES.get(function)
        if name is None:
            return function(*args, **kwargs)
        source = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(source, torch.Tensor) or not source.is_floating_point() or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        dim = None
        if name in _VALUES_AND_INDICES:
            position, default = _VALUES_AND_INDICES[name]
            dim = kwargs.get("dim", args[position] if len(args) > position else default)
            if not isinstance(dim, int):
                # max of everything, or of two tensors: values, no selection.
                return function(*args, **kwargs)
        return self.select(name, function, source, dim, args, kwargs)

    def select(
        self, name: str, function: Any, source: torch.Tensor, dim: int | None, args: tuple, kwargs: dict
    ) -> Any:
        raise NotImplementedError


class _Recording(_Selecting):
    def select(self, name, function, source, dim, args, kwargs):
        result = function(*args, **kwargs)
        indices = result if isinstance(result, torch.Tensor) else result[1]
        limit = source.numel() if dim is None or source.dim() == 0 else source.shape[dim]
        self.made.append(_Made(name, tuple(source.shape), dim, _narrow(indices.detach(), limit)))
        return result


class _Replaying(_Selecting):
    def __init__(self, made: list[_Made]) -> None:
        super().__init__(made)
        self._next = 0

    def select(self, name, function, source, dim, args, kwargs):
        made = self.made[self._next] if self._next < len(self.made) else None
        self._next += 1
        if made is None or (made.name, made.shape, made.dim) != (name, tuple(source.shape), dim):
            was = "none" if made is None else f"{made.name} of {made.shape}, dim {made.dim}"
            raise RoutingError(
                f"selection {self._next} of the recomputation is {name} of {tuple(source.shape)}, dim {dim}; the "
                f"forward's was {was}. The checkpointed function takes another path when it sees packed values, and "
                "would route tokens to other experts. Set ds_fp4_exact=True (ds_fp4.checkpointing.exact): then both "
                "see the same."
            )
        indices = made.indices.to(torch.int64)
        if dim is None:
            return indices
        values = _Take.apply(source, indices, dim, indices.dim() < source.dim())
        return indices if name == "argsort" else getattr(torch.return_types, name)((values, indices))


def selecting() -> bool:
    """Whether selections on this thread are being recorded or replayed."""
    return getattr(_depth, "count", 0) > 0
