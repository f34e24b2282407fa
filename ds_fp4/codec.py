# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Codecs: rows of activations or gradients <-> byte records that one collective can carry.

A record holds everything needed to decode one row, so that data and scales travel together:

    mxfp4   | K/2 bytes E2M1, two per byte | K/32 bytes UE8M0 | padding to 16 bytes |
    fp8     | K bytes E4M3                 | K/128 bytes UE8M0 | padding to 16 bytes |

K is the hidden size rounded up to whole blocks (32 for mxfp4, 1 for fp8, whose last group may be short). The
padding keeps every row aligned for 16-byte vector access.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_fp4 import ops
from ds_fp4.formats import FP8_GROUP, MXFP4_BLOCK

RECORD_ALIGNMENT = 16


def align_up(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def _new_records(rows: int, data_bytes: int, record_bytes: int, device: torch.device) -> torch.Tensor:
    records = torch.empty(rows, record_bytes, dtype=torch.uint8, device=device)
    if record_bytes > data_bytes:
        # Padding travels too; it must not carry whatever was in that memory before.
        records[:, data_bytes:].zero_()
    return records


def _split(records: torch.Tensor, codes: int, scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first bytes of records and of those that follow."""
    rest = records.shape[1] - codes - scales
    parts = records.split_with_sizes((codes, scales, rest) if rest else (codes, scales), 1)
    return parts[0], parts[1]


class Mxfp4Codec:
    """E2M1 elements with one UE8M0 scale per 32.

    Args:
        hidden: row length of the tensors to encode, at least 1; rows whose length is not a multiple of 32 are padded
            with zeros on the way in and cut on the way out.
        scale_rounding: "floor", "rceil", "ceil" or "even".
    """

    name = "mxfp4"

    def __init__(self, hidden: int, scale_rounding: str = "even") -> None:
        self.hidden = hidden
        self.scale_rounding = scale_rounding
        self.columns = align_up(hidden, MXFP4_BLOCK)
        self.packed_bytes, self.scale_bytes = self.columns // 2, self.columns // MXFP4_BLOCK
        self.data_bytes = self.packed_bytes + self.scale_bytes
        self.record_bytes = align_up(self.data_bytes, RECORD_ALIGNMENT)

    def split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (packed, scales) of records, whatever follows these."""
        return _split(records, self.packed_bytes, self.scale_bytes)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """BF16, FP16 or FP32 [M, hidden] -> uint8 [M, record_bytes]."""
        if self.columns != self.hidden:
            rows = F.pad(rows, (0, self.columns - self.hidden))
        records = _new_records(rows.shape[0], self.data_bytes, self.record_bytes, rows.device)
        ops.bf16_to_fp4_row(rows, self.scale_rounding, out=self.split(records))
        return records

    def decode(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 [M, record_bytes] -> `dtype` [M, hidden]."""
        rows = ops.fp4_row_to_bf16(*self.split(records), dtype=dtype)
        return rows if self.columns == self.hidden else rows[:, : self.hidden].contiguous()


class Fp8Codec:
    """E4M3 elements with one power-of-two scale per 128 (UE8M0 in the record); the last group of a row may be short.

    Args:
        hidden: row length of the tensors to encode, at least 1.
    """

    name = "fp8"

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self.scale_bytes = align_up(hidden, FP8_GROUP) // FP8_GROUP
        self.data_bytes = hidden + self.scale_bytes
        self.record_bytes = align_up(self.data_bytes, RECORD_ALIGNMENT)

    def split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (q, scales) of records, whatever follows these."""
        q, scales = _split(records, self.hidden, self.scale_bytes)
        return q.view(torch.float8_e4m3fn), scales

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """BF16, FP16 or FP32 [M, hidden] -> uint8 [M, record_bytes]."""
        records = _new_records(rows.shape[0], self.data_bytes, self.record_bytes, rows.device)
        ops.bf16_to_fp8_row(rows, scale_dtype=torch.uint8, out=self.split(records))
        return records

    def decode(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 [M, record_bytes] -> `dtype` [M, hidden]."""
        return ops.fp8_row_to_bf16(*self.split(records), dtype=dtype)


Codec = Mxfp4Codec | Fp8Codec


def make_codec(name: str, hidden: int, scale_rounding: str) -> Codec | None:
    """The codec called `name` for rows of `hidden` elements; None for "bf16", which sends tensors as they are."""
    if name == "bf16":
        return None
    if name == "fp8":
        return Fp8Codec(hidden)
    if name == "mxfp4":
        return Mxfp4Codec(hidden, scale_rounding)
    raise ValueError(f'unknown codec {name!r}; expected "bf16", "fp8" or "mxfp4"')
