# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level on one GPU: GEMMs against their emulation, the layer against the host, what it must not do."""

from __future__ import annotations

import gc

import pytest
import torch

from ds_fp4 import gemm
from ds_fp4.bench.experts import recipe_for
from ds_fp4.experts import ExpertLayer, LayerSpec
from ds_fp4.experts.compute import Fp8Compute

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 8, 4
SETTINGS = {
    "fp8": {"recipe": "fp8"},
    "mxfp4": {"recipe": "mxfp4", "saved_activations": "mxfp4"},
    "mxfp4 gate_up fp8": {"recipe": "mxfp4", "saved_activations": "fp8"},
    "mxfp4 gate_up bf16": {"recipe": "mxfp4", "saved_activations": "bf16"},
    "mxfp4 fc1": {"recipe": "mxfp4", "recompute": "fc1"},
    "bf16 dispatch": {"recipe": "mxfp4", "dispatch_forward": "bf16", "combine_backward": "bf16"},
}
NAMES = ("output", "x", "scores", "w1", "w2", "w3")


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = pytest.mark.skipif(not _hopper(), reason="FP8 GEMMs need a Hopper GPU")


def _layer(setting: str, device: str, backends: gemm.GemmBackends | None = None) -> ExpertLayer:
    spec = LayerSpec(HIDDEN, INTERMEDIATE, EXPERTS, 1, TOP_K)
    return ExpertLayer(spec, recipe_for(SETTINGS[setting]), None, backends or gemm.choose("auto", "auto", device))


