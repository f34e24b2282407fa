# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What several of these tests share."""

import pytest

from tests.unit.host_kernels import HostKernels


@pytest.fixture(scope="session")
def host(tmp_path_factory) -> HostKernels:
    """The kernels, compiled for the host once a session."""
    return HostKernels(tmp_path_factory.mktemp("host"))
