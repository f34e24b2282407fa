# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""DeepGEMM's grouped FP8 kernels, one launch for all experts.

Its SM90 kernels take operands and scales as they lie here: K-major codes, FP32 scales with strides (1, align4(rows)),
rows of an expert padded to 128. The weight-gradient kernel ("k-grouped", K being rows) reads, for each expert in turn,
a row-major block [N, p_e]. It only ever adds to FP32, so its output is zeroed first and BF16 gradients are cast from
it. Kernels are compiled by nvcc on first use of a shape and kept in DG_JIT_CACHE_DIR (default ~/.deep_gemm).
"""

from __future__ import annotations

from collections.abc import Sequence
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
        experts, device = len(groups.sizes), a[0].device
        # With few experts the library would pair blocks in clusters and multicast a tile to both. Pairs are counted
        # over all experts' blocks: where an expert has an odd number, a pair straddles two experts and waits for a
        # tile that is never sent. Empty experts at the end, which it skips, make them too many for that.
        more = max(0, _CLUSTERED_GROUPS + 1 - experts)
        sizes, device_sizes = list(groups.sizes) + more * [0], groups.padded_offsets.diff()
        if more:
            device_sizes = torch.nn.functional.pad(device_sizes, (0, more))
        in_place = len(outs) == 1 and outs[0].dtype == torch.float32 and not more
        gradient = outs[0] if in_place else torch.empty(experts + more, n, k, dtype=torch.float32, device=device)
        gradient.zero_()
        self._library.k_grouped_fp8_gemm_nt_contiguous(tuple(a), tuple(b), gradient, sizes, device_sizes, gradient)
        if not in_place:
            self._hand_out(gradient[:experts], outs)

    @staticmethod
    def _hand_out(gradient: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        if len(outs) == 2 and outs[0].shape == outs[1].shape and outs[0].dtype == torch.bfloat16:
            from ds_fp4 import ops

            ops.split_weight_gradient(gradient, out=tuple(outs))
            return
        for out, part in zip(outs, gradient.split([out.shape[1] for out in outs], dim=1), strict=True):
            out.copy_(part)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _version() -> str:
    import deep_gemm

    return getattr(deep_gemm, "__version__", "of an unknown version")
