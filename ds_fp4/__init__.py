# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""MXFP4 activations and expert-parallel traffic, FP8 compute, for Mixture-of-Experts training with DeepSpeed.

`import ds_fp4` anywhere before the DeepSpeed engine is built makes the `ds_fp4` block of its JSON configuration take
effect. `ds_fp4.ops` are the conversions themselves, `ds_fp4.formats` their definition in plain PyTorch.
`ds_fp4.checkpoint` and `ds_fp4.saved_tensors` keep activations packed, with or without an engine.
`ds_fp4.nn` has an expert for `deepspeed.moe.layer.MoE` that can be computed in FP8. `ds_fp4.weights_changed` is to be
called after expert weights were changed behind the engine's back.
"""

from ds_fp4 import engine, nn
from ds_fp4.checkpointing import checkpoint
from ds_fp4.experts import weights_changed
from ds_fp4.saving import saved_tensors
from ds_fp4.version import __version__

__all__ = ["__version__", "checkpoint", "nn", "saved_tensors", "weights_changed"]

engine.install()
