# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""cuBLASLt's block-scaled FP8 matmul, called in the library that torch has loaded.

torch's own call asks the heuristic, builds descriptors and allocates anew each time, some 70 us of host time a GEMM:
the GPU then waits for two thirds of a layer of 64 experts of Qwen3-235B. Here a shape's descriptors and algorithm are
made once, and a call sets two scale pointers and launches.

Only what cuBLAS documents is used: functions of its C interface, and values of enumerations in cublasLt.h, which are
part of that interface. `backend.try_out` compares a result before anything depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

import torch

# The first cuBLAS with 1 x 128 and 128 x 128 scaling on Hopper, that of CUDA 12.9.
MIN_VERSION = 120900
# What GEMMs take turns on: the last wave of one leaves multiprocessors idle, and the next one can have them at once.
# Three and four streams were no faster than two.
STREAMS = 2
# Bytes: what it wants of FP8 operands, their results and scales; and its heuristic's default.
MIN_ALIGNMENT, MAX_ALIGNMENT = 16, 256

# cublasLtMatmulMatrixScale_t
SCALE_1X128 = 4
SCALE_128X128 = 5

# cudaDataType_t, cublasComputeType_t, cublasOperation_t
_DATA_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_COMPUTE_FP32 = 68
_TRANSPOSED = 1