def _inputs(tokens: int = 700, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(torch.bfloat16)

    popularity = torch.arange(1, EXPERTS + 1, dtype=torch.float32) ** -1.0
    popularity[3] = 0.0  # an expert without tokens
    return {
        "x": randn(tokens, HIDDEN),
        "scores": torch.rand(tokens, TOP_K, generator=generator),
        "ids": torch.multinomial(popularity.expand(tokens, EXPERTS), TOP_K, generator=generator),
        "w1": randn(EXPERTS, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "w2": randn(EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        "w3": randn(EXPERTS, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "dy": randn(tokens, HIDDEN),
    }


def _run(layer: ExpertLayer, inputs: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Output and all gradients."""
    t = {name: v.detach().to(device, copy=True) for name, v in inputs.items()}
    for v in t.values():
        v.requires_grad_(v.is_floating_point())
    output = layer(t["x"], t["scores"], t["ids"], (t["w1"], t["w2"], t["w3"]))
    output.backward(t["dy"].detach())
    return {"output": output.detach(), **{name: t[name].grad for name in NAMES[1:]}}


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.double().cpu(), expected.double().cpu()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_whole_layer_against_the_host(setting):
    inputs = _inputs()
    host, device = _run(_layer(setting, "cpu"), inputs, "cpu"), _run(_layer(setting, "cuda"), inputs, "cuda")
    errors = {name: _error(device[name], host[name]) for name in NAMES}
    # Codes that round the other way after sums in another order differ by a step of MXFP4 or FP8.
    assert max(errors.values()) <= 6e-2, errors
    assert not bool(device["w1"][3].any()) and not bool(device["w2"][3].any()), "an expert without tokens"


class _Checked(Fp8Compute):
    """Compares each stage with the emulation on the same quantized inputs."""

    def __init__(self, compute: Fp8Compute) -> None:
        self.__dict__.update(compute.__dict__)
        self._emulation = gemm.choose("emulation", "emulation", "cuda")
        self.errors: dict[str, float] = {}

    def _note(self, stage: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        self.errors[stage] = max(self.errors.get(stage, 0.0), _error(got, expected))

    def gemm(self, a, b, groups):
        out = super().gemm(a, b, groups)
        real = groups.m_indices >= 0
        self._note("gemm", out[real], self._emulation.forward.grouped_gemm(a, b, groups)[real])
        return out

    def weight_gradient(self, a, b, groups, outs):
        super().weight_gradient(a, b, groups, outs)
        expected = [torch.empty_like(out) for out in outs]
        self._emulation.weight_gradient.weight_gradient(a, b, groups, expected)
        for out, other in zip(outs, expected, strict=True):
            self._note("weight gradient", out, other)


@pytest.mark.parametrize("name", ["deepgemm", "cublas"])
@pytest.mark.parametrize("setting", ["fp8", "mxfp4"])
def test_each_gemm_against_its_emulation(setting, name):
    try:
        backends = gemm.choose(name, name, "cuda")
    except RuntimeError as error:
        pytest.skip(str(error))
    layer = _layer(setting, "cuda", backends)
    layer.compute = _Checked(layer.compute)
    _run(layer, _inputs(seed=1), "cuda")
    assert set(layer.compute.errors) == {"gemm", "weight gradient"}
    assert max(layer.compute.errors.values()) <= 1e-2, layer.compute.errors


@pytest.mark.parametrize("setting", SETTINGS)
def test_runs_are_the_same_whatever_lay_in_memory(setting):
    layer, inputs = _layer(setting, "cuda"), _inputs(seed=2)
    clean = _run(layer, inputs, "cuda")
    for value in (float("nan"), float("inf")):
        # Freed again, and handed out by the allocator to the run that follows.
        poison = [torch.full((1 << size,), value, device="cuda") for size in range(8, 25)]
        del poison
        again = _run(layer, inputs, "cuda")
        for name in NAMES:
            assert torch.equal(clean[name], again[name]), (value, name)


def test_one_wait_in_forward_and_none_in_backward(monkeypatch):
    layer = _layer("mxfp4", "cuda")
    t = {name: value.cuda().requires_grad_(value.is_floating_point()) for name, value in _inputs(seed=3).items()}
    dy = t["dy"].detach()

    def forward() -> torch.Tensor:
        return layer(t["x"], t["scores"], t["ids"], (t["w1"], t["w2"], t["w3"]))

    forward().backward(dy)  # kernels are loaded, FP8 weights made
    waits = []
    synchronize = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: waits.append(1) or synchronize(self))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = forward()
        assert len(waits) == 1
        output.backward(dy)
        assert len(waits) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _requested() -> int:
    """Bytes asked of the allocator (it gives up to a MiB more, as its free blocks are), the last backward's gone."""
    # Autograd's thread still does when backward returns; it does not when it has come to the next graph.
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    gc.collect()  # what earlier tests left in cycles must not end in between
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_bytes_kept_are_the_formulas(setting):
    tokens = 4096
    layer, inputs = _layer(setting, "cuda"), _inputs(tokens, seed=4)
    t = {name: value.cuda().requires_grad_(value.is_floating_point()) for name, value in inputs.items()}

    def forward() -> torch.Tensor:
        return layer(t["x"], t["scores"], t["ids"], (t["w1"], t["w2"], t["w3"]))

    forward().backward(t["dy"].detach())
    before = _requested()
    output = forward()
    kept = _requested() - before - output.nbytes
    rows = tokens * TOP_K
    formula = layer.spec.kept_bytes(layer.recipe, 1 / TOP_K) * rows
    # Routing: int32 places and records, FP32 weights and indices of padded rows; padding of up to 127 rows an expert.
    routing = 40 * (rows + 128 * EXPERTS)
    padding = 128 * EXPERTS * 4 * INTERMEDIATE
    assert 0.9 * formula <= kept <= 1.1 * formula + routing + padding, (kept, formula)


@pytest.mark.parametrize("recompute", ("activation", "fc1"))
def test_fp8_weights_that_are_kept_and_that_are_not(recompute):
    inputs = _inputs(seed=8)
    t = {name: value.cuda().requires_grad_(value.is_floating_point()) for name, value in inputs.items()}
    parameters = sum(t[name].numel() for name in ("w1", "w2", "w3"))
    _run(_layer("mxfp4", "cuda"), inputs, "cuda")  # what libraries allocate for themselves
    results, memory = {}, {}
    for cache in ("step", "none"):
        recipe = recipe_for({"recipe": "mxfp4", "recompute": recompute, "weight_cache": cache})
        spec = LayerSpec(HIDDEN, INTERMEDIATE, EXPERTS, 1, TOP_K)
        layer = ExpertLayer(spec, recipe, None, gemm.choose("auto", "auto", "cuda"))

        def forward(layer: ExpertLayer = layer) -> torch.Tensor:
            return layer(t["x"], t["scores"], t["ids"], (t["w1"], t["w2"], t["w3"]))

        before = _requested()
        with torch.no_grad():
            forward()
        held = [_requested() - before]
        torch.autograd.grad(forward(), t["x"], t["dy"].detach())
        held.append(_requested() - before)
        memory[cache] = held
        results[cache] = _run(layer, inputs, "cuda")
    for name in NAMES:
        assert torch.equal(results["step"][name], results["none"][name]), name
    # Scales apart, a byte a parameter after an evaluation, two after a backward.
    assert max(memory["none"]) <= 0.02 * parameters, memory
    for made, held in enumerate(memory["step"], 1):
        assert 0.99 * made * parameters <= held <= 1.02 * made * parameters, memory


def test_all_tokens_on_few_experts_and_none():
    layer, inputs = _layer("mxfp4", "cuda"), _inputs(300, seed=5)
    inputs["ids"] = torch.arange(TOP_K).expand(300, TOP_K).contiguous()
    result = _run(layer, inputs, "cuda")
    assert all(bool(torch.isfinite(value).all()) for value in result.values())
    assert not bool(result["w1"][TOP_K:].any())
    empty = {**inputs, **{name: inputs[name][:0] for name in ("x", "scores", "ids", "dy")}}
    result = _run(layer, empty, "cuda")
    assert result["output"].shape == (0, HIDDEN) and not any(bool(result[name].any()) for name in ("w1", "w2", "w3"))


def test_nan_reaches_the_output_of_its_tokens_only():
    layer, inputs = _layer("mxfp4", "cuda"), _inputs(seed=6)
    inputs["x"][5, 7] = float("nan")
    inputs["x"][6, 8] = float("inf")
    output = _run(layer, inputs, "cuda")["output"]
    broken = output.isnan().any(1)
    assert broken[5] and broken[6] and int(broken.sum()) == 2


def test_on_a_stream_of_its_own():
    layer, inputs = _layer("mxfp4", "cuda"), _inputs(seed=7)
    expected = _run(layer, inputs, "cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        got = _run(layer, inputs, "cuda")
    stream.synchronize()
    assert all(torch.equal(got[name], expected[name]) for name in NAMES)
