# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The command line: `ds-fp4 run` and `ds-fp4 report`."""
