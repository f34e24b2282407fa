# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which GEMM backend is chosen and what is said about it; the libraries themselves are played by stand-ins that demand
what the real ones demand of shapes and strides."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import subprocess
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fp4 import gemm
from ds_fp4.formats.columns import column_blocks
from ds_fp4.gemm import cublas, cublaslt, deepgemm, selection
from ds_fp4.gemm.backend import try_out
from ds_fp4.gemm.emulation import EmulationBackend, decode
from tests import gemm_checks as checks

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class StandIn(EmulationBackend):
    def __init__(self, name: str):
        self.name = name


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(selection, "_loaded", {})


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a Hopper GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def libraries(monkeypatch, **reasons):
    """Loads a stand-in for each library that has no reason why it cannot be had."""

    def load(name, device, kind):
        outcome = reasons.get(name) or StandIn(name)
        return selection._loaded.setdefault((name, device, kind), outcome)

    monkeypatch.setattr(selection, "_load", load)


# ---- choice ----


def test_cpu():
    assert [backend.name for backend in gemm.choose()] == ["emulation", "emulation"]
    assert gemm.select("emulation", CPU).name == "emulation"
    lines = gemm.describe(CPU)
    assert len(lines) == 2 and all("emulation, the only one on the CPU" in line for line in lines)


def test_unknown_names():
    with pytest.raises(
        ValueError, match="ds_fp4.experts.gemm must be one of auto, deepgemm, cublas, emulation, got 'x'"
    ):
        gemm.select("x", CPU)
    with pytest.raises(ValueError, match="ds_fp4.experts.wgrad_gemm must be"):
        gemm.choose(weight_gradient="x")


@pytest.mark.parametrize("name", ["deepgemm", "cublas"])
def test_libraries_need_a_gpu(name):
    with pytest.raises(RuntimeError, match=rf"{name}.* needs an NVIDIA GPU.*on the CPU set 'auto' or 'emulation'"):
        gemm.select(name, CPU)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
