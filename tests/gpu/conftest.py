# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Tests here need one CUDA GPU and skip themselves without."""

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def device():
    return torch.device("cuda")
