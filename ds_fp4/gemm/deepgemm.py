# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""DeepGEMM's grouped FP8 kernels, one launch for all experts.

Its SM90 kernels take operands and scales as they lie here: K-major codes, FP32 scales with strides (1, align4(rows)),
rows of an expert padded to 128. The weight-gradient kernel ("k-grouped", K being rows) reads, for each expert in turn,
a row-major block [N, p_e]. It only ever adds to FP32, so its output is zeroed first and BF16 gradients are cast from
it. Kernels are compiled by nvcc on first use of a shape and kept in DG_JIT_CACHE_DIR (default ~/.deep_gemm).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch

from ds_fp4.formats.columns import TILE_ROWS

from .backend import Backend, Pair
from .groups import Groups

TESTED = {"sgl-deep-gemm": "0.1.4.post1", "apache-tvm-ffi": "0.1.11"}

# Tensor maps need strides that are multiples of 16 bytes; output tiles are 64 columns wide.
N_MULTIPLE = 64
K_MULTIPLE = 128

# With up to this many experts the weight-gradient kernel may pair blocks in clusters.
_CLUSTERED_GROUPS = 4


class DeepGemmBackend(Backend):
    """DeepGEMM, as PyPI's sgl-deep-gemm or built from DeepGEMM's sources."""

    name = "deepgemm"

    def __init__(self, device: torch.device) -> None:
        try:
            import deep_gemm
        except AssertionError as error:
            # Its only one at import, without words.
            raise RuntimeError("deep_gemm finds no CUDA toolkit to compile with: set CUDA_HOME") from error
        for call in ("m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous"):
            if not hasattr(deep_gemm, call):
                raise RuntimeError(f"deep_gemm {_version()} has no {call}")
        alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
        if alignment != TILE_ROWS:
            raise RuntimeError(f"deep_gemm {_version()} wants rows padded to {alignment}, not {TILE_ROWS}")
        self._library = deep_gemm

    def describe(self) -> str:
        found = {package: _installed(package) for package in TESTED}
        names = ", ".join(f"{package} {release or 'not installed'}" for package, release in found.items())
        tested = ", ".join(f"{package} {release}" for package, release in TESTED.items())
        if found == TESTED:
            return f"{names}: the tested versions"
        return f"deep_gemm {_version()} ({names}): NOT TESTED, tested are {tested}"

    def check_shape(self, gemm: str, n: int, k: int) -> None:
        multiples = {"N": (n, N_MULTIPLE), "K": (k, K_MULTIPLE if gemm == "forward" else N_MULTIPLE)}
        for name, (width, multiple) in multiples.items():
            if width % multiple:
                raise ValueError(
                    f"DeepGEMM is used only where {name} is a multiple of {multiple} in a {gemm} GEMM, got {width}; "
                    "the cublas backend may take it, the emulation takes any"
                )

    @torch.no_grad()
    def _grouped_gemm(self, a: Pair, b: Pair, groups: Groups, out: torch.Tensor) -> None:
        self._library.m_grouped_fp8_gemm_nt_contiguous(tuple(a), tuple(b), out, groups.m_indices)

    @torch.no_grad()
    def _weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        n, k = a[1].shape[0], b[1].shape[0]
        in_place = len(outs) == 1 and outs[0].dtype == torch.float32
        gradient = (
            outs[0] if in_place else torch.empty(len(groups.sizes), n, k, dtype=torch.float32, device=a[0].device)
        )
        gradient.zero_()
        with self._without_clusters(len(groups.sizes)):
            self._library.k_grouped_fp8_gemm_nt_contiguous(
                tuple(a), tuple(b), gradient, list(groups.sizes), groups.padded_offsets.diff(), gradient
            )
        if not in_place:
            self._hand_out(gradient, outs)

    @staticmethod
    def _hand_out(gradient: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        if len(outs) == 2 and outs[0].shape == outs[1].shape and outs[0].dtype == torch.bfloat16:
            from ds_fp4 import ops

            ops.split_weight_gradient(gradient, out=tuple(outs))
            return
        for out, part in zip(outs, gradient.split([out.shape[1] for out in outs], dim=1), strict=True):
            out.copy_(part)

    @contextmanager
    def _without_clusters(self, experts: int) -> Iterator[None]:
        """An odd number of SMs, of which the library makes no clusters, while a weight gradient is launched.

        With few experts it would pair blocks and multicast a tile to both. Pairs are counted over all experts'
        blocks: where an expert has an odd number, a pair straddles two experts and waits for a tile that is never
        sent. With more experts the library makes no clusters by itself.
        """
        if experts > _CLUSTERED_GROUPS:
            yield
            return
        sms = self._library.get_num_sms()
        self._library.set_num_sms(sms - 1 + sms % 2)
        try:
            yield
        finally:
            self._library.set_num_sms(sms)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _version() -> str:
    import deep_gemm

    return getattr(deep_gemm, "__version__", "of an unknown version")