@pytest.mark.parametrize("name", ["auto", "deepgemm", "cublas"])
def test_only_hopper(name, capability, hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with pytest.raises(RuntimeError, match=r"need a Hopper GPU.*The codec level works there"):
        gemm.select(name, GPU)
    assert gemm.select("emulation", GPU).name == "emulation"


def test_first_choices(hopper, monkeypatch):
    libraries(monkeypatch)
    chosen = gemm.choose(device=GPU)
    assert (chosen.forward.name, chosen.weight_gradient.name) == ("deepgemm", "cublas")
    chosen = gemm.choose("cublas", "deepgemm", GPU)
    assert (chosen.forward.name, chosen.weight_gradient.name) == ("cublas", "deepgemm")
    lines = gemm.describe(GPU, "cublas")
    assert "cublas, set by ds_fp4.experts.gemm" in lines[0] and "cublas, the first choice" in lines[1]


def test_what_is_passed_over_is_named(hopper, monkeypatch):
    libraries(monkeypatch, deepgemm="ImportError: no deep_gemm")
    assert gemm.select("auto", GPU).name == "cublas"
    assert gemm.describe(GPU)[1] == "forward and data gradient: not deepgemm: ImportError: no deep_gemm"
    with pytest.raises(
        RuntimeError, match=r"no deep_gemm\. For DeepGEMM: pip install 'ds_fp4\[deepgemm\]', with CUDA_HOME"
    ):
        gemm.select("deepgemm", GPU)


def test_no_library_is_an_error_never_the_emulation(hopper, monkeypatch):
    libraries(monkeypatch, deepgemm="gone", cublas="too old")
    with pytest.raises(
        RuntimeError, match="deepgemm: gone; cublas: too old.*torch 2.11 or later.*ds_fp4.experts.gemm"
    ):
        gemm.select("auto", GPU)
    assert gemm.describe(GPU)[0].startswith("forward and data gradient: NONE: ")


# ---- loading ----


def deep_gemm_module(monkeypatch, **changes):
    """A `deep_gemm` that computes on the host, refuses what the real one does, and notes its calls."""
    module = types.ModuleType("deep_gemm")
    module.calls = []

    def m_grouped(a, b, d, grouped_layout):
        assert type(a) is tuple and type(b) is tuple and d.is_contiguous() and d.dtype == torch.bfloat16
        assert a[1].stride(0) == 1 and b[1].is_contiguous() and grouped_layout.dtype == torch.int32
        for row, expert in enumerate(grouped_layout.tolist()):
            if expert >= 0:
                weight = decode(b[0][expert], b[1][expert], 128)
                d[row] = (decode(a[0][row : row + 1], a[1][row : row + 1]) @ weight.t())[0]
        module.calls.append("forward")

    def k_grouped(a, b, d, ks, grouped_layout, c):
        assert type(a) is tuple and type(b) is tuple and c is d and d.is_contiguous() and d.dtype == torch.float32
        assert type(ks) is list and grouped_layout.tolist() == ks and grouped_layout.dtype == torch.int32
        assert d.shape[0] == len(ks)
        assert not bool(d.any()), "the output must be zeros"
        for expert, (left, right) in enumerate(zip(column_blocks(*a, ks), column_blocks(*b, ks), strict=True)):
            d[expert] += decode(*left) @ decode(*right).t()
        module.calls.append(len(ks))

    module.m_grouped_fp8_gemm_nt_contiguous = m_grouped
    module.k_grouped_fp8_gemm_nt_contiguous = k_grouped
    module.get_mk_alignment_for_contiguous_layout = lambda: 128
    module.__version__ = "9.9"
    for name, value in changes.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The host tensor there; a write reaches it."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype).view(shape)


class HostMatmul:
    """`cublaslt.ScaledMatmul` on the host: reads memory as cuBLAS documents it."""

    def __init__(self, library, device, a_scaling, b_scaling, out_dtype):
        assert (a_scaling, b_scaling).count(cublaslt.SCALE_128X128) <= 1
        self.a_scaling, self.b_scaling, self.out_dtype = a_scaling, b_scaling, out_dtype

    @contextlib.contextmanager
    def launches(self):
        yield self.multiply

    def multiply(self, a, a_scales, b, b_scales, out, shape):
        m, n, k = shape
        tiles = -(-k // 128)

        def operand(codes, rows, scales, scaling):
            codes = at(codes, (rows, k), torch.float8_e4m3fn)
            if scaling == cublaslt.SCALE_1X128:
                return decode(codes, at(scales, (tiles, rows), torch.float32).t())
            assert scaling == cublaslt.SCALE_128X128
            scales = at(scales, (-(-rows // 128), -(-tiles // 4) * 4), torch.float32)
            return decode(codes, scales[:, :tiles], 128)

        left, right = operand(a, m, a_scales, self.a_scaling), operand(b, n, b_scales, self.b_scaling)
        at(out, (m, n), self.out_dtype).copy_(left @ right.t())


@pytest.fixture
def host_matmul(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cublas, "CublasLt", lambda: types.SimpleNamespace(version=130000))
    monkeypatch.setattr(cublas, "ScaledMatmul", HostMatmul)


@pytest.fixture
def deepgemm_backend(monkeypatch):
    deep_gemm_module(monkeypatch)
    return deepgemm.DeepGemmBackend(CPU)


@pytest.fixture
def cublas_backend(host_matmul):
    return cublas.CublasBackend(CPU)


@pytest.mark.parametrize("fixture", ["deepgemm_backend", "cublas_backend"])
@pytest.mark.parametrize(
    "counts", [[5, 0, 130], [300], [0, 0], [3, 0, 1, 200, 0, 128]], ids=lambda counts: str(len(counts))
)
def test_backends_hand_over_what_the_library_wants(fixture, counts, request):
    backend = request.getfixturevalue(fixture)
    for n, k in ((128, 128), (192, 768)):
        problem = checks.operands("cpu", counts, n, k)
        checks.check_grouped_gemm(backend, problem, limit=checks.BF16_ROUNDING)
        checks.check_poisoned_padding(backend, problem)
        for parts in ((n,), (64, n - 64), *([(128, n - 128)] if n > 128 else [])):
            checks.check_weight_gradient(backend, problem, parts, torch.bfloat16, limit=checks.BF16_ROUNDING)
            checks.check_weight_gradient(backend, problem, parts, torch.float32, limit=1e-6)


def test_few_experts_run_without_clusters(deepgemm_backend):
    library = sys.modules["deep_gemm"]
    for experts, handed_over in ((1, 5), (4, 5), (5, 5), (6, 6)):
        library.calls.clear()
        problem = checks.operands("cpu", [1] * experts, 64, 64)
        checks.check_weight_gradient(deepgemm_backend, problem, (64,))
        assert library.calls == [handed_over]


@pytest.mark.parametrize("kind", ["forward", "weight_gradient"])
@pytest.mark.parametrize("name", ["deepgemm", "cublas"])
def test_a_library_is_tried_out_once(name, kind, hopper, host_matmul, monkeypatch):
    module = deep_gemm_module(monkeypatch)
    backend = selection._load(name, CPU, kind)
    assert backend.name == name, backend
    assert selection._load(name, CPU, kind) is backend
    assert len(module.calls) == (name == "deepgemm")


def test_why_a_library_cannot_be_had(hopper, monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("no kernel image")

    def outcome(kind="forward", **changes):
        selection._loaded.clear()
        deep_gemm_module(monkeypatch, **changes)
        return selection._load("deepgemm", CPU, kind)

    assert outcome(m_grouped_fp8_gemm_nt_contiguous=fail) == "RuntimeError: no kernel image"
    assert "gave wrong numbers" in outcome(m_grouped_fp8_gemm_nt_contiguous=lambda a, b, d, layout: d.zero_())
    assert "gave wrong numbers" in outcome("weight_gradient", k_grouped_fp8_gemm_nt_contiguous=lambda *arguments: None)
    assert "padded to 64, not 128" in outcome(get_mk_alignment_for_contiguous_layout=lambda: 64)
    selection._loaded.clear()
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "ModuleNotFoundError" in selection._load("deepgemm", CPU, "forward")
    monkeypatch.delitem(sys.modules, "deep_gemm")
    (tmp_path / "deep_gemm.py").write_text("cuda_home = None\nassert cuda_home is not None\n")
    monkeypatch.syspath_prepend(tmp_path)
    selection._loaded.clear()
    assert "set CUDA_HOME" in selection._load("deepgemm", CPU, "forward")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in selection._load("cublas", CPU, "forward")


def test_a_library_that_misreads_shared_scales_is_refused(cublas_backend, deepgemm_backend):
    class Misreads(EmulationBackend):
        def __init__(self, operand):
            self._operand = operand

        def _weight_gradient(self, a, b, groups, outs):
            shared = (a, b)[self._operand][1].dim() == 1
            super()._weight_gradient(a, b, groups, outs)
            if shared:
                outs[0][2] *= 2

    for operand in (0, 1):
        with pytest.raises(RuntimeError, match="wrong numbers"):
            try_out(Misreads(operand), "weight_gradient", CPU)
    assert cublas_backend.column_scale_layout == "blocks" and deepgemm_backend.column_scale_layout == "gemm"


def test_why_cublas_cannot_be_had(hopper, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "77.0")
    assert "libcublasLt.so.77 cannot be loaded" in selection._load("cublas", CPU, "forward")
    old = types.SimpleNamespace(
        cublasLtGetVersion=FakeFunction(120800), cublasLtGetStatusString=FakeFunction(b"not supported")
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    selection._loaded.clear()
    assert "cuBLASLt 120800 has no block scaling on Hopper" in selection._load("cublas", CPU, "forward")


class FakeFunction:
    """A C function that counts its calls and returns a status."""

    def __init__(self, result=0, effect=None):
        self.result, self.effect, self.calls = result, effect, []

    def __call__(self, *args):
        self.calls.append(args)
        if self.effect:
            self.effect(*args)
        return self.result


class FakeStream:
    """Notes who waits for whom, after how many GEMMs."""

    def __init__(self, number, library):
        self.cuda_stream, self._library = number, library

    def wait_stream(self, other):
        self._library.waits.append((self.cuda_stream, other.cuda_stream, len(self._library.cublasLtMatmul.calls)))


@pytest.fixture
def fake_library(monkeypatch):
    def find(*args):
        args[-1]._obj.value = 1

    functions = {name: FakeFunction() for name in cublaslt._SIGNATURES}
    functions["cublasLtMatmulAlgoGetHeuristic"].effect = find
    library = types.SimpleNamespace(
        cublasLtGetVersion=FakeFunction(130100), cublasLtGetStatusString=FakeFunction(b"not supported"), **functions
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(7, library))
    numbers = itertools.count(8)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(next(numbers), library))
    library.waits = []
    return library


def scaled_matmul(b_scaling=cublaslt.SCALE_1X128, out_dtype=torch.bfloat16):
    return cublaslt.ScaledMatmul(cublaslt.CublasLt(), CPU, cublaslt.SCALE_1X128, b_scaling, out_dtype)


def test_a_shape_is_planned_once(fake_library):
    matmul = scaled_matmul()
    planned = fake_library.cublasLtMatmulAlgoGetHeuristic.calls
    launched = fake_library.cublasLtMatmul.calls
    with matmul.launches() as multiply:
        for _ in range(2):
            multiply(256, 16, 512, 32, 1024, (64, 32, 128))
        assert (len(planned), len(launched)) == (1, 2)
        multiply(256, 16, 512, 32, 1024, (64, 32, 256))
        multiply(256, 16, 512 + 16, 32, 1024, (64, 32, 128))  # less aligned: not every algorithm can
    assert (len(planned), len(launched)) == (3, 4)
    assert launched[0][3] == 512 and launched[0][5] == 256 and launched[0][-1] == 7


def test_gemms_take_turns_on_streams_that_are_forked_and_joined(fake_library, monkeypatch):
    matmul = scaled_matmul()
    launched = fake_library.cublasLtMatmul.calls
    with matmul.launches() as multiply:
        for _ in range(3):
            multiply(256, 16, 512, 32, 1024, (64, 32, 128))
    assert [call[-1] for call in launched] == [7, 8, 7]
    assert fake_library.waits == [(8, 7, 0), (7, 8, 3)]
    # And joined where a launch fails, since others may run.
    with pytest.raises(ValueError), matmul.launches() as multiply:
        multiply(256, 20, 512, 32, 1024, (64, 32, 128))
    assert fake_library.waits[2:] == [(8, 7, 3), (7, 8, 3)]
    # Another caller's GEMMs, and it itself, wait for nothing of the first one's.
    fake_library.waits.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(99, fake_library))
    with matmul.launches() as multiply:
        multiply(256, 16, 512, 32, 1024, (64, 32, 128))
    assert fake_library.waits == [(9, 99, 3), (99, 9, 4)]


class Operations(TorchDispatchMode):
    """Notes how many waits between streams there were at each of torch's operations."""

    def __init__(self, waits):
        super().__init__()
        self.waits, self.at = waits, set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.at.add(len(self.waits))
        return operation(*args, **(kwargs or {}))


def test_nothing_is_launched_between_gemms_that_others_would_have_to_wait_for(fake_library):
    backend = cublas.CublasBackend(CPU)
    problem = checks.operands("cpu", [5, 0, 130], 256, 640)  # weight scales are padded, those of rows copied
    outs = checks.new_outs(problem, (128, 128), torch.bfloat16)  # the scales of columns are copied
    for call in (
        lambda: backend.grouped_gemm(problem.rows, problem.weights, problem.groups),
        lambda: backend.weight_gradient(problem.left, problem.right, problem.groups, outs),
    ):
        fake_library.waits.clear()
        with Operations(fake_library.waits) as operations:
            call()
        assert len(fake_library.waits) == 2 and operations.at == {0}
    assert len(fake_library.cublasLtMatmul.calls) == 2 + 4


def test_what_cublas_refuses_is_said_in_its_words(fake_library):
    matmul = scaled_matmul(cublaslt.SCALE_128X128, torch.float32)
    with matmul.launches() as multiply:
        fake_library.cublasLtMatmul.result = 15
        with pytest.raises(RuntimeError, match=r"cublasLtMatmul of \(M, N, K\) = \(64, 32, 128\): not supported"):
            multiply(256, 16, 512, 32, 1024, (64, 32, 128))
        fake_library.cublasLtMatmulAlgoGetHeuristic.effect = None
        with pytest.raises(RuntimeError, match="no algorithm for"):
            multiply(256, 16, 512, 32, 1024, (64, 64, 128))
        fake_library.cublasLtMatmulAlgoGetHeuristic.result = 15  # what it says where it finds none
        with pytest.raises(RuntimeError, match=r"Heuristic of \(M, N, K\) = \(64, 64, 128\): not supported"):
            multiply(256, 16, 512, 32, 1024, (64, 64, 128))
        assert len(fake_library.cublasLtMatmulPreferenceDestroy.calls) == 3


def test_what_is_handed_to_cublas(fake_library):
    attributes = {}
    fake_library.cublasLtMatmulDescSetAttribute.effect = lambda operation, attribute, value, size: attributes.update(
        {attribute: (value._obj.value, size)}
    )
    matmul = scaled_matmul(b_scaling=cublaslt.SCALE_128X128)
    # cuBLAS's A is b: transposed (3), with b's kind of scales (31); B's kind (32) is a's.
    assert attributes == {3: (1, 4), 31: (5, 4), 32: (4, 4)}
    with matmul.launches() as multiply:
        for add in (0, 4096):  # an address that did not change must not come from the launch before
            multiply(256 + add, 16 + add, 512 + add, 32 + add, 1024 + add, (64, 32, 128))
            assert attributes[17] == (32 + add, 8) and attributes[18] == (16 + add, 8)
            _, _, alpha, a, _, b, _, beta, c, _, d, _, _, workspace, workspace_bytes, _ = (
                fake_library.cublasLtMatmul.calls[-1]
            )
            assert (a, b, c, d) == (512 + add, 256 + add, 1024 + add, 1024 + add)
            assert (alpha._obj.value, beta._obj.value, workspace, workspace_bytes) == (1.0, 0.0, None, 0)
        fake_library.cublasLtMatmulDescSetAttribute.result = 7
        with pytest.raises(RuntimeError, match="cublasLtMatmulDescSetAttribute: not supported"):
            multiply(256, 16, 512, 32, 1024, (64, 32, 128))
    assert len(fake_library.cublasLtMatmul.calls) == 2


def test_addresses_that_cublas_cannot_read_are_named(fake_library):
    matmul = scaled_matmul()
    with matmul.launches() as multiply, pytest.raises(ValueError, match="16 bytes, got a_scales at 0x14, out at"):
        multiply(256, 20, 512, 32, 1024 + 8, (64, 32, 128))
    assert not fake_library.cublasLtMatmul.calls


class AlignedMatmul(HostMatmul):
    def multiply(self, *addresses, **named):
        assert not any(address % cublaslt.MIN_ALIGNMENT for address in addresses[:5])
        super().multiply(*addresses, **named)


def test_scales_anywhere_are_handed_over_aligned(host_matmul, monkeypatch):
    """Where rows are a multiple of four the strides are right already, wherever the values begin."""
    monkeypatch.setattr(cublas, "ScaledMatmul", AlignedMatmul)
    backend = cublas.CublasBackend(CPU)
    problem = checks.operands("cpu", [128], 128, 640)

    def moved(pair):
        q, scales = pair
        buffer = torch.empty(scales.numel() + 1)
        return q, buffer[1:].as_strided(scales.shape, (1, scales.shape[0]), 1).copy_(scales)

    assert moved(problem.rows)[1].data_ptr() % cublaslt.MIN_ALIGNMENT
    problem = problem._replace(rows=moved(problem.rows), left=moved(problem.left), right=moved(problem.right))
    checks.check_grouped_gemm(backend, problem, limit=checks.BF16_ROUNDING)
    checks.check_weight_gradient(backend, problem, (128,), torch.bfloat16, limit=checks.BF16_ROUNDING)


def test_weight_scales_are_copied_only_to_align_them(host_matmul, monkeypatch):
    seen = []

    class Watched(HostMatmul):
        def multiply(self, a, a_scales, b, b_scales, out, shape):
            seen.append(b_scales)
            super().multiply(a, a_scales, b, b_scales, out, shape)

    monkeypatch.setattr(cublas, "ScaledMatmul", Watched)
    backend = cublas.CublasBackend(CPU)
    for k, copied in ((512, False), (640, True)):
        problem = checks.operands("cpu", [5], 64, k)
        checks.check_grouped_gemm(backend, problem, limit=checks.BF16_ROUNDING)
        assert (seen[-1] != problem.weights[1].data_ptr()) == copied


@pytest.mark.parametrize("fixture", ["deepgemm_backend", "cublas_backend"])
def test_an_empty_sum_is_zero(fixture, request):
    groups = gemm.Groups.of([5, 0, 130])
    codes = torch.empty(groups.padded_rows, 0, dtype=torch.float8_e4m3fn)
    weights = torch.empty(3, 128, 0, dtype=torch.float8_e4m3fn)
    a, b = (codes, torch.empty(groups.padded_rows, 0)), (weights, torch.empty(3, 1, 0))
    out = request.getfixturevalue(fixture).grouped_gemm(a, b, groups)
    assert out.shape == (groups.padded_rows, 128) and not out.any()


def test_shapes_that_a_library_cannot_do(deepgemm_backend, cublas_backend):
    for backend, n, k, message in (
        (deepgemm_backend, 96, 128, "N is a multiple of 64 in a forward GEMM, got 96"),
        (deepgemm_backend, 128, 192, "K is a multiple of 128 in a forward GEMM, got 192"),
        (cublas_backend, 72, 128, "N to be a multiple of 16 in a forward GEMM, got 72"),
        (cublas_backend, 64, 192, "K to be a multiple of 128 in a forward GEMM, got 192"),
    ):
        problem = checks.operands("cpu", [10], n, k)
        with pytest.raises(ValueError, match=message):
            backend.grouped_gemm(problem.rows, problem.weights, problem.groups)
    for backend in (deepgemm_backend, cublas_backend):
        problem = checks.operands("cpu", [10], 72, 128)
        with pytest.raises(ValueError, match="in a weight_gradient GEMM, got 72"):
            backend.weight_gradient(
                problem.left, problem.right, problem.groups, checks.new_outs(problem, (72,), torch.bfloat16)
            )


def test_versions_are_named(deepgemm_backend, monkeypatch):
    monkeypatch.setattr(deepgemm, "_installed", deepgemm.TESTED.get)
    assert deepgemm_backend.describe().endswith("apache-tvm-ffi 0.1.11: the tested versions")
    monkeypatch.setattr(deepgemm, "_installed", lambda package: None)
    assert "deep_gemm 9.9" in deepgemm_backend.describe() and "NOT TESTED" in deepgemm_backend.describe()


def test_importing_loads_no_library():
    script = (
        "import sys, torch, ds_fp4, ds_fp4.gemm as gemm; gemm.choose(); gemm.describe('cpu'); "
        "assert not torch.cuda.is_initialized(); "
        "assert not {'deep_gemm', 'ds_fp4.gemm.deepgemm', 'ds_fp4.gemm.cublas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, capture_output=True)
