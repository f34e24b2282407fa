# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Imported last by the fork server: what every rank would do again, and how the collector is to see it."""

import gc

import deepspeed.ops
import torch

if not torch.cuda.is_available():  # it asks GPUs too
    # Compiles test programs where it is first read, which `deepspeed.init_distributed` does.
    _ = deepspeed.ops.__compatible_ops__

# A collection walks every object there is, and so copies the pages that a rank shares with the server: 0.3 s in each.
gc.collect()
gc.freeze()
