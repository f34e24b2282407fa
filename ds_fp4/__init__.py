# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""MXFP4 activations and expert-parallel traffic, FP8 compute, for Mixture-of-Experts training with DeepSpeed.

`import ds_fp4` anywhere before the DeepSpeed engine is built makes the `ds_fp4` block of its JSON configuration take
effect. `ds_fp4.ops` are the conversions themselves, `ds_fp4.formats` their definition in plain PyTorch.
"""

from ds_fp4 import engine
from ds_fp4.version import __version__

__all__ = ["__version__"]

engine.install()
