# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What `ds-fp4 bench` measures."""
