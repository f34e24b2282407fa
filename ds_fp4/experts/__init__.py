# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level: an MoE layer's experts computed in FP8 straight from the FP4 rows that were sent.

    spec        what one layer is, and what its recipe asks for
    records     what a row looks like on each leg, and how it becomes a GEMM operand
    exchange    counts, splits and collectives of one layer
    weights     FP8 copies of the expert weights, and when they are stale
    compute     the stages between collectives: conversions, grouped GEMMs, activation
    function    the autograd function that puts them in order
    layer       one layer of the model: its pieces, and the checks before the function

`records` and `compute` are classes, so that tests can put exact ones in their place and compare everything else with
DeepSpeed in FP32.
"""

from ds_fp4.experts.layer import ExpertLayer, record_formats
from ds_fp4.experts.spec import LayerSpec
from ds_fp4.experts.weights import weights_changed

__all__ = ["ExpertLayer", "LayerSpec", "record_formats", "weights_changed"]
