# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Counts the bytes that expert parallelism hands to `torch.distributed.all_to_all_single`.

    with AllToAllTraffic() as traffic:
        engine.backward(engine(batch))
    traffic.forward.payload.sent      # bytes of tokens that left this rank in forward legs
    traffic.backward.payload.calls    # collectives that carried gradients

What is counted, on this rank only, for each call made while the context is open:

- `bytes`: the whole input tensor; `sent`: the part addressed to other ranks (what a network carries).
- *payload* is every input but int32 and int64 ones; those are *metadata* (AutoEP exchanges its token counts as
  integers before it sends tokens, ds_fp4's records are uint8).
- *forward* and *backward* are the legs of the layer, not the phase of the step: a forward leg run again by activation
  checkpointing happens during backward, moves the forward's format, and is counted apart, as *recompute*.

`all_to_all` with tensor lists and functional collectives are not counted. Several contexts may be open at once and may
close in any order; the patch goes when the last one closes.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed
import torch.utils.checkpoint

DIRECTIONS = ("forward", "recompute", "backward")
METADATA_DTYPES = (torch.int32, torch.int64)

_BACKWARD_CODE = {
    torch.autograd.function.BackwardCFunction.apply.__code__,
    torch.autograd.graph._engine_run_backward.__code__,
}
_MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__

_lock = threading.Lock()  # backward of CUDA tensors runs in autograd's own threads
_open: list[AllToAllTraffic] = []
_original = None


@dataclass
class Count:
    """Calls, bytes of their inputs, and the bytes among them that were addressed to other ranks."""

    calls: int = 0
    bytes: int = 0
    sent: int = 0

    def add(self, nbytes: int, sent: int) -> None:
        self.calls += 1
        self.bytes += nbytes
        self.sent += sent


@dataclass
class Leg:
    """Traffic of one direction."""

    payload: Count = field(default_factory=Count)
    metadata: Count = field(default_factory=Count)


class AllToAllTraffic:
    """Context manager that counts this rank's all-to-all traffic; see the module's text for what the fields mean."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets all counts to zero; allowed while open."""
        self.forward, self.recompute, self.backward = Leg(), Leg(), Leg()

    def __enter__(self) -> AllToAllTraffic:
        global _original
        with _lock:
            if not _open:
                _original = torch.distributed.all_to_all_single
                torch.distributed.all_to_all_single = _counting_all_to_all_single
            _open.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        global _original
        with _lock:
            # By identity: one object may be open twice, and dataclass-like equality has no meaning here.
            _open.pop(next(i for i in reversed(range(len(_open))) if _open[i] is self))
            if not _open:
                torch.distributed.all_to_all_single = _original
                _original = None


def current_direction() -> str:
    """The kind of leg that the caller belongs to: one of `DIRECTIONS`.

    Being inside autograd's engine is not enough to call it backward: activation checkpointing runs forwards there. Nor
    is being inside a `Function.forward` enough to call it forward: DeepSpeed's `_AllToAll.backward` applies
    `_AllToAll`. So the stack decides: a module call or a checkpoint's frame between here and the nearest backward
    means that a forward is being run again.
    """
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _BACKWARD_CODE:
        if frame.f_code is _MODULE_CALL_CODE or frame.f_code.co_filename == _CHECKPOINT_FILE:
            return "recompute"
        frame = frame.f_back
    return "backward"


def _bytes_to_self(input: torch.Tensor, input_split_sizes: list[int] | None, group) -> int:
    """Bytes of `input` that this rank addresses to itself, where rows (dim 0) are what is split."""
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    nbytes = input.numel() * input.element_size()
    if not input_split_sizes:
        return nbytes // world
    rows = input.shape[0]
    return nbytes * int(input_split_sizes[rank]) // rows if rows else 0


def _counting_all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    original = _original if _original is not None else torch.distributed.all_to_all_single
    nbytes = input.numel() * input.element_size()
    sent = nbytes - _bytes_to_self(input, input_split_sizes, group)
    kind = "metadata" if input.dtype in METADATA_DTYPES else "payload"
    direction = current_direction()
    with _lock:
        for traffic in _open:
            getattr(getattr(traffic, direction), kind).add(nbytes, sent)
    return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
