# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Packed bytes in pinned host memory, moved on streams of their own and fetched ahead of backward.

    forward    pack layer 1 | pack layer 2 | ...            compute stream
                    copy out layer 1 | copy out layer 2     stream `out`
    backward   layer 3 | layer 2 | layer 1                  compute stream
               copy in 2 | copy in 1                        stream `inward`: fetching a layer starts those before it

Backward wants the buffers in the opposite order of forward, so each one knows the one that was moved before it.
"""

from __future__ import annotations

import threading
import weakref

import torch

# How many buffers are on their way while one is in use. Each is a packed activation on the device.
PREFETCH = 2


class _Streams:
    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)
        self.inward = torch.cuda.Stream(device)


_streams: dict[torch.device, _Streams] = {}
_lock = threading.Lock()  # backward runs in threads of its own
_last: dict[torch.device, weakref.ref[HostBuffer]] = {}


def _streams_of(device: torch.device) -> _Streams:
    with _lock:
        if device not in _streams:
            _streams[device] = _Streams(device)
        return _streams[device]


class HostBuffer:
    """The bytes of one packed tensor, on the host.

    Args:
        buffer: uint8 [N], on the host (where it is simply copied) or a CUDA device. Its memory is free again once the
            copy is done; the caller need not wait.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.device = buffer.device
        self._arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None
        on_gpu = buffer.is_cuda
        # torch caches pinned memory, and reuses a block only when the copies that touch it are done.
        self._bytes = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=on_gpu)
        if on_gpu:
            stream = _streams_of(self.device).out
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._bytes.copy_(buffer, non_blocking=True)
                self._left = stream.record_event()
            buffer.record_stream(stream)
        else:
            self._bytes.copy_(buffer)
        with _lock:
            previous = _last.get(self.device)
            _last[self.device] = weakref.ref(self)
        self._previous = previous

    def fetch(self) -> torch.Tensor:
        """The bytes on their device, uint8 [N], ready on the current stream; those before it are on their way."""
        if self.device.type == "cpu":
            return self._bytes.clone()
        self._start()
        buffer, arrived = self._arriving
        # A second backward over the same graph fetches again: the device's copy must not outlive its use.
        self._arriving = None
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        buffer.record_stream(stream)
        before = self
        for _ in range(PREFETCH):
            before = before._previous() if before._previous is not None else None
            if before is None:
                break
            before._start()
        return buffer

    def _start(self) -> None:
        if self._arriving is not None:
            return
        stream = _streams_of(self.device).inward
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(self._left)
            buffer = self._bytes.to(self.device, non_blocking=True)
            self._arriving = buffer, stream.record_event()
