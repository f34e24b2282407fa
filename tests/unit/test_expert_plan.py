# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which layers get the expert level: by preset where they can, by name or not at all where it was asked for."""

from __future__ import annotations

import copy
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_fp4 import engine
from ds_fp4.config import ConfigError
from ds_fp4.gemm import GemmBackends
from ds_fp4.gemm.emulation import EmulationBackend
from ds_fp4.integrations.seam import SeamError
from ds_fp4.startup import Announcement, judge
from ds_fp4.summary import summary_lines

CPU = torch.device("cpu")


def _layer(hidden: int = 128, intermediate: int = 128, **attributes) -> AutoEPMoELayer:
    """An AutoEP layer as far as ds_fp4 looks at it before training."""
    layer = AutoEPMoELayer.__new__(AutoEPMoELayer)
    torch.nn.Module.__init__(layer)
    activation = attributes.pop("activation", "swiglu")
    layer.experts = attributes.pop("experts", None) or GroupedExperts(hidden, intermediate, 4, activation=activation)
    defaults = {
        "hidden_size": hidden,
        "ep_size": 1,
        "ep_group": None,
        "num_local_experts": 4,
        "top_k": 2,
        "score_apply": "post",
        "comm_backend": "comm",
        "folding_group_handles": None,
    }
    for name, value in {**defaults, **attributes}.items():
        setattr(layer, name, value)
    return layer


def _plan(block: dict, device: torch.device = CPU, announcement: Announcement | None = None, **layer):
    model = torch.nn.ModuleDict({"moe": _layer(**layer)})
    config = {"ds_fp4": {"enabled": True, **block}}
    return engine.make_plan(config, model, device=device, announcement=announcement or Announcement("0"))


def test_by_preset():
    plan = _plan({})
    assert [layer.name for layer in plan.expert_level] == ["moe"] and plan.compressed == []
    text = "\n".join(summary_lines(plan))
    assert "experts computed in FP8 by emulation (expert level), gate and up projections kept in fp8" in text
    assert _plan({"recipe": "bf16"}).expert_level == []
    assert _plan({"experts": {"compute": "bf16"}}).expert_level == []


def test_a_checkpointing_that_moves_the_loss_says_so():
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Sequential(_layer())])})

    def warned(**keys) -> bool:
        config = {"ds_fp4": {"enabled": True, "checkpointing": {"enabled": True, **keys}}}
        plan = engine.make_plan(config, model, device=CPU, announcement=Announcement("0"))
        return any("moved the loss" in line for line in summary_lines(plan))

    assert warned(format="mxfp4") and warned(format="mxfp4", scope=[])
    assert warned(format="mxfp4", scope=["layers.*"]) and not warned(format="mxfp4", scope=["layers.0.0.experts"])
    assert not warned() and not warned(format="mxfp4", exact=False) and not warned(format="mxfp4", scope="experts")


def test_keys_without_effect_are_named():
    def named(block: dict) -> list[str]:
        lines = summary_lines(_plan(block))
        return [line.split()[2].rstrip(":") for line in lines if line.startswith("  no effect: ")]

    both = {"recompute": "fc1", "saved_activations": "mxfp4"}
    assert named({"experts": both}) == ["ds_fp4.experts.saved_activations"]
    assert named({"experts": {"saved_activations": "mxfp4"}}) == named({"experts": {"recompute": "fc1"}}) == []
    assert named({"experts": {"compute": "bf16"}}) == named({"recipe": "bf16"}) == []
    assert named({"recipe": "bf16", "experts": {"weight_cache": "step"}}) == ["ds_fp4.experts.weight_cache"]
    saved = {"saved_activations": "mxfp4"}
    assert named({"experts": saved, "layers": {"moe": {"experts": {"recompute": "fc1"}}}}) == [
        "ds_fp4.experts.saved_activations"
    ]
    assert named({"experts": saved, "layers": {"moe": {"experts": both}}}) == [
        "ds_fp4.layers.moe.experts.saved_activations"
    ]
    assert named({"experts": saved, "layers": {"moe": "bf16"}}) == []  # another recipe starts afresh
    # What has an effect in one of the layers has one.
    model = torch.nn.ModuleDict({"a": _layer(), "b": _layer()})
    block = {"enabled": True, "experts": saved, "layers": {"a": {"experts": {"recompute": "fc1"}}}}
    plan = engine.make_plan({"ds_fp4": block}, model, device=CPU, announcement=Announcement("0"))
    assert not any("no effect" in line for line in summary_lines(plan))


