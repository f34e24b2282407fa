# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Benchmarks, run by `ds-fp4 bench`: each measures its peer in the same run."""
