# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The fused and routing kernels in plain PyTorch: what `ds_fp4.ops` does for host tensors, and what its kernels are
tested against.

    activation   swiglu_forward, swiglu_backward: between an expert's two GEMMs
    rows         gather_rows, combine_rows: records in another order, and sums of rows
    routing      who gets which token, in which order experts see them, and the way back

Conversions here are those of `ds_fp4.formats`; these modules say how they are put together.
"""

from .activation import ACTIVATIONS, SwigluBackward, SwigluForward, swiglu_backward, swiglu_forward
from .routing import (
    ReceivePlan,
    SendPlan,
    gather_gradients,
    pack_routing,
    plan_receive,
    plan_send,
    return_gradients,
    routing_bytes,
)
from .rows import combine_rows, gather_rows

__all__ = [
    "ACTIVATIONS",
    "ReceivePlan",
    "SendPlan",
    "SwigluBackward",
    "SwigluForward",
    "combine_rows",
    "gather_gradients",
    "gather_rows",
    "pack_routing",
    "plan_receive",
    "plan_send",
    "return_gradients",
    "routing_bytes",
    "swiglu_backward",
    "swiglu_forward",
]
