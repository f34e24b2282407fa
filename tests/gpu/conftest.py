# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Tests of the kernels on one GPU. Without a GPU they skip themselves; with one, a backend that fails is a failure."""

import functools
import importlib.util

import pytest
import torch

from ds_fp4.ops import backends


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@functools.cache
def _backend(name: str) -> backends.Backend:
    return backends.select(name)


def _missing(name: str) -> str | None:
    """What the backend needs and the machine lacks."""
    if name == "nvrtc":
        return None if importlib.util.find_spec("cupy") else "CuPy is not installed"
    from ds_fp4.ops import builder

    return None if builder.nvcc_version() else "there is no nvcc"


@pytest.fixture(params=backends.CHOICES)
def kernels(request, monkeypatch):
    """Runs a test once with each backend; each is compiled and loaded once a session."""
    missing = _missing(request.param)
    if missing:
        pytest.skip(missing)
    monkeypatch.setattr(backends, "_backend", _backend(request.param))
    monkeypatch.setattr(backends, "_prepared", set())
    backends.load_kernels()
    return request.param
