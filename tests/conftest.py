# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""For all tests: what was imported to collect them is not looked at again by each garbage collection."""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