# cublasLtMatmulDescAttributes_t
_TRANSPOSE_A, _SCALE_POINTER_A, _SCALE_POINTER_B, _SCALE_MODE_A, _SCALE_MODE_B = 3, 17, 18, 31, 32
# cublasLtMatmulPreferenceAttributes_t
_ALIGNMENT_A, _ALIGNMENT_B, _ALIGNMENT_C, _ALIGNMENT_D = 5, 6, 7, 8


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = [("data", c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class _Plan(NamedTuple):
    """Layouts and algorithm of one shape and alignment."""

    a: c_void_p
    b: c_void_p
    out: c_void_p
    algorithm: object  # a reference to an _Algorithm


_SET = "cublasLtMatmulDescSetAttribute"
_SIGNATURES = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    _SET: [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, POINTER(_Heuristic), POINTER(c_int)],
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


class CublasLt:
    """libcublasLt of torch's CUDA version.

    Raises:
        RuntimeError: if it cannot be loaded or is too old.
    """

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
        name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
        try:
            # torch is linked to it: this finds what is loaded already, wherever it lies.
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise RuntimeError(f"{name} cannot be loaded: {error}") from error
        self._library.cublasLtGetVersion.restype = c_size_t
        self._library.cublasLtGetStatusString.argtypes = [c_int]
        self._library.cublasLtGetStatusString.restype = c_char_p
        self.version = self._library.cublasLtGetVersion()
        if self.version < MIN_VERSION:
            raise RuntimeError(f"cuBLASLt {self.version} has no block scaling on Hopper, {MIN_VERSION} has")
        for function, signature in _SIGNATURES.items():
            getattr(self._library, function).argtypes = signature
            getattr(self._library, function).restype = c_int
        # Their status is for the caller to look at.
        self.find = self._library.cublasLtMatmulAlgoGetHeuristic
        self.set = getattr(self._library, _SET)
        self.matmul = self._library.cublasLtMatmul

    def call(self, function: str, *args: object) -> None:
        """RuntimeError with cuBLAS's words if `function` fails."""
        status = getattr(self._library, function)(*args)
        if status:
            self.fail(function, status)

    def fail(self, function: str, status: int) -> None:
        words = self._library.cublasLtGetStatusString(status)
        raise RuntimeError(f"{function}: {words.decode() if words else status}")

    def make(self, function: str, *args: object) -> c_void_p:
        """The object that `function` makes."""
        made = c_void_p()
        self.call(function, byref(made), *args)
        return made


class ScaledMatmul:
    """out [M, N] = a [M, K] @ b [N, K]^T; sums are FP32 throughout.

    Made for one device, one kind of scales of each operand, and one dtype of `out`. It works without a workspace: with
    one cuBLAS's first choice of an algorithm has some of it cleared before each GEMM, and is no faster.

    Args:
        a_scaling, b_scaling: SCALE_1X128 or SCALE_128X128, the latter of one of them at most.
        out_dtype: bfloat16 or float32.
    """

    def __init__(
        self, library: CublasLt, device: torch.device, a_scaling: int, b_scaling: int, out_dtype: torch.dtype
    ) -> None:
        self._library, self._device, self._out_dtype = library, device, out_dtype
        with torch.cuda.device(device):
            self._handle = library.make("cublasLtCreate")
        # cuBLAS is column-major: it computes out^T = b @ a^T, so that its A is b.
        self._operation = library.make("cublasLtMatmulDescCreate", _COMPUTE_FP32, _DATA_TYPES[torch.float32])
        for attribute, value in (
            (_TRANSPOSE_A, _TRANSPOSED),
            (_SCALE_MODE_A, b_scaling),
            (_SCALE_MODE_B, a_scaling),
        ):
            library.call(_SET, *self._attribute(attribute, c_int32(value)))
        self._a_scales, self._b_scales = c_void_p(), c_void_p()
        # What a launch passes each time, made once: with an expert's GEMM in 15 us every one counts.
        self._set_a_scales = self._attribute(_SCALE_POINTER_B, self._a_scales)
        self._set_b_scales = self._attribute(_SCALE_POINTER_A, self._b_scales)
        self._one, self._zero = byref(c_float(1.0)), byref(c_float(0.0))
        self._plans: dict[tuple[int, ...], _Plan] = {}
        # The streams beside each stream that this was called on: callers do not come to wait for each other.
        self._beside: dict[int, list[torch.cuda.Stream]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def launches(self) -> Iterator[Callable[..., None]]:
        """A function that launches GEMMs, for as long as this is open.

        They run when what is on the device's current stream has, in any order, beside each other and what comes on
        that stream while this is open; after that the stream waits for all of them. So what they read is to be
        launched before this is opened, and to live until it is closed.

        It takes addresses, multiples of 16, since to make tensors of each expert's part would cost more than the
        launch:

        a, b: E4M3 [M, K] and [N, K], rows one after the other.
        a_scales: FP32 [M, K/128] with strides (1, M); or [ceil(M/128), K/128] with rows of K/128 values rounded up to
            a multiple of four.
        b_scales: the same of b.
        out: [M, N], rows one after the other.
        shape: (M, N, K).

        It raises ValueError if an address is not aligned, RuntimeError if cuBLAS cannot do this. Threads may launch at
        the same time, each with a function of its own: device and stream are those of the thread that opened it.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            others = self._beside.get(current.cuda_stream)
            if others is None:
                others = [torch.cuda.Stream(self._device) for _ in range(STREAMS - 1)]
                others = self._beside.setdefault(current.cuda_stream, others)
            streams = itertools.cycle(stream.cuda_stream for stream in (current, *others))

            def launch(a: int, a_scales: int, b: int, b_scales: int, out: int, shape: tuple[int, int, int]) -> None:
                self._launch(a, a_scales, b, b_scales, out, shape, next(streams))

            for stream in others:
                stream.wait_stream(current)
            try:
                yield launch
            finally:
                for stream in others:
                    current.wait_stream(stream)

    def _launch(
        self,
        a: int,
        a_scales: int,
        b: int,
        b_scales: int,
        out: int,
        shape: tuple[int, int, int],
        stream: int,
    ) -> None:
        if (a | a_scales | b | b_scales | out) % MIN_ALIGNMENT:
            places = dict(a=a, a_scales=a_scales, b=b, b_scales=b_scales, out=out)
            unaligned = [f"{name} at {address:#x}" for name, address in places.items() if address % MIN_ALIGNMENT]
            raise ValueError(
                f"cuBLAS reads and writes at multiples of {MIN_ALIGNMENT} bytes, got {', '.join(unaligned)}: give it "
                "tensors of their own, or views that begin there"
            )
        alignment = _alignment(a | b | out)
        with self._lock:  # the pointers go through the one descriptor
            self._a_scales.value, self._b_scales.value = a_scales, b_scales
            status = self._library.set(*self._set_a_scales) or self._library.set(*self._set_b_scales)
            if status:
                self._library.fail(_SET, status)
            plan = self._plans.get((*shape, alignment))
            if plan is None:
                plan = self._plans[(*shape, alignment)] = self._make_plan(shape, alignment)
            status = self._library.matmul(
                self._handle, self._operation,
                self._one, b, plan.b, a, plan.a,
                self._zero, out, plan.out, out, plan.out,
                plan.algorithm, None, 0, stream,
            )  # fmt: skip
        if status:
            self._library.fail(f"cublasLtMatmul of (M, N, K) = {shape}", status)

    def _attribute(self, attribute: int, value: ctypes._SimpleCData) -> tuple:
        """Arguments that set an attribute of the operation to what `value` then holds."""
        return self._operation, attribute, byref(value), ctypes.sizeof(value)

    def _make_plan(self, shape: tuple[int, int, int], alignment: int) -> _Plan:
        m, n, k = shape
        codes, result = _DATA_TYPES[torch.float8_e4m3fn], _DATA_TYPES[self._out_dtype]
        make, call = self._library.make, self._library.call
        a = make("cublasLtMatrixLayoutCreate", codes, k, m, k)
        b = make("cublasLtMatrixLayoutCreate", codes, k, n, k)
        out = make("cublasLtMatrixLayoutCreate", result, n, m, n)
        preference = make("cublasLtMatmulPreferenceCreate")
        found, count = _Heuristic(), c_int(0)
        try:
            for attribute, value in (
                (_ALIGNMENT_A, c_uint32(alignment)),
                (_ALIGNMENT_B, c_uint32(alignment)),
                (_ALIGNMENT_C, c_uint32(alignment)),
                (_ALIGNMENT_D, c_uint32(alignment)),
            ):
                call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value), ctypes.sizeof(value))
            status = self._library.find(
                self._handle, self._operation, b, a, out, out, preference, 1, byref(found), byref(count)
            )
        finally:
            call("cublasLtMatmulPreferenceDestroy", preference)
        if status or found.state:
            self._library.fail(f"cublasLtMatmulAlgoGetHeuristic of (M, N, K) = {shape}", status or found.state)
        if not count.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for (M, N, K) = {shape} on {self._device}")
        return _Plan(a, b, out, byref(found.algorithm))


def _alignment(address: int) -> int:
    """The largest power of two up to `MAX_ALIGNMENT` that divides it."""
    return min(address & -address, MAX_ALIGNMENT) if address else MAX_ALIGNMENT