class _Biased(GroupedExperts):
    def __init__(self) -> None:
        super().__init__(128, 128, 4)
        self.b1 = torch.nn.Parameter(torch.zeros(4, 128))


class _Scaled(GroupedExperts):
    def forward(self, x, num_tokens_per_expert):
        return 2 * super().forward(x, num_tokens_per_expert)


def _patched() -> GroupedExperts:
    experts = GroupedExperts(128, 128, 4)
    experts.forward = lambda x, counts: x
    return experts


OBSTACLES = [
    (dict(hidden=160), "hidden size 160 is not a multiple of 128"),
    (dict(intermediate=192), "intermediate size 192 is not a multiple of 128"),
    (dict(score_apply="pre"), 'routing weights before the experts .*score_apply "pre"'),
    (
        dict(folding_group_handles=SimpleNamespace(spec=SimpleNamespace(tp_size=2))),
        "tensor parallelism of size 2 is folded",
    ),
    (dict(top_k=40), "a token 40 experts, more than 32"),
    (dict(experts=torch.nn.Linear(4, 4)), "its experts are Linear, not GroupedExperts"),
    (dict(experts=_Scaled(128, 128, 4)), "_Scaled has a forward of its own in place of DeepSpeed's"),
    (dict(experts=_patched()), "GroupedExperts has a forward of its own in place of DeepSpeed's"),
    (dict(_forward=lambda hidden_states: hidden_states), "AutoEPMoELayer has a _forward of its own"),
    (dict(experts=_Biased()), "parameters are b1, w1, w2, w3, not w1, w2, w3"),
]


@pytest.mark.parametrize("layer, reason", OBSTACLES, ids=[reason[:24] for _, reason in OBSTACLES])
def test_a_layer_that_cannot_stays_at_the_codec_level_or_is_refused(layer, reason):
    plan = _plan({}, **layer)
    assert plan.expert_level == []
    (line,) = (line for line in summary_lines(plan) if "not computed in FP8" in line)
    assert re.search(f"not computed in FP8: moe: .*{reason}", line)
    with pytest.raises(ConfigError, match=f"ds_fp4.experts.compute = 'fp8': moe .*{reason}.*Set experts.compute to"):
        _plan({"experts": {"compute": "fp8"}}, **layer)
    for override in ({"experts": {"compute": "bf16"}}, "bf16", "fp8"):
        # The override, not the block, decides who asked.
        assert _plan({"experts": {"compute": "fp8"}, "layers": {"moe": override}}, **layer).expert_level == []


def test_layers_that_cannot_for_one_reason_are_one_line():
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([_layer(intermediate=64) for _ in range(4)])})
    with pytest.raises(ConfigError) as error:
        engine.make_plan({"ds_fp4": {"enabled": True, "experts": {"compute": "fp8"}}}, model, CPU, Announcement("0"))
    (line,) = str(error.value).splitlines()
    assert "layers.{0-3} (AutoEP) cannot be computed in FP8: its intermediate size 64" in line


def test_an_older_layer_without_the_seam(monkeypatch):
    layer = _layer()
    del layer.folding_group_handles
    monkeypatch.delattr(AutoEPMoELayer, "_finalize_output")
    plan = engine.make_plan(
        {"ds_fp4": {"enabled": True}}, torch.nn.ModuleDict({"moe": layer}), device=CPU, announcement=Announcement("0")
    )
    assert "has no seam for it" in plan.not_at_expert_level["moe"]


@pytest.mark.parametrize("key", ("gemm", "wgrad_gemm"))
@pytest.mark.parametrize("library", ("deepgemm", "cublas"))
def test_a_library_that_cannot_be_had_is_an_error(key, library):
    with pytest.raises(ConfigError, match=rf"ds_fp4.experts.{key} = '{library}' needs an NVIDIA GPU"):
        _plan({"experts": {key: library}})


