# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench experts`: one layer's experts, forward and backward, against DeepSpeed's and the GEMMs alone.

All of it in one run on one GPU: DeepSpeed's BF16 GroupedExperts on rows that are already in expert order, and its
whole AutoEP path around them; the six FP8 GEMMs, each by itself with each library, and one after the other as the
layer calls them; and ds_fp4 from tokens and routing to combined output and back, for each setting of what is kept. It
is compared with GEMMs in sequence, since under steady load a GPU lowers its clocks, which a GEMM by itself does not
show. Weight gradients are BF16 everywhere. FP8 weights are made before and kept, and the time to make them is measured
apart; one row has it included, as by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_fp4 import gemm, ops
from ds_fp4.bench import arguments, profiling, timing
from ds_fp4.config import PRESETS, LayerRecipe
from ds_fp4.experts import ExpertLayer, LayerSpec
from ds_fp4.experts.weights import OPERANDS, quantize


@dataclass(frozen=True)
class Shape:
    """One layer on one rank: tokens, experts, and their sizes."""

    name: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def flops(self) -> int:
        """Of one GEMM over gate and up and one over down."""
        return 2 * self.rows * 3 * self.intermediate * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v3", 8192, 8, 32, 7168, 2048),
        Shape("qwen3-235b", 8192, 8, 64, 4096, 1536),
        Shape("mixtral", 8192, 2, 8, 4096, 14336),
    )
}
SETTINGS = {
    "mxfp4": {"recipe": "mxfp4"},
    "mxfp4, gate_up mxfp4": {"recipe": "mxfp4", "saved_activations": "mxfp4"},
    "mxfp4, fc1 recomputed": {"recipe": "mxfp4", "recompute": "fc1"},
    "fp8": {"recipe": "fp8"},
    "mxfp4, weights included": {"recipe": "mxfp4", "weight_cache": "none"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument(
        "--gemm",
        choices=("auto", "deepgemm", "cublas"),
        default="auto",
        help="the library, in the layer and alone (default: what training takes, and both alone)",
    )
    parser.add_argument(
        "--skew", type=arguments.amount, default=0.0, help="experts' popularity falls as rank^-SKEW (default 0)"
    )
    parser.add_argument("--profile", action="store_true", help="kernels of one step, and how long the GPU was idle")
    parser.add_argument("--json", type=arguments.output_file, metavar="FILE", help="write the results there")


def recipe_for(setting: dict) -> LayerRecipe:
    """A preset with changes; FP8 weights are kept, since the time to make them is measured apart."""
    changes = {key: value for key, value in setting.items() if key != "recipe"}
    return LayerRecipe(**{"scale_rounding": "even", "weight_cache": "step", **PRESETS[setting["recipe"]], **changes})


class Inputs:
    """Random tokens, routing, weights and output gradient of a shape."""

    def __init__(self, shape: Shape, device: torch.device, skew: float) -> None:
        def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, device=device) * scale).to(torch.bfloat16)

        e, h, i = shape.experts, shape.hidden, shape.intermediate
        self.x = randn(shape.tokens, h).requires_grad_()
        popularity = torch.arange(1, e + 1, device=device, dtype=torch.float32) ** -skew
        self.ids = torch.multinomial(popularity.expand(shape.tokens, e), shape.top_k)
        scores = torch.rand(shape.tokens, shape.top_k, device=device)
        self.scores = (scores / scores.sum(1, keepdim=True)).requires_grad_()
        self.weights = [
            randn(*size, scale=size[-1] ** -0.5).requires_grad_() for size in ((e, i, h), (e, h, i), (e, i, h))
        ]
        self.dy = randn(shape.tokens, h)
        self.counts = torch.bincount(self.ids.flatten(), minlength=e).to(torch.int32)

    def clear(self) -> None:
        for t in (self.x, self.scores, *self.weights):
            t.grad = None


def _launch_cycles(launch: Callable[[], object]) -> int:
    """A head start in clock cycles, enough for the host to launch all of what waits for nothing."""
    launch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    launch()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return max(timing.HEAD_START, int(2 * seconds * timing.HIGHEST_CLOCK))


