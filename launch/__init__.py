# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The main job: `pretrain.py`, and the modules that it is made of, one job each."""
