# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Contract with DeepSpeed's internals: these fail when a release moves what ds_fp4 hooks into."""

from __future__ import annotations

import inspect
import threading
import types

import pytest
import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.moe import sharded_moe
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_fp4  # noqa: F401
from ds_fp4.all_to_all import Leg
from ds_fp4.integrations import autoep, classic, seam

LEGS = (Leg("dispatch", None, None), Leg("combine", None, None))


def test_the_hook_is_in_place_once():
    from ds_fp4 import engine

    hook = DeepSpeedEngine._configure_distributed_model
    assert hook._ds_fp4_hook
    engine.install()
    assert DeepSpeedEngine._configure_distributed_model is hook
    source = inspect.getsource(DeepSpeedEngine.__init__)
    expert, distributed, optimizer = (
        source.index(call)
        for call in (
            "self._configure_expert_parallel(",
            "self._configure_distributed_model(",
            "self._configure_optimizer(",
        )
    )
    assert expert < distributed < optimizer


@pytest.mark.parametrize(
    "module, layer, function",
    [(sharded_moe, sharded_moe.MOELayer, "_AllToAll"), (auto_ep_layer, auto_ep_layer.AutoEPMoELayer, "_AllToAllV")],
)
def test_a_layer_exchanges_twice_per_forward_by_that_name(module, layer, function):
    names = [name for name in ("forward", "_forward") if name in vars(layer)]
    calls = sum(inspect.getsource(getattr(layer, name)).count(f"{function}.apply(") for name in names)
    assert calls == 2
    assert hasattr(module, function)


def test_shims_install_once_and_are_transparent_without_a_frame():
    classic.install()
    autoep.install()
    shim = sharded_moe._AllToAll
    classic.install()
    assert sharded_moe._AllToAll is shim and shim._ds_fp4_shim


def test_a_function_with_other_arguments_is_refused():
    module = types.ModuleType("moved")

    class Moved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, group, input, extra):
            return input

    module.Moved = Moved
    with pytest.raises(seam.SeamError, match=r"takes \['group', 'input', 'extra'\]"):
        seam.install_shim(module, "Moved", ["group", "input"], None)
    with pytest.raises(seam.SeamError, match="it does not exist"):
        seam.install_shim(module, "Gone", ["group", "input"], None)


class _Layer(torch.nn.Module):
    def __init__(self, exchange, calls: int) -> None:
        super().__init__()
        self.exchange, self.calls = exchange, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = self.exchange(x)
        return x


@pytest.fixture
def exchange():
    module = types.ModuleType("layers")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

    module.Function = Function
    seen = []

    def adapt(leg, x):
        seen.append(leg.name)
        return x

    seam.install_shim(module, "Function", ["x"], adapt)
    return lambda x: module.Function.apply(x), seen


def test_first_call_is_dispatch_second_is_combine(exchange):
    call, seen = exchange
    layer = _Layer(call, 2)
    seam.swap_class(layer, "layer", LEGS)
    assert isinstance(layer, _Layer) and layer.state_dict() == {}
    layer(torch.ones(1))
    assert seen == ["dispatch", "combine"]
    call(torch.ones(1))
    assert len(seen) == 2
    seam.restore_class(layer)
    assert type(layer) is _Layer
    layer(torch.ones(1))
    assert len(seen) == 2


@pytest.mark.parametrize("calls, message", ((3, "a third all-to-all"), (1, "made 1 all-to-all calls")))
def test_another_number_of_calls_is_an_error(exchange, calls, message):
    layer = _Layer(exchange[0], calls)
    seam.swap_class(layer, "blocks.3", LEGS)
    with pytest.raises(seam.SeamError, match=f"blocks.3.*{message}"):
        layer(torch.ones(1))
    # the frame is gone: the same thread can go on
    exchange[0](torch.ones(1))


def test_frames_belong_to_their_thread(exchange):
    call, seen = exchange
    with pytest.raises(seam.SeamError):
        with seam.enter_layer("layer", LEGS):
            thread = threading.Thread(target=lambda: call(torch.ones(1)))
            thread.start()
            thread.join()
            assert seen == []


def test_an_exception_in_a_layer_keeps_its_type(exchange):

    class Broken(_Layer):
        def forward(self, x):
            raise ZeroDivisionError

    layer = Broken(exchange[0], 2)
    seam.swap_class(layer, "layer", LEGS)
    with pytest.raises(ZeroDivisionError):
        layer(torch.ones(1))


def test_deepspeeds_checkpointing_passes_through_one_function():
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing

    from ds_fp4.integrations import checkpointing

    checkpointing._install_deepspeed_shim()
    checkpointing._install_deepspeed_shim()
    assert deepspeed_checkpointing.CheckpointFunction.__mro__[1].__name__ == "CheckpointFunction"
    source = inspect.getsource(deepspeed_checkpointing.checkpoint)
    assert "CheckpointFunction.apply(function, all_outputs, *args)" in source
    assert all(
        getattr(deepspeed_checkpointing, switch) is False for switch in checkpointing._DEEPSPEED_FEATURES.values()
    )


def test_the_classic_layer_keeps_its_gates_results_in_two_attributes():
    source = inspect.getsource(inspect.unwrap(sharded_moe.MOELayer.forward))
    assert "self.l_aux, C, E, indices_, locations_, gates_, self.exp_counts = self.gate(" in source


def test_transformers_gives_its_layers_a_function_that_is_recognized():
    from ds_fp4.checkpointing import CheckpointOptions
    from ds_fp4.integrations.checkpointing import _HF_FUNCTION, redirected
    from tests.distributed.models import mixtral

    model = mixtral()
    options = CheckpointOptions("fp8", exact=False)
    for arguments, offload in (
        ({}, "none"),
        (dict(offload=True), "cpu"),
        (dict(gradient_checkpointing_kwargs={"use_reentrant": True}), "none"),
        (dict(gradient_checkpointing_kwargs={"use_reentrant": False, "early_stop": False}), "none"),
    ):
        model.gradient_checkpointing_enable(**arguments)
        for layer in model.model.layers:
            assert layer.gradient_checkpointing
            replacement = redirected(layer.__dict__[_HF_FUNCTION], options)
            assert (replacement._options.offload, replacement._options.format) == (offload, "fp8")
    assert replacement._keywords == {"early_stop": False}
    assert redirected(print, options) is None
