# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The version of ds_fp4, as installed."""

from importlib.metadata import version

__version__ = version("ds_fp4")