def _step_seconds(
    step: Callable[[], object],
    clear: Callable[[], None] = lambda: None,
    repeats: int = 12,
    head_start: int = timing.HEAD_START,
) -> float:
    """Median seconds of `step`, on the GPU's clock; `clear` comes before each, for gradients that are new."""

    def run() -> None:
        clear()
        step()

    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        clear()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # As in training, where the layer before keeps the GPU busy while the host goes on to this one.
        torch.cuda._sleep(head_start)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    clear()
    return sorted(seconds)[len(seconds) // 2]


# --- DeepSpeed's own ---


def deepspeed_experts(shape: Shape, inputs: Inputs) -> dict[str, float]:
    """Seconds of GroupedExperts on rows in expert order, its gate and up projections apart and in one GEMM, and of the
    AutoEP path with permutation and weighted sum around the faster."""
    from deepspeed.module_inject.auto_ep_layer import (
        combine_from_routed,
        permute_by_local_expert,
        unpermute_by_local_expert,
    )
    from deepspeed.moe.ep_experts import GroupedExperts

    found = {}
    experts = {}
    for kind in ("separate", "fused"):
        module = GroupedExperts(
            shape.hidden, shape.intermediate, shape.experts, use_grouped_mm=True, gate_up_impl=kind
        ).to(inputs.x.device, torch.bfloat16)
        for name, weight in zip(("w1", "w2", "w3"), inputs.weights, strict=True):
            setattr(module, name, torch.nn.Parameter(weight.detach()))
        experts[kind] = module
        order = torch.argsort(inputs.ids.flatten(), stable=True)
        rows = inputs.x.detach()[order // shape.top_k]
        permuted, _, counts, _ = permute_by_local_expert(rows, inputs.counts)
        permuted.requires_grad_()
        dy = torch.randn_like(permuted)

        def clear(module=module, permuted=permuted) -> None:
            module.zero_grad(set_to_none=True)
            permuted.grad = None

        found[f"GroupedExperts, {kind}"] = _step_seconds(
            lambda module=module, permuted=permuted, counts=counts, dy=dy: module(permuted, counts).backward(dy), clear
        )
        del rows, permuted, dy
        torch.cuda.empty_cache()
    module = experts[min(experts, key=lambda kind: found[f"GroupedExperts, {kind}"])]

    def whole() -> None:
        order = torch.argsort(inputs.ids.view(-1), stable=True)
        rows, perm, counts, total = permute_by_local_expert(inputs.x[order // shape.top_k], inputs.counts)
        output = unpermute_by_local_expert(module(rows, counts), perm, total)
        combine_from_routed(
            output, inputs.scores, order, shape.top_k, "post", "weighted_sum", (1, shape.tokens, shape.hidden)
        ).backward(inputs.dy[None])

    def clear_all() -> None:
        inputs.clear()
        module.zero_grad(set_to_none=True)

    found["AutoEP's path around it"] = _step_seconds(whole, clear_all)
    return found


# --- the GEMMs alone ---


class Gemms:
    """The six GEMMs of a shape on random operands, as the layer calls them."""

    def __init__(self, shape: Shape, inputs: Inputs) -> None:
        device = inputs.x.device
        self._groups = gemm.Groups.of(inputs.counts.tolist(), device)
        self._weights = {operand: quantize(inputs.weights, operand) for operand in OPERANDS}
        rows, h, i = self._groups.padded_rows, shape.hidden, shape.intermediate
        sizes = self._groups.padded_offsets.diff()

        def operand(width: int) -> tuple:
            values = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
            return ops.bf16_to_fp8_row_and_col(values, sizes, padded_rows=rows, scale_layout="gemm")

        def columns_of_rows() -> dict[str, tuple]:
            """By layout of scales."""
            x = ops.bf16_to_fp8_row(torch.randn(rows, h, device=device, dtype=torch.bfloat16))
            return {
                layout: ops.fp8_row_to_fp8_col(*x, sizes, padded_rows=rows, scale_layout=layout)
                for layout in ("gemm", "blocks")
            }

        def gradient(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device)

        self._x = operand(h)[0]
        (self._h, self._h_cols), (self._g, self._g_cols) = operand(i), operand(2 * i)
        self._x_cols, self._y_cols = columns_of_rows(), columns_of_rows()
        self._w13 = [gradient(shape.experts, i, h) for _ in range(2)]
        self._w2 = [gradient(shape.experts, h, i)]

    def calls(self, backends: gemm.GemmBackends) -> dict[str, Callable[[], object]]:
        """By name, in the layer's order."""
        forward, wgrad = backends
        groups, w = self._groups, self._weights
        x_cols, y_cols = self._x_cols[wgrad.column_scale_layout], self._y_cols[wgrad.column_scale_layout]
        return {
            "gate_up": lambda: forward.grouped_gemm(self._x, w["w13"], groups),
            "down": lambda: forward.grouped_gemm(self._h, w["w2"], groups),
            "dh": lambda: forward.grouped_gemm(self._x, w["w2_t"], groups),
            "dx": lambda: forward.grouped_gemm(self._g, w["w13_t"], groups),
            "dw2": lambda: wgrad.weight_gradient(y_cols, self._h_cols, groups, self._w2),
            "dw13": lambda: wgrad.weight_gradient(self._g_cols, x_cols, groups, self._w13),
        }


def gemms_alone(
    shape: Shape, inputs: Inputs, names: list[str], backends: gemm.GemmBackends
) -> tuple[dict[str, dict[str, float]], float]:
    """Seconds of each of the six GEMMs by each library that can be had; and of all six by `backends`, one after the
    other in the layer's order."""
    device, gemms = inputs.x.device, Gemms(shape, inputs)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            calls = gemms.calls(gemm.choose(name, name, device))
        except RuntimeError as error:
            print(f"{name}: {error}")
            continue
        found[name] = {what: _step_seconds(call, head_start=_launch_cycles(call)) for what, call in calls.items()}

    in_order = list(gemms.calls(backends).values())

    def all_six() -> None:
        for call in in_order:
            call()

    return found, _step_seconds(all_six, head_start=_launch_cycles(all_six))


# --- ds_fp4 ---


def _held(step: Callable[[], torch.Tensor]) -> int:
    """Bytes that the forward leaves allocated for backward, its output apart."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before - output.numel() * output.element_size()
    output.backward(torch.zeros_like(output))
    return held


def ours(shape: Shape, inputs: Inputs, backends: gemm.GemmBackends, setting: dict) -> tuple[dict, Callable]:
    """Times and memory of one setting, and one step of it."""
    spec = LayerSpec(shape.hidden, shape.intermediate, shape.experts, 1, shape.top_k)
    recipe = recipe_for(setting)
    layer = ExpertLayer(spec, recipe, None, backends)

    def forward() -> torch.Tensor:
        return layer(inputs.x, inputs.scores, inputs.ids, inputs.weights)

    def step() -> None:
        forward().backward(inputs.dy)

    inputs.clear()
    step()  # FP8 weights are made here, and kept
    inputs.clear()
    held = _held(forward)
    inputs.clear()
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    seconds = _step_seconds(step, inputs.clear)
    with torch.no_grad():
        forward_seconds = _step_seconds(forward, inputs.clear)
    return {
        "seconds": seconds,
        "forward_seconds": forward_seconds,
        "held_per_row": held / shape.rows,
        "formula_per_row": spec.kept_bytes(recipe, 1 / shape.top_k),
        "peak_above_before": peak,
    }, step


def profile_step(step: Callable[[], None], clear: Callable[[], None]) -> profiling.Stretch:
    """Kernels and gaps of one step."""

    def run() -> None:
        step()  # the profiler's own start falls into this one
        clear()
        torch.cuda.synchronize()
        profiling.mark(timing.HEAD_START)  # so that the host is ahead, as in `_step_seconds`
        step()
        profiling.mark()

    for _ in range(3):
        clear()
        step()
    clear()
    return profiling.profile(run)[0]


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns an exit status."""
    if not torch.cuda.is_available():
        print("ds-fp4 bench experts needs a Hopper GPU; torch sees none here")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        backends = gemm.choose(args.gemm, args.gemm, device)
    except RuntimeError as error:
        print(f"ds-fp4 bench experts: {error}")
        return 1
    torch.manual_seed(0)
    ops.load_kernels(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    results = []
    for name in args.shapes:
        results.append(_measure_shape(SHAPES[name], device, backends, args))
        torch.cuda.empty_cache()
    if args.json:
        arguments.write_json(args.json, {"gpu": torch.cuda.get_device_name(device), "shapes": results})
    return 0


def _measure_shape(shape: Shape, device: torch.device, backends: gemm.GemmBackends, args: argparse.Namespace) -> dict:
    inputs = Inputs(shape, device, args.skew)
    print(
        f"\n{shape.name}: {shape.tokens} tokens, top-{shape.top_k} of {shape.experts} experts, hidden {shape.hidden}, "
        f"intermediate {shape.intermediate}"
    )
    stock = deepspeed_experts(shape, inputs)
    torch.cuda.empty_cache()
    for what, seconds in stock.items():
        print(f"  DeepSpeed BF16 {what:28s} {seconds * 1e3:7.2f} ms")
    reference = min(seconds for what, seconds in stock.items() if what.startswith("GroupedExperts"))
    names = ["deepgemm", "cublas"] if args.gemm == "auto" else [args.gemm]
    alone, in_sequence = gemms_alone(shape, inputs, names, backends)
    torch.cuda.empty_cache()
    work = {"gate_up": 2, "down": 1, "dh": 1, "dx": 2, "dw2": 1, "dw13": 2}
    for backend, times in alone.items():
        rates = "  ".join(f"{k} {t * 1e3:.2f} ({work[k] * shape.flops / 3 / t / 1e12:.0f})" for k, t in times.items())
        print(f"  {backend:9s} ms (TFLOP/s): {rates}  sum {sum(times.values()) * 1e3:.2f}")
    best = sum(min(times[k] for times in alone.values()) for k in work) if alone else float("nan")
    quantization = timing.median_seconds([lambda: [quantize(inputs.weights, operand) for operand in OPERANDS]], 5)
    print(
        f"  the six GEMMs alone, one after the other: {in_sequence * 1e3:.2f} ms; each by itself, best library: "
        f"{best * 1e3:.2f} ms; FP8 weights: {quantization * 1e3:.2f} ms"
    )
    print("  of GEMMs: one after the other, then each by itself")
    print("  ds_fp4                      ms  of BF16      of GEMMs  forward ms  kept B/row  formula  peak GiB")
    settings = {}
    for what, setting in SETTINGS.items():
        result, step = ours(shape, inputs, backends, setting)
        settings[what] = result
        seconds, forward, peak = result["seconds"], result["forward_seconds"], result["peak_above_before"] / 2**30
        print(
            f"  {what:24s} {seconds * 1e3:6.2f}  {seconds / reference:6.2f}x  {seconds / in_sequence:4.2f}x "
            f"{seconds / best:4.2f}x  {forward * 1e3:9.2f}  {result['held_per_row']:10.0f}  "
            f"{result['formula_per_row']:7.0f}  {peak:8.2f}",
            flush=True,
        )
        if args.profile and what == "mxfp4":
            stretch = profile_step(step, inputs.clear)
            result["profile"] = stretch.__dict__
            print("\n".join(f"    {line}" for line in stretch.lines()))
        del step
        torch.cuda.empty_cache()
    inputs.clear()
    return {
        "shape": shape.__dict__,
        "deepspeed": stock,
        "gemms": alone,
        "gemms_best": best,
        "gemms_in_sequence": in_sequence,
        "weights_to_fp8": quantization,
        "ds_fp4": settings,
    }
