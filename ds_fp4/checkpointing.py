# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.checkpoint`: activation checkpointing that keeps its inputs in MXFP4 or FP8.

    forward    x ── pack ──> bytes, kept ── unpack ──> x' ──> function(x')        exact: x' here as well
    backward                 bytes ──────── unpack ──> x' ──> function(x'), recomputed for its saved tensors

Recomputation itself is PyTorch's: `torch.utils.checkpoint` is handed the bytes in place of the tensors, and what it
recomputes begins with unpacking them. So nesting, early stop, random numbers, autocast, `retain_graph` and the checks
are PyTorch's too.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_fp4.offload import HostBuffer
from ds_fp4.packing import Format, Packer, View, is_packable, packer_of_this_thread
from ds_fp4.selections import Selections, selecting

OFFLOADS = ("none", "cpu")
# What torch.utils.checkpoint.checkpoint takes besides the function's own arguments, `use_reentrant` apart.
TORCH_OPTIONS = ("context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")

_threads = threading.local()


@dataclass(frozen=True)
class CheckpointOptions:
    """How inputs are kept; see `checkpoint`."""

    format: str = "fp8"
    exact: bool = True
    offload: str = "none"
    scale_rounding: str = "even"

    def __post_init__(self) -> None:
        Format(self.format, self.scale_rounding)
        if self.offload not in OFFLOADS:
            raise ValueError(f'ds_fp4_offload={self.offload!r}: expected "none" or "cpu"')
        if not isinstance(self.exact, bool):
            raise ValueError(f"ds_fp4_exact={self.exact!r}: expected True or False")

    def checkpoint(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """`ds_fp4.checkpoint` with these options; inside another one just `function(*args)`, recomputed with it.

        Args:
            kwargs: PyTorch's options (`TORCH_OPTIONS`) only: a keyword of the function's could be taken for one.
        """
        if checkpoint_depth():
            return function(*args)
        return checkpoint(
            function,
            *args,
            ds_fp4_format=self.format,
            ds_fp4_exact=self.exact,
            ds_fp4_offload=self.offload,
            ds_fp4_scale_rounding=self.scale_rounding,
            **kwargs,
        )


def checkpoint_depth() -> int:
    """How many `ds_fp4.checkpoint` calls, or recomputations of one, this thread is inside of."""
    return getattr(_threads, "depth", 0)


def recomputing() -> bool:
    """Whether this thread is recomputing a `ds_fp4.checkpoint`."""
    return getattr(_threads, "recomputing", False)


@contextmanager
def _inside(recomputes: bool) -> Iterator[None]:
    before = recomputing()
    _threads.depth = checkpoint_depth() + 1
    _threads.recomputing = before or recomputes
    try:
        yield
    finally:
        _threads.depth -= 1
        _threads.recomputing = before


@contextmanager
def redirecting(options: CheckpointOptions | None) -> Iterator[None]:
    """Checkpointing by DeepSpeed's function on this thread is ds_fp4's, with `options`, while the context is open."""
    previous = redirection()
    _threads.redirection = options
    try:
        yield
    finally:
        _threads.redirection = previous


def redirection() -> CheckpointOptions | None:
    """The options of the innermost `redirecting`."""
    return getattr(_threads, "redirection", None)


class _Unpacked(torch.autograd.Function):
    """Unpacked values in the place of `source`, whose gradient is theirs.

    `source` is the original in a forward. In a recomputation the original is gone: an empty tensor that needs a
    gradient stands in, so that the same operations save the same tensors, and is given none.
    """

    @staticmethod
    def forward(ctx, source: torch.Tensor, view: View, flat: torch.Tensor) -> torch.Tensor:
        ctx.original = source.shape == view.size
        return view.of(flat)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        return grad if ctx.original else None, None, None


class _Slot:
    """Stands for a tensor in a structure of arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Rebuilt:
    """Stands for a container that holds slots."""

    __slots__ = ("make", "items")

    def __init__(self, make: Callable[[list], Any], items: list) -> None:
        self.make, self.items = make, items


def _fill(value: Any, values: list, made: dict[int, Any]) -> Any:
    """`value` with `values` in the slots; `made` is given each container that is rebuilt, by its `_Rebuilt`'s id."""
    if isinstance(value, _Slot):
        return values[value.number]
    if not isinstance(value, _Rebuilt):
        return value
    made[id(value)] = filled = value.make([_fill(item, values, made) for item in value.items])
    return filled


def _items(container: list | dict) -> list:
    return list(container.items()) if isinstance(container, dict) else list(container)


class _Mutable:
    """The lists and dictionaries of a call that were rebuilt. What the function does to them is done to the caller's.

    Lives for one forward: it holds the originals.
    """

    def __init__(self, originals: dict[int, list | dict], made: dict[int, Any], tensors: list, values: list) -> None:
        self._pairs = [(original, made[key], _items(made[key])) for key, original in originals.items()]
        # The function's names for what the caller gave it.
        self._own = {id(value): (value, t) for value, t in zip(values, tensors, strict=True)}
        self._own |= {id(made[key]): (made[key], original) for key, original in originals.items()}

    def _theirs(self, item: Any) -> Any:
        return self._own[id(item)][1] if id(item) in self._own else item

    def write_back(self) -> None:
        for original, made, before in self._pairs:
            now = _items(made)
            if isinstance(made, dict):
                if [(key, id(value)) for key, value in now] != [(key, id(value)) for key, value in before]:
                    original.clear()
                    original.update((key, self._theirs(value)) for key, value in now)
            elif list(map(id, now)) != list(map(id, before)):
                original[:] = map(self._theirs, now)


class _Arguments:
    """A call's arguments with the tensors taken out and the activations among them packed.

    Containers that hold an activation are rebuilt around it; all others, and everything in them, are passed as they
    are. Looked into are lists, tuples, named tuples and dictionaries, not their subclasses and not other objects.

    Attributes:
        tensors: the distinct tensors that were taken out.
        views: for each what it is packed as, None if it is not.
        places: for each where in `kept` it, or the bytes that it is a view of, are.
        kept: what backward needs: the packed bytes, and the tensors that are not packed.
    """

    def __init__(self, packer: Packer, args: tuple, kwargs: dict) -> None:
        self.tensors: list[torch.Tensor] = []
        self.views: list[View | None] = []
        self.places: list[int] = []
        self.kept: list[torch.Tensor] = []
        self._packer = packer
        self._numbers: dict[int, int] = {}
        self._path: set[int] = set()
        self._originals: dict[int, list | dict] = {}
        self._args = [self._take(value, outermost=True) for value in args]
        self._kwargs = {key: self._take(value, outermost=True) for key, value in kwargs.items()}
        del self._packer, self._numbers, self._path

    def _add(self, t: torch.Tensor, packable: bool) -> _Slot:
        # An object that is passed twice is one slot: packed once, unpacked once.
        if id(t) not in self._numbers:
            self._numbers[id(t)] = len(self.tensors)
            self.tensors.append(t)
            view, keep = self._packer.pack(t) if packable else (None, t)
            self.views.append(view)
            place = next((i for i, other in enumerate(self.kept) if other is keep), len(self.kept))
            if place == len(self.kept):
                self.kept.append(keep)
            self.places.append(place)
        return _Slot(self._numbers[id(t)])

    def _take(self, value: Any, outermost: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            packable = is_packable(value)
            return self._add(value, packable) if packable or outermost else value
        kind = type(value)
        is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__bases__ == (tuple,)
        if kind not in (list, tuple, dict, OrderedDict) and not is_named_tuple or id(value) in self._path:
            return value
        self._path.add(id(value))
        if isinstance(value, dict):
            keys, items = list(value), [self._take(item) for item in value.values()]

            def make(filled: list) -> Any:
                return kind(zip(keys, filled, strict=True))

        else:
            items = [self._take(item) for item in value]
            make = (lambda filled: kind(*filled)) if is_named_tuple else kind
        self._path.discard(id(value))
        if not any(isinstance(item, (_Slot, _Rebuilt)) for item in items):
            return value
        rebuilt = _Rebuilt(make, items)
        if not isinstance(value, tuple):
            self._originals[id(rebuilt)] = value
        return rebuilt

    def filled(self, values: list) -> tuple[list, dict, dict[int, Any]]:
        """The positional and keyword arguments with `values` in the slots, and the containers made for them."""
        made: dict[int, Any] = {}
        positional = [_fill(value, values, made) for value in self._args]
        return positional, {key: _fill(value, values, made) for key, value in self._kwargs.items()}, made

    def take_originals(self) -> dict[int, list | dict]:
        """The caller's lists and dictionaries that were rebuilt, which are not held here any longer."""
        originals, self._originals = self._originals, {}
        return originals

    def unpacked(self, kept: Sequence[torch.Tensor], sources: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The values of the slots, from what was kept.

        Args:
            kept: as `self.kept`. Views of the same bytes share their memory again.
            sources: the tensors that the packed ones are to be differentiated as; None in a recomputation.
        """
        flats: dict[int, torch.Tensor] = {}
        values = []
        for number, (view, place) in enumerate(zip(self.views, self.places, strict=True)):
            if view is None:
                values.append(kept[place])
                continue
            if place not in flats:
                with torch.no_grad():
                    flats[place] = view.run.decode(kept[place])
            source = torch.empty(0, dtype=view.run.dtype, device=kept[place].device, requires_grad=True)
            values.append(_Unpacked.apply(source if sources is None else sources[number], view, flats[place]))
        return values


@torch.compiler.disable
def checkpoint(
    function: Callable,
    *args: Any,
    ds_fp4_format: str = "fp8",
    ds_fp4_exact: bool = True,
    ds_fp4_offload: str = "none",
    ds_fp4_scale_rounding: str = "even",
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)` with packed inputs.

    Packed are the activations among the arguments (positional, keyword, in lists, tuples, dictionaries, bound by
    `functools.partial`): what `packing.is_packable` says. All other arguments are kept as PyTorch keeps them. Under
    `torch.no_grad` the function is just called.

    Args:
        function: as for PyTorch: deterministic given its arguments, the random state and the autocast state.
        args, kwargs: its arguments, and PyTorch's options `context_fn`, `determinism_check`, `debug`, `early_stop` and
            `preserve_rng_state`.
        ds_fp4_format: "fp8" (0.50 of BF16's bytes) or "mxfp4" (0.27).
        ds_fp4_exact: True runs the forward on the unpacked values too, so that outputs and gradients are exactly those
            of the function on unpacked inputs. False gives the forward the original values and only the recomputation
            the packed ones; selections by value (expert routing) are then kept from the forward (`ds_fp4.selections`).
        ds_fp4_offload: "cpu" moves the packed bytes to pinned host memory and back on streams of their own. A call
            inside another `ds_fp4.checkpoint` leaves them on the device: there they live for one recomputation.
        ds_fp4_scale_rounding: how the scale of an MXFP4 block is rounded: "even", "floor", "rceil" or "ceil".
        use_reentrant: None or False.

    Returns:
        What the function returns.

    Raises:
        ValueError: on a wrong option.
        ds_fp4.selections.RoutingError: from backward, `ds_fp4_exact=False`: the recomputation selects other things.
    """
    if use_reentrant:
        raise ValueError(
            "use_reentrant=True: ds_fp4.checkpoint has PyTorch's non-reentrant semantics only; leave it out"
        )
    options = CheckpointOptions(ds_fp4_format, ds_fp4_exact, ds_fp4_offload, ds_fp4_scale_rounding)
    torch_options = {key: kwargs.pop(key) for key in TORCH_OPTIONS if key in kwargs}
    torch_options["use_reentrant"] = False
    if not torch.is_grad_enabled():
        return torch_checkpoint(function, *args, **torch_options, **kwargs)
    contexts = (nullcontext(), nullcontext())
    if "context_fn" in torch_options and not torch_options.get("debug"):
        # Around the function only: a dispatch mode (selective checkpointing) must not see the unpacking before it.
        contexts = torch_options.pop("context_fn")()
    while type(function) is functools.partial:
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    arguments = _Arguments(packer_of_this_thread(Format(options.format, options.scale_rounding)), args, kwargs)
    # Inside a function whose selections are kept this one's are too: it is recomputed apart from the outer one.
    selections = Selections() if selecting() or not options.exact and any(arguments.views) else None
    forward_values = arguments.unpacked(arguments.kept, arguments.tensors) if options.exact else arguments.tensors
    kept, hosted = arguments.kept, {}
    if options.offload == "cpu" and not checkpoint_depth():
        packed = {place for view, place in zip(arguments.views, arguments.places, strict=True) if view is not None}
        hosted = {place: HostBuffer(kept[place]) for place in packed}
        # An empty tensor tells PyTorch whose device's random state to keep.
        kept = [t.new_empty(0) if place in hosted else t for place, t in enumerate(kept)]
    originals = arguments.take_originals()
    first = [(forward_values, arguments.tensors if originals else [], originals)]
    del originals
    redirect = redirection()
    # Backward needs the structure only. Held here, the originals would live as long as the graph.
    arguments.tensors = arguments.kept = forward_values = None

    def run(*kept: torch.Tensor) -> Any:
        is_forward = bool(first)
        if is_forward:
            values, tensors, originals = first.pop()
        else:
            values = arguments.unpacked(
                [hosted[place].fetch() if place in hosted else t for place, t in enumerate(kept)]
            )
        positional, keyword, made = arguments.filled(values)
        mutable = _Mutable(originals, made, tensors, values) if is_forward and originals else None
        mode = nullcontext()
        if selections is not None:
            mode = selections.recording() if is_forward else selections.replaying()
        with _inside(recomputes=not is_forward), redirecting(redirect), contexts[0 if is_forward else 1], mode:
            result = function(*positional, **keyword)
            if mutable is not None:
                mutable.write_back()
            return result
        raise RuntimeError(
            "a context of context_fn suppressed an exception of the checkpointed function, which leaves nothing "
            "to return; let it pass"
        )

    return torch_checkpoint(run, *kept, **torch_options)
