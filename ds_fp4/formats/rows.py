# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Rows of the reference's input: gathered through an index, taken in pieces that bound temporary memory."""

from collections.abc import Iterator

import torch

# Values a piece may hold. A quantizer keeps up to six int32 temporaries of it: 192 MiB on a GPU; on the host they stay
# near the caches.
_VALUES_PER_PIECE = {"cuda": 1 << 23, "cpu": 1 << 18}


def pieces(rows: int, width: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Consecutive slices of `rows` rows of `width` values; all but the last have a multiple of `multiple` rows."""
    limit = _VALUES_PER_PIECE.get(device.type, _VALUES_PER_PIECE["cpu"])
    step = max(limit // max(width, 1) // multiple, 1) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def take(source: torch.Tensor, index: torch.Tensor | None, piece: slice) -> torch.Tensor:
    """Rows `piece` of the output: source[piece], or source[index[piece]] with zero rows where the index is -1."""
    if index is None:
        return source[piece]
    index = index[piece]
    if source.shape[0] == 0:
        return source.new_zeros((index.shape[0], source.shape[1]))
    return source.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0)


def pad_columns(t: torch.Tensor, multiple: int, fill: int = 0) -> torch.Tensor:
    """`t` [M, K] itself, or padded on the right with `fill` to the next multiple of `multiple` columns."""
    missing = -t.shape[1] % multiple
    return torch.nn.functional.pad(t, (0, missing), value=fill) if missing else t
