# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level in the model families that AutoEP knows: their routers, activations, shared experts.

Without quantization everything agrees with DeepSpeed in FP32; with it, models train as in BF16.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import run_ranks

_COMMON = dict(
    vocab_size=models.VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    attn_implementation="eager",
    initializer_range=0.06,
)
_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def _deepseek_v3() -> torch.nn.Module:
    """Shared experts, sigmoid scores, group-limited routing, a correction bias, scaled weights; layer 0 is dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_COMMON,
        moe_intermediate_size=128,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    return model


def _qwen3_moe() -> torch.nn.Module:
    """Softmax scores that are normalized, and a balancing loss of the router's logits."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_COMMON,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        head_dim=32,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    return Qwen3MoeForCausalLM(config)


def _qwen3_5_moe() -> torch.nn.Module:
    """A shared expert behind a gate."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    options = dict(
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=32,
        layer_types=["full_attention"] * 2,
    )
    common = {k: v for k, v in _COMMON.items() if k != "intermediate_size"}
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**common, **options))


def _minimax_m3() -> torch.nn.Module:
    """Clamped gates and ups (swiglu_oai), shared experts; layer 0 is dense."""
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    config = MiniMaxM3VLTextConfig(
        **{**_COMMON, "intermediate_size": 128},
        dense_intermediate_size=256,
        shared_intermediate_size=128,
        num_local_experts=8,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
        head_dim=32,
        rotary_dim=16,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return MiniMaxM3VLForCausalLM(config)


FAMILIES = {
    "deepseek_v3": _deepseek_v3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_moe": _qwen3_5_moe,
    "minimax_m3": _minimax_m3,
}


def _engine(family: str, block: dict | None, **config):
    torch.manual_seed(0)
    return models.build(
        FAMILIES[family](), models.ds_config(block, ep_size=2, preset=family, optimizer=_OPTIMIZER, **config)
    )


def _steps(family: str, exact: bool) -> tuple[list[float], dict, int]:
    """Losses of three steps, the first step's gradients, layers at the expert level."""
    import ds_fp4 as _  # noqa: F401
    from tests.distributed.exact_experts import experts_of, gradients_of, make_exact

    engine = _engine(family, {"enabled": True} if exact else None, dtype="fp32", zero=1)
    experts = experts_of(engine)
    for each in experts:
        make_exact(each)
    losses, gradients = [], {}
    for tokens in models.batches(3, torch.distributed.get_rank()):
        loss = models.loss_of(engine, tokens)
        engine.backward(loss)
        gradients = gradients or gradients_of(engine)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, gradients, len(experts)


def _quantized(family: str) -> dict[str, list[float]]:
    found = {}
    for recipe in ("bf16", "fp8", "mxfp4"):
        engine = _engine(family, {"enabled": True, "recipe": recipe}, zero=1)
        found[recipe] = models.train(engine, models.batches(3, torch.distributed.get_rank()))
        engine.destroy()
    return found


def _family(family: str) -> tuple:
    return _steps(family, False), _steps(family, True), _quantized(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family):
    for stock, exact, quantized in run_ranks(2, _family, family, timeout=400):
        (losses, gradients, none), (ours, our_gradients, taken_over) = stock, exact
        assert none == 0 and taken_over == (1 if family in ("deepseek_v3", "minimax_m3") else 2)
        assert ours == pytest.approx(losses, rel=1e-5)
        assert gradients.keys() == our_gradients.keys()
        largest = max(gradient.norm() for gradient in gradients.values() if gradient is not None)
        for name, gradient in gradients.items():
            if gradient is None:
                assert our_gradients[name] is None, name
                continue
            error = (our_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-3 * largest)
            assert error < 1e-5, f"{name}: relative error {error:.2e}"
        for recipe in ("fp8", "mxfp4"):
            assert quantized[recipe] != quantized["bf16"]
            assert quantized[recipe] == pytest.approx(quantized["bf16"], rel=0.03), recipe
