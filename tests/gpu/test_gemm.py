# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""GEMM libraries on a GPU: their numbers, and the traps that some of their releases fell into.

A library that is not installed is skipped; one that is installed and does not work is a failure. A kernel that hangs
must fail its test, not stop the run: what is known to hang runs in a process of its own, and everything else is waited
for by polling.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ds_fp4 import gemm
from ds_fp4.formats.columns import column_blocks
from ds_fp4.gemm.emulation import EmulationBackend
from tests import gemm_checks as checks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

GPU = "cuda"
ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("deepgemm", "cublas")
# Compiling kernels is not in it: that ends before a launch.
LONGEST_KERNELS = 120
LONGEST_PROCESS = 400


def missing(name: str) -> str | None:
    if name == "deepgemm" and importlib.util.find_spec("deep_gemm") is None:
        return "deep_gemm is not installed"
    return None


@pytest.fixture(params=LIBRARIES)
def backends(request) -> gemm.GemmBackends:
    """One library for both GEMMs."""
    if missing(request.param):
        pytest.skip(missing(request.param))
    return gemm.choose(request.param, request.param, GPU)


@pytest.fixture
def wait(request):
    """Waits for the GPU; ends the whole run if it does not come back, since nothing else would work on it."""

    def poll() -> None:
        event = torch.cuda.Event()
        event.record()
        limit = time.monotonic() + LONGEST_KERNELS
        while not event.query():
            if time.monotonic() > limit:
                request.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
                print(f"\n{request.node.nodeid}: the GPU did not finish in {LONGEST_KERNELS} s", flush=True)
                os._exit(1)
            time.sleep(0.0005)

    return poll


def skewed(experts: int, largest: int, seed: int = 0) -> list[int]:
    """Rows of experts: some empty, some a few, none a multiple of 128 by design."""
    rng = random.Random(seed)
    return [0 if rng.random() < 0.2 else int(largest ** rng.random()) for _ in range(experts)]


