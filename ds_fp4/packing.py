# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Activations of any shape <-> one buffer of bytes, for tensors that are kept until backward.

Values are taken in the order in which they lie in memory and cut into rows: the innermost dimension where its length
is a multiple of 32, otherwise rows of 4,096 that run on over the tensor's own rows and end in a shorter one. No value
is stored twice and none is padded, up to 31 at the very end apart. A buffer is

    mxfp4   | rows * width/2 bytes E2M1 | rows * width/32 bytes UE8M0 |  (the same for the shorter last row)
    fp8     | rows * width bytes E4M3   | rows * ceil(width/128) bytes UE8M0 |

so a value takes 0.53125 or 1.0078125 bytes (fp8 with rows that are no multiple of 128 a little more).

Two views of the same memory are packed once: a buffer covers a run of a storage, and a tensor is a view (sizes,
strides, offset) into the run's decoded values. So sizes and strides come back as they were.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fp4 import ops
from ds_fp4.formats import FP8_GROUP, MXFP4_BLOCK, SCALE_ROUNDINGS

FORMATS = ("mxfp4", "fp8")
# Tensors of fewer values are kept: 4 KiB of BF16, where a kernel launch costs more than the memory is worth.
SMALL_NUMEL = 2048
# Rows shorter than one MXFP4 block are kept: they are statistics of other tensors (norms, routing weights), hardly
# any bytes, and an error in them would hit a whole row.
SHORT_ROW = MXFP4_BLOCK
_FLAT_WIDTH = 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Format:
    """An element format: "mxfp4" or "fp8", and how the scale of an MXFP4 block is rounded."""

    name: str = "mxfp4"
    scale_rounding: str = "even"

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f'format {self.name!r}: expected "mxfp4" or "fp8"')
        if self.scale_rounding not in SCALE_ROUNDINGS:
            raise ValueError(f"scale_rounding {self.scale_rounding!r}: expected one of {', '.join(SCALE_ROUNDINGS)}")

    def row_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of a row's codes and of its scales; `width` is a multiple of 32 for mxfp4."""
        if self.name == "mxfp4":
            return width // 2, width // MXFP4_BLOCK
        return width, -(-width // FP8_GROUP)

    def encode(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """[R, width] -> uint8 `codes` and `scales` of `row_bytes`, written in place."""
        if self.name == "mxfp4":
            ops.bf16_to_fp4_row(rows, self.scale_rounding, out=(codes, scales))
        else:
            ops.bf16_to_fp8_row(rows, scale_dtype=torch.uint8, out=(codes.view(torch.float8_e4m3fn), scales))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """The reverse, written to `out` [R, width]."""
        if self.name == "mxfp4":
            ops.fp4_row_to_bf16(codes, scales, dtype=out.dtype, out=out)
        else:
            ops.fp8_row_to_bf16(codes.view(torch.float8_e4m3fn), scales, dtype=out.dtype, out=out)


@dataclass(frozen=True)
class Run:
    """A run of consecutive values and how it is packed; the bytes themselves are elsewhere.

    Attributes:
        format: of the elements.
        numel: values in the run.
        width: values of a packed row; the last row has the rest.
        dtype: of the values, BF16, FP16 or FP32.
    """

    format: Format
    numel: int
    width: int
    dtype: torch.dtype

    def _pieces(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(first value, rows, values a row, packed values a row, first byte) of the whole rows and of the last row."""
        rows, rest = divmod(self.numel, self.width)
        first_byte = rows * sum(self.format.row_bytes(self.width))
        if rows:
            yield 0, rows, self.width, self.width, 0
        if rest:
            yield rows * self.width, 1, rest, -(-rest // MXFP4_BLOCK) * MXFP4_BLOCK, first_byte

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(rows * sum(self.format.row_bytes(packed)) for _, rows, _, packed, _ in self._pieces())

    def _split(self, buffer: torch.Tensor, rows: int, packed: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self.format.row_bytes(packed)
        middle = first + rows * codes
        return buffer[first:middle].view(rows, codes), buffer[middle : middle + rows * scales].view(rows, scales)

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """Contiguous [numel] of `dtype` -> uint8 [nbytes]."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=flat.device)
        for start, rows, width, packed, first in self._pieces():
            values = flat[start : start + rows * width].view(rows, width)
            if packed != width:
                values = F.pad(values, (0, packed - width))
            self.format.encode(values, *self._split(buffer, rows, packed, first))
        return buffer

    def decode(self, buffer: torch.Tensor) -> torch.Tensor:
        """uint8 [nbytes] -> [numel] of `dtype`."""
        flat = torch.empty(self.numel, dtype=self.dtype, device=buffer.device)
        for start, rows, width, packed, first in self._pieces():
            values = flat[start : start + rows * width].view(rows, width)
            out = values if packed == width else values.new_empty(rows, packed)
            self.format.decode(*self._split(buffer, rows, packed, first), out)
            if out is not values:
                values.copy_(out[:, :width])
        return flat


@dataclass(frozen=True)
class View:
    """A tensor as a view of a run's decoded values."""

    run: Run
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, in the memory of [run.numel] decoded values; to autograd it is a tensor of its own."""
        return flat.new_empty(0).set_(flat.untyped_storage(), self.offset, self.size, self.stride)


def is_packable(t: torch.Tensor) -> bool:
    """Whether `t` is an activation that packing is for.

    It needs a gradient, is a plain dense BF16, FP16 or FP32 tensor on the host or a CUDA device, has at least
    SMALL_NUMEL values in rows of at least SHORT_ROW, and is not a parameter: neither one itself nor a view, cast or
    concatenation of parameters.
    """
    if type(t) is not torch.Tensor or not t.requires_grad or t.dtype not in _DTYPES:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(t):  # no memory of its own; torch.func refuses checkpoints
        return False
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:  # bytes have no tangent
        return False
    if t.layout != torch.strided or t.device.type not in ("cpu", "cuda"):
        return False
    geometry = _Geometry(t)
    if geometry.numel < SMALL_NUMEL or geometry.shortest_row < SHORT_ROW:
        return False
    return not _is_parameter(t)


# Nodes that only move, cast or gather values. What they make of parameters is still a weight.
_MOVES = frozenset(
    f"{name}Backward0"
    for name in "ToCopy T Transpose Permute View ReshapeAlias UnsafeView Unsqueeze Squeeze Select Slice Split "
    "SplitWithSizes Unbind Cat Stack Expand Clone Alias AsStrided Narrow Detach Contiguous".split()
)


def _is_parameter(t: torch.Tensor) -> bool:
    if isinstance(t, torch.nn.Parameter) or isinstance(t._base, torch.nn.Parameter):
        return True
    return t.grad_fn is not None and _comes_from_parameters(t.grad_fn, depth=8)


def _comes_from_parameters(node: torch.autograd.graph.Node, depth: int) -> bool:
    variable = getattr(node, "variable", None)  # AccumulateGrad: a leaf
    if variable is not None:
        return isinstance(variable, torch.nn.Parameter)
    if depth == 0 or node.name() not in _MOVES:
        return False
    inputs = [source for source, _ in node.next_functions if source is not None]
    return bool(inputs) and all(_comes_from_parameters(source, depth - 1) for source in inputs)


class _Geometry:
    """Where a tensor's values lie in its storage, expanded dimensions counted once."""

    def __init__(self, t: torch.Tensor) -> None:
        self.size, self.stride, self.offset = tuple(t.shape), tuple(t.stride()), t.storage_offset()
        # A dimension of stride 0 repeats the same values.
        self.real_size = tuple(1 if stride == 0 else size for size, stride in zip(self.size, self.stride, strict=True))
        self.numel = 1
        for size in self.real_size:
            self.numel *= size
        # Innermost first; of dimensions with equal strides (one of them has length 1) the later one is inside.
        order = sorted(range(len(self.size)), key=lambda dim: (self.stride[dim], -dim))
        inside = next((dim for dim in order if self.stride[dim] != 0), None)
        self.innermost = 1 if inside is None else self.size[inside]
        expected, self.dense = 1, True
        for dim in order:
            if self.real_size[dim] > 1:
                self.dense = self.dense and self.stride[dim] == expected
                expected *= self.real_size[dim]

    @property
    def shortest_row(self) -> int:
        """The innermost length, in memory and in the tensor's own order."""
        return min(self.innermost, self.real_size[-1]) if self.size else 1

    @property
    def extent(self) -> int:
        """Values of the storage from the first to the last that the tensor touches, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.real_size, self.stride, strict=True))


class _Packing:
    """What is known of one packed run: where it was taken from, and its bytes for as long as someone keeps them."""

    def __init__(self, run: Run, start: int, like: tuple, dense: bool, shape: tuple, buffer: torch.Tensor) -> None:
        self.run, self.start, self.like, self.dense, self.shape = run, start, like, dense, shape
        self.buffer = weakref.ref(buffer)


class Packer:
    """Packs tensors, and finds again what it has packed while anyone still keeps the bytes.

    A tensor is the same as one packed before if it lies in the same part of the same storage and that was not written
    to in between, as far as autograd counts writes: those through `.data`, or by kernels that autograd does not know,
    are not seen (autograd's own check does not see them either). Packers belong to one thread.
    """

    def __init__(self, format: Format) -> None:
        self.format = format
        self._storages: dict[int, tuple[StorageWeakRef, list[_Packing]]] = {}
        self._purge_at = 64

    @torch.no_grad()
    def pack(self, t: torch.Tensor) -> tuple[View, torch.Tensor]:
        """The view that `t` (as `is_packable` wants it) is of a run, and the run's bytes, uint8 [run.nbytes]."""
        t = t.detach()
        geometry = _Geometry(t)
        stream = torch.cuda.current_stream(t.device).cuda_stream if t.is_cuda else 0
        # Another stream would need to wait for the kernel that packs.
        like = (t.dtype, t._version, stream)
        storage = StorageWeakRef(t.untyped_storage())
        known = self._storages.get(storage.cdata)
        packings = known[1] if known else []
        for packing in packings:
            buffer = packing.buffer()
            if buffer is not None and packing.like == like:
                view = _view_of(packing, geometry)
                if view is not None:
                    return view, buffer

        width = geometry.innermost if geometry.dense else geometry.real_size[-1]
        run = Run(self.format, geometry.numel, width if width % MXFP4_BLOCK == 0 else _FLAT_WIDTH, t.dtype)
        if geometry.dense:
            flat = t.as_strided((geometry.numel,), (1,), geometry.offset)
        else:
            flat = t.as_strided(geometry.real_size, geometry.stride, geometry.offset).contiguous().view(-1)
        buffer = run.encode(flat)
        shape = () if geometry.dense else (geometry.size, geometry.stride)
        packing = _Packing(run, geometry.offset, like, geometry.dense, shape, buffer)
        self._remember(storage, packings, packing)
        view = _view_of(packing, geometry)
        assert view is not None
        return view, buffer

    def _remember(self, storage: StorageWeakRef, packings: list[_Packing], packing: _Packing) -> None:
        alive = [other for other in packings if other.buffer() is not None]
        # The weak reference keeps the storage's address from being used again while the entry is here.
        self._storages[storage.cdata] = (storage, [*alive, packing])
        if len(self._storages) > self._purge_at:
            self._storages = {
                key: (ref, packings)
                for key, (ref, packings) in self._storages.items()
                if not ref.expired() and any(packing.buffer() is not None for packing in packings)
            }
            self._purge_at = 2 * len(self._storages) + 64


def _view_of(packing: _Packing, geometry: _Geometry) -> View | None:
    """The tensor with `geometry` as a view of what was packed; None if that does not hold all of it."""
    if packing.dense:
        start = geometry.offset - packing.start
        if start < 0 or start + geometry.extent > packing.run.numel:
            return None
        return View(packing.run, geometry.size, geometry.stride, start)
    if packing.start != geometry.offset or packing.shape != (geometry.size, geometry.stride):
        return None
    # Packed without its gaps, in the tensor's own order.
    stride, step = [], 1
    for size, real, old in reversed(list(zip(geometry.size, geometry.real_size, geometry.stride, strict=True))):
        stride.append(0 if old == 0 and size > 1 else step)
        step *= real
    return View(packing.run, geometry.size, tuple(reversed(stride)), 0)


_threads = threading.local()


def packer_of_this_thread(format: Format) -> Packer:
    """The packer that shares what this thread has packed in `format`."""
    packers = _threads.__dict__.setdefault("packers", {})
    if format not in packers:
        packers[format] = Packer(format)
    return packers[format]
