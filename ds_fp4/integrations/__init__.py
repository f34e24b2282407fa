# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Everything that depends on DeepSpeed's internals: one module per MoE layer, and the seam both go through."""