def poison_free_memory() -> None:
    """Fill what the caching allocator will hand out next with bytes that are NaN in every dtype."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    blocks = [torch.full((2**31,), 0xFF, dtype=torch.uint8, device=GPU)]
    blocks += [torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU) for size in (2**9, 2**14, 2**19) * 40]
    torch.cuda.synchronize()
    del blocks


# ---- numbers ----


# Eight experts throughout: DeepGEMM compiles a kernel for each number of them.
COUNTS = [
    [0, 0, 0, 5, 0, 0, 0, 0],
    [128, 0, 1, 257, 300, 0, 0, 129],
    [4000, 40, 0, 7, 1, 0, 130, 128],
    [1] * 8,
]


@pytest.mark.parametrize("n, k", [(512, 640), (192, 128), (4096, 7168)])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{sum(counts)} rows")
def test_grouped_gemm(backends, wait, counts, n, k):
    problem = checks.operands(GPU, counts, n, k)
    out = checks.check_grouped_gemm(backends.forward, problem, wait=wait)
    emulated = EmulationBackend().grouped_gemm(problem.rows, problem.weights, problem.groups)
    real = checks.real_rows(problem.groups)
    assert checks.relative_error(out[real], emulated[real].double()) <= checks.RELATIVE_BF16


@pytest.mark.parametrize("parts, k", [((256, 256), 640), ((192,), 128), ((2048, 2048), 7168)])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{sum(counts)} rows")
def test_weight_gradient(backends, wait, counts, parts, k):
    problem = checks.operands(GPU, counts, sum(parts), k)
    outs = checks.check_weight_gradient(backends.weight_gradient, problem, parts, wait=wait)
    emulated = checks.new_outs(problem, parts, torch.bfloat16)
    EmulationBackend().weight_gradient(problem.left, problem.right, problem.groups, emulated)
    for got, expected in zip(outs, emulated, strict=True):
        assert checks.relative_error(got, expected.double()) <= checks.RELATIVE_BF16
    checks.check_weight_gradient(backends.weight_gradient, problem, parts, torch.float32, wait=wait)


@pytest.mark.parametrize("counts", [[0], [0] * 8, []], ids=len)
def test_no_rows(backends, wait, counts):
    problem = checks.operands(GPU, counts, 256, 128)
    assert checks.check_grouped_gemm(backends.forward, problem, wait=wait).shape == (0, 256)
    for dtype in (torch.bfloat16, torch.float32):
        checks.check_weight_gradient(backends.weight_gradient, problem, (128, 128), dtype, wait=wait)


@pytest.mark.parametrize("experts", [2, 8])
def test_all_rows_on_one_expert(backends, wait, experts):
    for busy in (0, experts // 2, experts - 1):
        problem = checks.operands(GPU, [1000 if e == busy else 0 for e in range(experts)], 256, 512)
        checks.check_grouped_gemm(backends.forward, problem, wait=wait)
        checks.check_weight_gradient(backends.weight_gradient, problem, (256,), wait=wait)


# ---- traps ----


def test_groups_of_one_tile_are_the_same_on_every_run(backends, wait):
    problem = checks.operands(GPU, [128, 128, 256, 256, 128, 256, 256, 256], 768, 2048)
    left = problem.left[0].clone()
    for block, _ in column_blocks(left, problem.left[1], problem.groups.sizes):
        block.view(torch.uint8)[17] = 0
    problem = problem._replace(left=(left, problem.left[1]))
    for right in checks.rights(backends.weight_gradient, problem):
        first = None
        for _ in range(50):
            outs = checks.new_outs(problem, (768,), torch.float32)
            backends.weight_gradient.weight_gradient(problem.left, right, problem.groups, outs)
            wait()
            if first is None:
                first = outs[0]
            assert torch.equal(outs[0], first)
        assert not bool(first[:, 17].any())
        expected = checks.expected_weight_gradient(problem, right=right)
        for expert in range(len(problem.groups.sizes)):
            assert checks.relative_error(first[expert], expected[expert]) <= checks.RELATIVE_FP32


def odd_numbers_of_blocks(name: str) -> None:
    """Few experts with an odd number of output blocks each, which a pair of blocks must not straddle."""
    backend = gemm.select(name, GPU, "weight_gradient")
    for sizes, n, k in (([128, 256], 192, 3072), ([384, 256], 1408, 1408), ([128, 0, 512], 192, 3072)):
        problem = checks.operands(GPU, sizes, n, k)
        for dtype in (torch.bfloat16, torch.float32):
            checks.check_weight_gradient(backend, problem, (n,), dtype)


@pytest.mark.parametrize("name", LIBRARIES)
def test_odd_numbers_of_blocks_do_not_hang(name):
    if missing(name):
        pytest.skip(missing(name))
    script = f"from tests.gpu import test_gemm; test_gemm.odd_numbers_of_blocks({name!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_PROCESS
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"{name} hung for {LONGEST_PROCESS} s")
    assert done.returncode == 0, done.stderr[-3000:]


def test_128_experts_of_width_768(backends, wait):
    counts = skewed(128, 300)
    for n, k, parts in ((1536, 2048, (768, 768)), (2048, 768, (2048,)), (768, 2048, (768,))):
        problem = checks.operands(GPU, counts, n, k)
        checks.check_grouped_gemm(backends.forward, problem, wait=wait)
        checks.check_weight_gradient(backends.weight_gradient, problem, parts, wait=wait)


@pytest.mark.parametrize("experts", [3, 12])
def test_poisoned_padding_and_memory(backends, wait, experts):
    counts = [1, 0, 130] + skewed(experts - 3, 500)
    problem = checks.operands(GPU, counts, 512, 1024)
    checks.check_poisoned_padding(backends.forward, problem, wait)
    clean = backends.forward.grouped_gemm(problem.rows, problem.weights, problem.groups)
    clean_outs = []
    for dtype, parts in ((torch.bfloat16, (256, 256)), (torch.bfloat16, (512,)), (torch.float32, (512,))):
        checks.check_weight_gradient(backends.weight_gradient, problem, parts, dtype, wait=wait)
        for right in checks.rights(backends.weight_gradient, problem):
            outs = checks.new_outs(problem, parts, dtype)
            backends.weight_gradient.weight_gradient(problem.left, right, problem.groups, outs)
            clean_outs.append((dtype, parts, right, outs))
    poisoned = checks.poison_padding(problem)
    poison_free_memory()
    out = backends.forward.grouped_gemm(poisoned.rows, poisoned.weights, poisoned.groups)
    wait()
    real = checks.real_rows(problem.groups)
    assert torch.equal(out[real], clean[real])
    for dtype, parts, right, expected in clean_outs:
        outs = checks.new_outs(problem, parts, dtype)
        poison_free_memory()
        backends.weight_gradient.weight_gradient(problem.left, right, problem.groups, outs)
        wait()
        for got, want in zip(outs, expected, strict=True):
            assert torch.equal(got, want)


def test_on_a_stream_of_its_own(backends, wait):
    problem, parts = checks.operands(GPU, [200, 0, 300, 100, 900, 1], 256, 256), (64, 192)
    expected = backends.forward.grouped_gemm(problem.rows, problem.weights, problem.groups)
    gradients = checks.check_weight_gradient(backends.weight_gradient, problem, parts, wait=wait)
    stream = torch.cuda.Stream()
    outs = checks.new_outs(problem, parts, torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Long enough that work on another stream would read operands before they are there.
        pairs = [(codes.view(torch.uint8), scales) for codes, scales in (problem.rows, problem.left, problem.right)]
        late = [tuple(map(torch.zeros_like, pair)) for pair in pairs]
        torch.cuda._sleep(50_000_000)
        for pair, there in zip(late, pairs, strict=True):
            for t, value in zip(pair, there, strict=True):
                t.copy_(value)
        rows, left, right = ((codes.view(torch.float8_e4m3fn), scales) for codes, scales in late)
        out = backends.forward.grouped_gemm(rows, problem.weights, problem.groups)
        out = out.clone()  # what follows on this stream waits for the GEMMs, wherever they ran
        backends.weight_gradient.weight_gradient(left, right, problem.groups, outs)
        outs = [part.clone() for part in outs]
        for codes, scales in late:
            codes.fill_(0x7F)  # NaN
            scales.fill_(torch.nan)
    torch.cuda.current_stream().wait_stream(stream)
    wait()
    real = checks.real_rows(problem.groups)
    assert torch.equal(out[real], expected[real])
    for got, want in zip(outs, gradients, strict=True):
        assert torch.equal(got, want)


def test_what_follows_waits_for_gemms_on_the_other_stream(wait):
    backends = gemm.choose("cublas", "cublas", GPU)
    problem, parts = checks.operands(GPU, [200, 300, 100], 256, 256), (64, 192)
    expected = backends.forward.grouped_gemm(problem.rows, problem.weights, problem.groups)
    gradients = checks.check_weight_gradient(backends.weight_gradient, problem, parts, wait=wait)
    current = torch.cuda.current_stream()
    others = [
        stream
        for backend in {backends.forward, backends.weight_gradient}
        for matmul in backend._matmuls.values()
        for stream in matmul._beside.get(current.cuda_stream, ())
    ]
    assert others and all(stream.cuda_stream != current.cuda_stream for stream in others)

    def hold_up() -> None:
        for stream in others:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)

    hold_up()
    out = backends.forward.grouped_gemm(problem.rows, problem.weights, problem.groups).clone()
    wait()
    outs = [part.fill_(torch.nan) for part in checks.new_outs(problem, parts, torch.bfloat16)]
    hold_up()
    backends.weight_gradient.weight_gradient(problem.left, problem.right, problem.groups, outs)
    outs = [part.clone() for part in outs]
    wait()
    real = checks.real_rows(problem.groups)
    assert torch.equal(out[real], expected[real])
    for got, want in zip(outs, gradients, strict=True):
        assert torch.equal(got, want)


def test_gemms_in_a_graph(wait):
    backends = gemm.choose("cublas", "cublas", GPU)
    problem, parts = checks.operands(GPU, [200, 0, 300], 256, 256), (64, 192)
    expected = backends.forward.grouped_gemm(problem.rows, problem.weights, problem.groups)
    gradients = checks.check_weight_gradient(backends.weight_gradient, problem, parts, wait=wait)
    outs = checks.new_outs(problem, parts, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backends.forward.grouped_gemm(problem.rows, problem.weights, problem.groups)
        backends.weight_gradient.weight_gradient(problem.left, problem.right, problem.groups, outs)
    for _ in range(2):
        for t in (out, *outs):
            t.fill_(torch.nan)
        graph.replay()
        wait()
        real = checks.real_rows(problem.groups)
        assert torch.equal(out[real], expected[real])
        for got, want in zip(outs, gradients, strict=True):
            assert torch.equal(got, want)


# ---- choice ----


def test_choice_and_report():
    chosen = gemm.choose(device=GPU)
    assert chosen.weight_gradient.name == "cublas"
    assert chosen.forward.name == ("cublas" if missing("deepgemm") else "deepgemm")
    lines = gemm.describe(GPU)
    assert lines[0].startswith("forward and data gradient: ") and not any("NONE" in line for line in lines)
    if missing("deepgemm"):
        assert any("not deepgemm: ModuleNotFoundError" in line for line in lines)
