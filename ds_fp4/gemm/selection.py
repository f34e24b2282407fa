# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which backend computes which GEMM, and why.

Nothing is loaded before it is asked for: importing this module touches neither CUDA nor a GEMM library.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

from .backend import Backend, try_out

CHOICES = ("auto", "deepgemm", "cublas", "emulation")

# What "auto" tries on a GPU, in order. The emulation is never chosen there: it would be a silent fall in speed.
ORDER = {
    # One launch for all experts: 1.1 to 1.2x cuBLAS's loop, at 32 experts of 2048 rows on an H200.
    "forward": ("deepgemm", "cublas"),
    # cuBLAS writes BF16 straight into the gradient; DeepGEMM adds to zeroed FP32, which then has to be cast.
    "weight_gradient": ("cublas", "deepgemm"),
}
KEYS = {"forward": "ds_fp4.experts.gemm", "weight_gradient": "ds_fp4.experts.wgrad_gemm"}
HOPPER = 9

_CLASSES = {"deepgemm": "DeepGemmBackend", "cublas": "CublasBackend"}


class GemmBackends(NamedTuple):
    """The backend of forward and data-gradient GEMMs, and that of weight gradients."""

    forward: Backend
    weight_gradient: Backend


# By (name, device, gemm): the backend, or why it cannot be had. A library is loaded and tried once a process.
_loaded: dict[tuple[str, torch.device, str], Backend | str] = {}


def select(requested: str, device: torch.device | str, gemm: str = "forward") -> Backend:
    """The backend called `requested` for `gemm` ("forward" or "weight_gradient") on `device`, tried out.

    "auto" is the first of `ORDER` that works on a GPU, the emulation on the CPU.

    Raises:
        ValueError: if `requested` is not one of `CHOICES`.
        RuntimeError: if it cannot be had: why, and what to install or set.
    """
    if requested not in CHOICES:
        raise ValueError(f"{KEYS[gemm]} must be one of {', '.join(CHOICES)}, got {requested!r}")
    device = _indexed(torch.device(device))
    if requested == "emulation" or (requested == "auto" and device.type == "cpu"):
        return _emulation()
    _check_device(requested, device, gemm)
    names = ORDER[gemm] if requested == "auto" else (requested,)
    reasons = []
    for name in names:
        backend = _load(name, device, gemm)
        if isinstance(backend, Backend):
            return backend
        reasons.append(f"{name}: {backend}")
    raise RuntimeError(
        f"{KEYS[gemm]} = {requested!r} cannot be had on {device}. {'; '.join(reasons)}. {_how_to_fix(names, gemm)}"
    )


def choose(forward: str = "auto", weight_gradient: str = "auto", device: torch.device | str = "cpu") -> GemmBackends:
    """A backend for each GEMM, as `select`."""
    return GemmBackends(select(forward, device, "forward"), select(weight_gradient, device, "weight_gradient"))


def describe(device: torch.device | str, forward: str = "auto", weight_gradient: str = "auto") -> list[str]:
    """For people, a line an item: the backend of each GEMM on `device`, why, and what was passed over."""
    device = _indexed(torch.device(device))
    lines = []
    for gemm, requested in (("forward", forward), ("weight_gradient", weight_gradient)):
        label = {"forward": "forward and data gradient", "weight_gradient": "weight gradient"}[gemm]
        try:
            backend = select(requested, device, gemm)
        except (RuntimeError, ValueError) as error:
            lines.append(f"{label}: NONE: {error}")
            continue
        lines.append(f"{label}: {backend.name}, {_why(backend.name, requested, device, gemm)}: {backend.describe()}")
        if requested == "auto" and device.type != "cpu":
            for name in ORDER[gemm][: ORDER[gemm].index(backend.name)]:
                lines.append(f"{label}: not {name}: {_loaded[name, device, gemm]}")
    return lines


def _why(name: str, requested: str, device: torch.device, gemm: str) -> str:
    if requested != "auto":
        return f"set by {KEYS[gemm]}"
    if device.type == "cpu":
        return "the only one on the CPU"
    return "the first choice" if ORDER[gemm][0] == name else "the next one that works"


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _emulation() -> Backend:
    from .emulation import EmulationBackend

    return EmulationBackend()


def _check_device(requested: str, device: torch.device, gemm: str) -> None:
    if device.type != "cuda":
        raise RuntimeError(
            f"{KEYS[gemm]} = {requested!r} needs an NVIDIA GPU of compute capability {HOPPER}.x, got {device}; on the "
            "CPU set 'auto' or 'emulation'"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"{KEYS[gemm]} = {requested!r} on {device}: torch {torch.__version__} sees no GPU")
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:
        raise RuntimeError(
            f"FP8 expert GEMMs need a Hopper GPU (H100, H200, H800; compute capability {HOPPER}.x), got "
            f"{torch.cuda.get_device_name(device)} ({major}.{minor}). The codec level works there: set "
            "ds_fp4.experts.compute to 'bf16'"
        )


def _how_to_fix(names: tuple[str, ...], gemm: str) -> str:
    fixes = []
    if "deepgemm" in names:
        fixes.append("For DeepGEMM: pip install 'ds_fp4[deepgemm]', with CUDA_HOME set to a toolkit that has nvcc")
    if "cublas" in names:
        fixes.append("For cuBLAS: torch 2.11 or later built for CUDA 12.9 or later")
    return ". ".join([*fixes, f"Or set {KEYS[gemm]} to another of {', '.join(CHOICES)}"])


def _load(name: str, device: torch.device, gemm: str) -> Backend | str:
    """The backend, loaded and tried out with `gemm` once a process and device; or why it cannot be had."""
    key = (name, device, gemm)
    if key not in _loaded:
        try:
            with torch.cuda.device(device):
                backend = getattr(importlib.import_module(f".{name}", __package__), _CLASSES[name])(device)
                try_out(backend, gemm, device)
            _loaded[key] = backend
        except Exception as error:  # a library may raise anything, and what it raises is the reason
            _loaded[key] = f"{type(error).__name__}: {error}".strip()
    return _loaded[key]
