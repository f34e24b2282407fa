# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What one forward of a layer sends and receives: counts first, then records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch

from ds_fp4.formats import padded_sizes


@dataclass(frozen=True)
class Counts:
    """Host integers of one forward.

    Attributes:
        sent, received: records to and from each rank of the group.
        padded_sizes: rows of each local expert, rounded up to 128.
    """

    sent: list[int]
    received: list[int]
    padded_sizes: tuple[int, ...]

    @property
    def padded_rows(self) -> int:
        return sum(self.padded_sizes)


class PendingCounts:
    """Counts on their way to the host: what is launched between `start_counts` and `wait` keeps the GPU busy."""

    def __init__(self, tables: torch.Tensor, event: torch.cuda.Event | None) -> None:
        # On the host, there once the event has happened.
        self._tables, self._event = tables, event

    def wait(self) -> tuple[list[int], list[int]]:
        """`Counts.sent` and `received`: the exchange of records needs no more, and the GPU waits for it."""
        if self._event is not None:
            self._event.synchronize()
        tables = self._tables.tolist()
        sent, self._received = tables[0], tables[-1]
        return [row[-1] for row in sent], [row[-1] for row in self._received]

    def padded_sizes(self) -> tuple[int, ...]:
        """`Counts.padded_sizes`, once waited for."""
        *rows, _ = map(sum, zip(*self._received, strict=True))
        return tuple(padded_sizes(rows))


class PendingRecords:
    """Records on their way; the buffers that a collective reads live until it is waited for."""

    def __init__(self, received: torch.Tensor, sent: torch.Tensor, work: Any) -> None:
        self._received, self._sent, self._work = received, sent, work

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        self._sent = None
        return self._received


class Exchange:
    """The collectives of one layer. A layer that lives on one rank sends nothing.

    Args:
        group: the expert-parallel process group. ep_size: its ranks.
    """

    def __init__(self, group: Any, ep_size: int) -> None:
        self.group, self.ep_size = group, ep_size
        # Pinned memory and an event, used again by each forward: one waits for its own before it goes on.
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def new_tables(self, local_experts: int, device: torch.device) -> torch.Tensor:
        """int32 [1 or 2, ranks, local experts + 1]: the first for a send plan's table, the last for what the exchange
        makes of it; on one rank they are the same."""
        sides = 1 if self.ep_size == 1 else 2
        return torch.empty(sides, self.ep_size, local_experts + 1, dtype=torch.int32, device=device)

    def start_counts(self, tables: torch.Tensor) -> PendingCounts:
        """Exchange the first of `new_tables`: one collective, one copy to the host."""
        if self.ep_size > 1:
            dist.all_to_all_single(tables[1], tables[0], group=self.group)
        if tables.is_cuda:
            if self._host is None:
                with torch.inference_mode(False):  # to be written to by training forwards too
                    self._host = torch.empty(tables.shape, dtype=tables.dtype, pin_memory=True)
                self._event = torch.cuda.Event()
            tables = self._host.copy_(tables, non_blocking=True)
            self._event.record()
        return PendingCounts(tables, self._event)

    def start(self, records: torch.Tensor, send: list[int], receive: list[int]) -> PendingRecords:
        """Begin the exchange of uint8 [sum(send), bytes]; the result is uint8 [sum(receive), bytes]."""
        if self.ep_size == 1:
            return PendingRecords(records, records, None)
        received = torch.empty(sum(receive), records.shape[1], dtype=records.dtype, device=records.device)
        work = dist.all_to_all_single(received, records, receive, send, group=self.group, async_op=True)
        return PendingRecords(received, records, work)