def _gpu(monkeypatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    return torch.device("cuda", 0)


def test_gpus_older_than_hopper(monkeypatch):
    device = _gpu(monkeypatch, (8, 0))
    plan = _plan({}, device)
    assert plan.expert_level == []
    assert any("need a Hopper GPU" in line and "NVIDIA A100 (8.0)" in line for line in summary_lines(plan))
    for experts in ({"compute": "fp8"}, {"gemm": "cublas"}, {"wgrad_gemm": "deepgemm"}):
        with pytest.raises(ConfigError, match="moe .* need a Hopper GPU .*The codec level works there"):
            _plan({"experts": experts}, device)


def test_ranks_with_other_libraries_are_refused(monkeypatch):
    class Other(EmulationBackend):
        name = "cublas"

    announcements = [Announcement("0"), Announcement("0"), Announcement("0")]
    _plan({}, announcement=announcements[0])
    backends = GemmBackends(EmulationBackend(), Other())
    with monkeypatch.context() as patch:
        patch.setattr(engine.gemm, "choose", lambda *args: backends)
        _plan({}, announcement=announcements[1])
    _plan({}, announcement=announcements[2], device=_gpu(monkeypatch, (8, 0)))
    assert judge(announcements[:1]) is None
    verdict = judge(announcements)
    assert 'computed by: ["emulation", "emulation"] on rank 0; ["emulation", "cublas"] on rank 1;' in verdict
    assert '"DeepSpeed" on rank 2' in verdict


# What of DeepSpeed's is overridden or called


def test_a_moved_signature_is_refused(monkeypatch):
    def _forward(self, hidden_states, extra): ...

    monkeypatch.setattr(AutoEPMoELayer, "_forward", _forward)
    with pytest.raises(SeamError, match=r"AutoEPMoELayer._forward .*\['self', 'hidden_states', 'extra'\]"):
        _plan({})
    assert _plan({"recipe": "bf16"}).expert_level == []


@pytest.mark.parametrize("name", engine._CHANGE_WEIGHTS)
def test_a_method_that_changes_weights_without_the_hook_is_refused(monkeypatch, name):
    monkeypatch.setattr(DeepSpeedEngine, name, lambda self: None)
    with pytest.raises(SeamError, match=f"DeepSpeedEngine.{name}, after which"):
        _plan({})


def test_what_the_expert_level_takes_for_granted():
    forward = inspect.getsource(AutoEPMoELayer.forward)
    assert "self._forward(hidden_states)" in forward
    own = inspect.getsource(AutoEPMoELayer._forward)
    assert "RouterOutput(*self.router(x, self.expert_bias))" in own
    assert "self.tokens_per_expert.add_(ro.num_tokens_per_expert)" in own
    assert "return self._finalize_output(output, x, hidden_states, hdim)" in own
    assert list(inspect.signature(TokenChoiceTopKRouter.forward).parameters) == ["self", "x", "expert_bias"]
    # Every way to an optimizer step passes through the hooked method.
    assert "self._take_model_step(" in inspect.getsource(DeepSpeedEngine.step)
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert "self._take_model_step(" in inspect.getsource(PipelineEngine._exec_optimizer_step)
    assert PipelineEngine._take_model_step is DeepSpeedEngine._take_model_step


def test_classes_are_swapped_and_restored():
    model = torch.nn.ModuleDict({"moe": _layer()})
    layer, experts = model["moe"], model["moe"].experts
    keys, attributes = list(model.state_dict()), set(layer.__dict__)
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    plan = engine.make_plan({"ds_fp4": {"enabled": True}}, model, device=CPU, announcement=Announcement("0"))
    for _ in range(2):
        engine.apply(plan, model)
        assert isinstance(layer, AutoEPMoELayer) and type(layer) is not AutoEPMoELayer
        assert isinstance(experts, GroupedExperts) and "ds_fp4_experts" in experts.__dict__
        assert list(model.state_dict()) == keys
        assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
        copied = copy.deepcopy(model)
        assert copied["moe"].experts.ds_fp4_experts.cache is not experts.ds_fp4_experts.cache
        engine.expert_level.restore(layer)
        assert type(layer) is AutoEPMoELayer and type(experts) is GroupedExperts
        assert "ds_fp4_experts" not in experts.__dict__ and set(layer.__dict__) == attributes
        engine.expert_level.restore(layer)
