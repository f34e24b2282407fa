# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What can be known about the CUDA kernels without a GPU.

- The format rules in ops/csrc compile as host code; here they are compared with the PyTorch reference, bit for bit,
  over every BF16 and FP16 number, and with NVIDIA's own conversions where CUDA's headers are there.
- Every kernel compiles for Hopper without spills, stack frame or local memory, and for the older GPUs of the codec
  level.
- NVRTC compiles every kernel by the name that ops/kernels.py asks for.
"""

import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ds_fp4 import formats, ops
from ds_fp4.ops import kernels, nvrtc

CSRC = Path(ops.__file__).parent / "csrc"
HOST_SOURCE = Path(__file__).parent / "kernel_sources_host.cpp"
ROUNDINGS = list(formats.SCALE_ROUNDINGS)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def _cuda_include() -> Path | None:
    """CUDA's headers, where they have FP4."""
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    return next((path for path in candidates if (path / "cuda_fp4.h").exists()), None)


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="no nvcc")


# ---- the rules on the host ----


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = os.environ.get("CXX", "g++")
    library = tmp_path_factory.mktemp("host") / "kernel_sources_host.so"
    include = _cuda_include()
    headers = [f"-I{include}", "-DDS_FP4_WITH_CUDA_HEADERS"] if include else []
    warnings = ["-Wall", "-Wno-unknown-pragmas", "-Werror"]
    command = [compiler, "-std=c++17", "-O2", *warnings, "-shared", "-fPIC", f"-I{CSRC}", *headers]
    subprocess.run([*command, str(HOST_SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _pointer(t: torch.Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def _host_to_fp4(host, x: torch.Tensor, rounding: str):
    m, k = x.shape
    packed, scales = torch.empty(m, k // 2, dtype=torch.uint8), torch.empty(m, k // 32, dtype=torch.uint8)
    add = ctypes.c_uint32(formats.SCALE_ROUNDINGS[rounding])
    blocks = ctypes.c_int64(scales.numel())
    host.host_to_fp4(TYPE_NUMBER[x.dtype], _pointer(x), blocks, add, _pointer(packed), _pointer(scales))
    return packed, scales


def _host_to_fp8(host, x: torch.Tensor):
    m, k = x.shape
    q, ue8m0 = torch.empty(m, k, dtype=torch.uint8), torch.empty(m, k // 128, dtype=torch.uint8)
    fp32 = torch.empty(m, k // 128, dtype=torch.float32)
    groups = ctypes.c_int64(ue8m0.numel())
    host.host_to_fp8(TYPE_NUMBER[x.dtype], _pointer(x), groups, _pointer(q), _pointer(ue8m0), _pointer(fp32))
    return q, ue8m0, fp32


@functools.cache
def _every_16_bit_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def _with_leader(values: torch.Tensor, leader: torch.Tensor, block: int) -> torch.Tensor:
    """Blocks [n, block] of the values no larger than `leader`, each block led by it: it sets the scale."""
    values = values[values.abs() <= leader.abs()]
    n = -(-values.numel() // (block - 1))
    blocks = values.new_zeros(n * (block - 1))
    blocks[: values.numel()] = values
    return torch.cat([leader.expand(n, 1), blocks.view(n, block - 1)], dim=1).contiguous()


def _leaders(dtype: torch.dtype) -> list[torch.Tensor]:
    """Magnitudes that give every kind of scale: significands around each rounding rule's threshold, many exponents."""
    if dtype == torch.bfloat16:
        exponents, mantissas, width = [0, 1, 2, 3, 4, 8, 9, 40, 120, 127, 128, 200, 252, 253, 254], 7, 7
    else:
        exponents, mantissas, width = [0, 1, 2, 13, 15, 16, 29, 30], 10, 10
    half, three_quarters = 1 << (width - 1), 3 << (width - 2)
    significands = [0, 1, half, half + 1, three_quarters, three_quarters + 1, (1 << width) - 1]
    bits = [(e << mantissas) | m for e, m in itertools.product(exponents, significands)]
    return list(torch.tensor(bits, dtype=torch.int16).view(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_number_to_fp4(host, dtype):
    values = _every_16_bit_number(dtype)
    values = values[values.isfinite()]
    for number, leader in enumerate(_leaders(dtype)):
        x = _with_leader(values, leader, 32)
        for rounding in ROUNDINGS if number % 4 == 0 else [ROUNDINGS[number % 4]]:
            expected, got = formats.bf16_to_fp4_row(x, rounding), _host_to_fp4(host, x, rounding)
            assert torch.equal(expected[1], got[1]), (leader, rounding)
            assert torch.equal(expected[0], got[0]), (leader, rounding)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_number_to_fp8(host, dtype):
    values = _every_16_bit_number(dtype)
    values = values[values.isfinite()]
    for leader in _leaders(dtype):
        x = _with_leader(values, leader, 128)
        q, ue8m0, fp32 = _host_to_fp8(host, x)
        expected_q, expected_fp32 = formats.bf16_to_fp8_row(x)
        _, expected_ue8m0 = formats.bf16_to_fp8_row(x, scale_dtype=torch.uint8)
        assert torch.equal(expected_ue8m0, ue8m0), leader
        assert torch.equal(expected_fp32.view(torch.int32), fp32.view(torch.int32)), leader
        assert torch.equal(expected_q.view(torch.uint8), q), leader


def _hard_rows(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, 512]: random bits, values at and beside ties, subnormals, NaN and infinity in every lane, zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits_dtype = BITS_DTYPE[dtype]
    info = torch.iinfo(bits_dtype)
    rows = [torch.randint(info.min, info.max + 1, (256, 512), generator=generator, dtype=bits_dtype).view(dtype)]
    finite = rows[0].clone()
    rows.append(finite.masked_fill_(~finite.isfinite(), 0))
    # Ties and neighbors of both formats under many scales.
    e2m1 = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0]
    codes = torch.tensor([*e2m1, 2**-10, 3 * 2**-10, 17.0, 19.0, 448.0, 416.0, 464.0])
    ties = codes[torch.randint(0, len(codes), (256, 512), generator=generator)]
    # One unit of the last place beside a value is one unit of its bits.
    low, high = (-24, 6) if dtype == torch.float16 else (-140, 118)
    exponents = torch.randint(low, high, (256, 16, 1), generator=generator)
    ties = (ties.view(256, 16, 32).to(torch.float64) * 2.0 ** exponents.to(torch.float64)).view(256, 512).to(dtype)
    beside = torch.randint(-1, 2, ties.shape, generator=generator, dtype=bits_dtype)
    rows.append((ties.view(bits_dtype) + beside).view(dtype))
    kept = torch.randint(0, 2, (256, 512), generator=generator)
    rows.append(torch.randn(256, 512, generator=generator).to(dtype) * kept)
    tiny = torch.finfo(dtype).tiny
    rows.append((torch.randn(64, 512, generator=generator, dtype=torch.float64) * tiny / 16).to(dtype))
    lanes = torch.randn(128, 512, generator=generator).to(dtype)
    bad = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0]).to(dtype)
    lanes[torch.arange(128), torch.arange(128)] = bad.repeat(32)
    rows.append(lanes)
    rows.append(torch.zeros(1, 512, dtype=dtype))
    rows.append(-torch.zeros(1, 512, dtype=dtype))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hard_values(host, dtype):
    x = _hard_rows(dtype, seed=0)
    for rounding in ROUNDINGS:
        for expected, got in zip(formats.bf16_to_fp4_row(x, rounding), _host_to_fp4(host, x, rounding), strict=True):
            assert torch.equal(expected, got), rounding
    q, ue8m0, fp32 = _host_to_fp8(host, x)
    expected_q, expected_fp32 = formats.bf16_to_fp8_row(x)
    assert torch.equal(expected_q.view(torch.uint8), q)
    assert torch.equal(expected_fp32.view(torch.int32), fp32.view(torch.int32))
    assert torch.equal(formats.bf16_to_fp8_row(x, scale_dtype=torch.uint8)[1], ue8m0)


def _assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.view(BITS_DTYPE[a.dtype]), b.view(BITS_DTYPE[b.dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_scale_decodes(host, dtype):
    # MXFP4: 256 scale bytes, and all pairs of codes in 16 blocks each.
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].repeat(1, 16)
    out = torch.empty(256, 512, dtype=dtype)
    blocks = ctypes.c_int64(scales.numel())
    host.host_from_fp4(TYPE_NUMBER[dtype], _pointer(packed), _pointer(scales), blocks, _pointer(out))
    _assert_same_bits(formats.fp4_row_to_bf16(packed, scales, dtype=dtype), out)
    # FP8: UE8M0 bytes and every FP32 power of two, NaN and infinity included.
    powers = torch.cat([1 << torch.arange(23), torch.arange(1, 256) << 23]).to(torch.int32).view(torch.float32)
    for scale in (torch.arange(256, dtype=torch.int32).to(torch.uint8), powers):
        q = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(scale.numel(), 1)
        scales = scale[:, None].repeat(1, 2)
        bits = torch.empty(scales.shape, dtype=torch.int32)
        if scale.dtype == torch.float32:
            host.host_scale_bits(_pointer(scales), ctypes.c_int64(scales.numel()), _pointer(bits))
        else:
            bits = (scales.to(torch.int32) << 23).masked_fill_(scales == 0, 0x00400000)
            bits = bits.masked_fill_(scales == 255, 0x7FC00000)
        out = torch.empty(q.shape, dtype=dtype)
        groups = ctypes.c_int64(scales.numel())
        host.host_from_fp8(TYPE_NUMBER[dtype], _pointer(q), _pointer(bits), groups, _pointer(out))
        _assert_same_bits(formats.fp8_row_to_bf16(q, scales, dtype=dtype), out)


@pytest.mark.skipif(_cuda_include() is None, reason="no cuda_fp4.h")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_codes_are_those_of_nvidias_conversions(host, dtype):
    values = _every_16_bit_number(dtype)
    values = values[values.isfinite()]
    for limit, block, largest in ((6.0, 32, host.nvidia_e2m1), (448.0, 128, host.nvidia_e4m3)):
        # A leader of 6 or 448 makes the scale 1, so that codes are those of the values themselves.
        x = _with_leader(values, torch.tensor(limit, dtype=dtype), block)
        codes = torch.empty(x.shape, dtype=torch.uint8)
        scaled = x.to(torch.float32)
        largest(_pointer(scaled), ctypes.c_int64(x.numel()), _pointer(codes))
        if block == 32:
            packed, scales = _host_to_fp4(host, x, "even")
            got = torch.stack([packed & 0xF, packed >> 4], dim=-1).view(x.shape)
        else:
            got, scales, _ = _host_to_fp8(host, x)
        assert bool((scales == 127).all())
        assert torch.equal(codes, got)


def _all_codes() -> torch.Tensor:
    """All 256 E4M3 codes in each place of a unit of eight: every code beside every other parity."""
    return torch.cat([torch.arange(256).roll(i) for i in range(8)]).to(torch.uint8)


@pytest.mark.skipif(_cuda_include() is None, reason="no cuda_fp4.h")
def test_shifts_are_those_of_nvidias_conversions(host):
    nvidia = functools.cache(host.nvidia_shifted)
    shifts = torch.arange(-30, 7, dtype=torch.int32)
    codes = torch.empty(len(shifts), 256, 8, dtype=torch.uint8)
    host.host_fp4_to_fp8(_pointer(shifts), ctypes.c_int64(len(shifts)), _pointer(codes))
    for i, shift in enumerate(shifts.tolist()):
        table = torch.tensor([nvidia(code, 1, 0, shift) & 0xFF for code in range(16)], dtype=torch.uint8)
        byte = torch.arange(256)
        pair = torch.stack([table[byte & 0xF], table[byte >> 4]], 1)
        assert torch.equal(codes[i], pair.repeat(1, 4)), shift
    source = _all_codes()
    finite = (source & 0x7F) != 0x7F
    for shift in range(-30, 12):
        packed = torch.empty(source.numel() // 2, dtype=torch.uint8)
        host.host_fp8_to_fp4(_pointer(source), ctypes.c_int64(source.numel() // 8), shift, _pointer(packed))
        table = torch.tensor([nvidia(code, 0, 1, shift) & 0xF for code in range(256)], dtype=torch.uint8)
        got = torch.stack([packed & 0xF, packed >> 4], 1).flatten()
        assert torch.equal(got[finite], table[source.long()][finite]), shift
    for shift in range(-30, 1):
        shifted = torch.empty_like(source)
        host.host_fp8_to_fp8(_pointer(source), ctypes.c_int64(source.numel() // 4), shift, _pointer(shifted))
        table = torch.tensor([nvidia(code, 0, 0, shift) & 0xFF for code in range(256)], dtype=torch.uint8)
        assert torch.equal(shifted, table[source.long()]), shift


def test_largest_code_of_16(host):
    codes = torch.randint(0, 256, (4096, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes &= (torch.randint(0, 128, (4096, 1), generator=torch.Generator().manual_seed(1)) | 0x80).to(torch.uint8)
    largest = torch.empty(4096, dtype=torch.int32)
    host.host_e4m3_amax(_pointer(codes), ctypes.c_int64(4096), _pointer(largest))
    assert torch.equal(largest, (codes & 0x7F).amax(1).to(torch.int32))


# ---- the sources under nvcc ----


CUDA_SOURCES = ("kernels.cu", "fused_kernels.cu")
OTHER_ARCHITECTURES = ("80", "89", "100")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function that compiles a source for an architecture as all tests here need it, once, two at a time.

    It returns what nvcc printed, and the PTX between source and cubin.
    """
    hopper = ["-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-Werror", "all-warnings"]

    def compile(source: str, target: list[str]) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp("nvcc")
        output = ["-cubin", "-o", str(folder / "k.cubin"), "-keep", "-keep-dir", str(folder)]
        command = [_nvcc(), *kernels.NVCC_FLAGS, *target, *output, str(CSRC / source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stderr, (folder / source).with_suffix(".ptx").read_text()

    targets = {"90a": hopper}
    targets |= {arch: [f"-gencode=arch=compute_{arch},code=sm_{arch}"] for arch in OTHER_ARCHITECTURES}
    pool = ThreadPoolExecutor(2)
    work = {(s, arch): pool.submit(compile, s, target) for arch, target in targets.items() for s in CUDA_SOURCES}
    yield lambda source, arch: work[source, arch].result()
    pool.shutdown(cancel_futures=True)


@needs_nvcc
def test_no_kernel_spills_on_hopper(compiled):
    report = "".join(compiled(source, "90a")[0] for source in CUDA_SOURCES)
    entries = re.findall(r"Compiling entry function '(\w+)'", report)
    assert len(entries) == sum(len(kernel.instantiations) for kernel in kernels.KERNELS.values())
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(usage) >= len(entries)
    assert set(usage) == {("0", "0", "0")}, report
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert max(registers) <= 128, report  # 2 blocks of 256 threads on a multiprocessor at the least
    assert "lmem" not in report and "local" not in report, report


@needs_nvcc
@pytest.mark.parametrize("source", CUDA_SOURCES)
@pytest.mark.parametrize("arch", OTHER_ARCHITECTURES)
def test_other_architectures_compile(compiled, arch, source):
    assert f".target sm_{arch}" in compiled(source, arch)[1]


@needs_nvcc
def test_accesses_are_wide_and_arithmetic_keeps_subnormals(compiled):
    bodies = []
    for source in CUDA_SOURCES:
        bodies += re.split(r"\.visible \.entry ", compiled(source, "90a")[1])[1:]
    # The wide side of each kernel's vector path. Column kernels load words: a warp's are 128 bytes of one row.
    loads = {
        "bf16_to_fp4_row": "ld.global.nc.v4",
        "bf16_to_fp8_row": "ld.global.nc.v4",
        "fp8_row_to_fp4_row": "ld.global.nc.v4",
        "fp8_row_to_fp8_row": "ld.global.nc.v4",
    }
    stores = {
        "fp4_row_to_bf16": "st.global.v4",
        "fp8_row_to_bf16": "st.global.v4",
        "fp4_row_to_fp8_row": "st.global.v4",
        "fp8_row_to_fp8_row": "st.global.v4",
        "fp4_row_to_fp8_col": "st.global.v4",
        "fp8_row_to_fp8_col": "st.global.v4",
        "bf16_to_fp8_row_and_col": "st.global.v4",
        "weight_to_fp8": "st.global.v4",
        "split_weight_gradient": "st.global.v4",
    }
    always = {  # kernels without a path for rows that are not aligned
        "swiglu_forward": ("ld.global.nc.v4", "st.global.v2"),
        "swiglu_backward": ("ld.global.nc.v4", "st.global.v4"),
    }
    for body in bodies:
        name = re.match(r"\w+", body).group()
        kernel = next(kernel for kernel in kernels.KERNELS if f"{len(kernel)}{kernel}I" in name)
        assert all(access in body for access in always.get(kernel, ())), name
        if "Lb1EE" in name or "IJEE" in name:  # the vector path
            assert loads.get(kernel, "") in body and stores.get(kernel, "") in body, name
        assert ".local" not in body, name
        # Of an activation's sigmoid alone, where what is flushed is added to 1.
        assert ".ftz" not in re.sub(r"(ex2|rcp)\.approx\.ftz", "", body), name
        assert not re.search(r"\bdiv\.(?![us])", body), name


# ---- the sources under NVRTC ----


@pytest.mark.parametrize("name", sorted(kernels.KERNELS))
def test_nvrtc_compiles_every_instantiation(name):
    pytest.importorskip("cupy")
    names, cubin = nvrtc.compile_kernel(kernels.KERNELS[name], "sm_90a")
    assert set(names) == set(kernels.KERNELS[name].instantiations)
    assert all(lowered.encode() in cubin for lowered in names.values())
    assert cubin[:4] == b"\x7fELF"


# ---- the table ----


def test_parameter_tables_match_the_headers():
    for name, kernel in kernels.KERNELS.items():
        assert kernel.params == _fields((CSRC / f"{name}.cuh").read_text(), f"{name}_params"), name


def test_dynamic_shared_memory_matches_the_headers():
    for name, kernel in kernels.KERNELS.items():
        stated = re.search(r"constexpr int k\w+SharedBytes = (\d+);", (CSRC / f"{name}.cuh").read_text())
        assert kernel.shared_bytes == (int(stated.group(1)) if stated else 0), name


def _fields(header: str, struct: str) -> tuple[str, ...]:
    """Names of a struct's fields, those of nested structs in their place."""
    nested = {"Rows": "row_tiles", "Columns": "column_tiles", "Scales": "scales"}
    body = re.search(rf"struct {struct} {{\n(.*?)\n}};", header, re.S).group(1)
    names: list[str] = []
    for line in body.splitlines():
        kind, name = re.match(r"\s*(?:const )?(\w+)\*? (\w+);", line).groups()
        if kind not in nested:
            names.append(name)
            continue
        fields = _fields((CSRC / f"{nested[kind]}.cuh").read_text(), kind)
        # There is one Rows or Columns in a kernel, but scales of several kinds.
        names += [f"{name}_{field}" for field in fields] if kind == "Scales" else fields
    return tuple(names)
