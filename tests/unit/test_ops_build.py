# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Compiling the kernels for the first time: many processes on one folder, killed builds, failed builds, no locks.

The cache is tested with builds that take no compiler, the op builder with a tiny extension through DeepSpeed's and
torch's own code, and once, where there is nvcc, with the real kernels. None of it needs a GPU.
"""

import errno
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from ds_fp4 import ops
from ds_fp4.ops import backends, build_support, cache, kernels

OPS = Path(ops.__file__).parent


def _start(script: str, *arguments: object, **environment: str) -> subprocess.Popen:
    """A Python process of its own session, so that what it leaves running can be ended."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def _finish(process: subprocess.Popen, timeout: float = 240) -> tuple[str, str]:
    """What it wrote to standard output, less DeepSpeed's log, and to standard error."""
    try:
        output, errors = process.communicate(timeout=timeout)
        return re.sub(r"(?m)^\[\d{4}-.*\n", "", output), errors
    finally:
        _end_session(process)


def _end_session(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _wait_for(condition, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


# ---- the cache ----

# Loads cache.py alone, so that a process starts in milliseconds. `build` writes a line to a log, waits while a file
# named "slow" is there, and fails if one named "fail" is.
CACHE_PROCESS = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
cache.NOTICE_AFTER_S = 0.5
work = Path(sys.argv[2])

def build(attempt):
    with open(work / "log", "a") as log:
        log.write(f"{os.getpid()}\\n")
    artifact = attempt / "artifact"
    with open(artifact, "w") as file:
        file.write("first half, ")
        file.flush()
        while (work / "slow").exists():
            time.sleep(0.02)
        if (work / "fail").exists():
            raise ValueError("the compiler said no")
        file.write("second half")
    return artifact

(work / f"ready-{os.getpid()}").touch()
while len(list(work.glob("ready-*"))) < int(sys.argv[3]):
    time.sleep(0.01)
try:
    print(cache.get("kernels-0123.so", build).read_text())
except cache.BuildError as error:
    print("BuildError:", error)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path


def _cache_processes(work: Path, count: int) -> list[subprocess.Popen]:
    return [_start(CACHE_PROCESS, OPS / "cache.py", work, count) for _ in range(count)]


def _builds(work: Path) -> int:
    return len((work / "log").read_text().split())


def test_one_of_many_processes_builds(work):
    outputs = [_finish(process)[0].strip() for process in _cache_processes(work, 8)]
    assert outputs == ["first half, second half"] * 8
    assert _builds(work) == 1
    # Nothing is left but the file and its lock.
    assert sorted(path.name for path in (work / "cache").iterdir()) == ["kernels-0123.lock", "kernels-0123.so"]


def test_a_killed_build_hangs_nobody(work):
    (work / "slow").touch()
    processes = _cache_processes(work, 4)
    _wait_for((work / "log").exists)
    builder = int((work / "log").read_text())
    killed = next(process for process in processes if process.pid == builder)
    others = [process for process in processes if process is not killed]
    os.kill(builder, signal.SIGKILL)
    killed.wait()
    (work / "slow").unlink()
    assert [_finish(process)[0].strip() for process in others] == ["first half, second half"] * 3
    assert _builds(work) == 2


def test_a_failed_build_is_reported_by_all_that_waited(work):
    (work / "fail").touch()
    (work / "slow").touch()
    processes = _cache_processes(work, 4)
    _wait_for((work / "log").exists)
    time.sleep(1)  # the others are waiting now
    (work / "slow").unlink()
    outputs = [_finish(process)[0] for process in processes]
    assert all("BuildError" in output and "the compiler said no" in output for output in outputs)
    assert _builds(work) == 1
    assert not (work / "cache" / "kernels-0123.so").exists()
    # Whoever comes later tries again.
    (work / "fail").unlink()
    for path in work.glob("ready-*"):
        path.unlink()
    assert _finish(_cache_processes(work, 1)[0])[0].strip() == "first half, second half"
    assert not (work / "cache" / "kernels-0123.failed").exists()


def test_a_process_that_waits_says_for_whom(work):
    (work / "slow").touch()
    processes = _cache_processes(work, 2)
    _wait_for((work / "log").exists)
    builder = int((work / "log").read_text())
    time.sleep(1.5)
    (work / "slow").unlink()
    errors = {process.pid: _finish(process)[1] for process in processes}
    notice = re.escape(f"waiting for process {builder} on ")
    assert errors.pop(builder) == ""
    (waiting,) = errors.values()
    assert re.search(notice, waiting) and str(work / "cache") in waiting and waiting.count("\n") == 1


def _artifact(attempt: Path) -> Path:
    path = attempt / "artifact"
    path.write_text("built")
    return path


def test_what_is_there_needs_no_lock(work, monkeypatch):
    wanted = cache.get("k-1.so", _artifact)
    monkeypatch.setattr(cache, "_locked", None)
    assert cache.get("k-1.so", None) == wanted


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks(work, monkeypatch, capsys, number):
    import fcntl

    real = fcntl.flock
    host = work / "host"
    host.mkdir()
    monkeypatch.setattr(cache, "host_folder", lambda: host)

    def flock(descriptor, operation):
        if os.path.samefile(f"/proc/self/fd/{descriptor}", work / "cache" / "k-1.lock"):
            raise OSError(number, os.strerror(number))
        return real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert cache.get("k-1.so", _artifact) == host / "k-1.so"
    assert "without locks" in capsys.readouterr().err
    assert cache.get("k-1.so", None) == host / "k-1.so"
    assert capsys.readouterr().err == ""


def test_folder_that_cannot_be_written(work, monkeypatch, capsys):
    (work / "file").touch()
    monkeypatch.setenv(cache.CACHE_ENV, str(work / "file" / "cache"))
    monkeypatch.setattr(cache, "host_folder", lambda: work)
    assert cache.get("k-1.so", _artifact).read_text() == "built"
    assert cache.CACHE_ENV in capsys.readouterr().err


def test_folder_that_cannot_be_entered(work, monkeypatch, capsys):
    folder, host = work / "cache", work / "host"
    host.mkdir()
    monkeypatch.setattr(cache, "host_folder", lambda: host)

    def denying(real):
        # By hand: the permissions of files do not hold for root.
        def call(path, *args, **kwargs):
            if not isinstance(path, int) and str(path).startswith(str(folder)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *args, **kwargs)

        return call

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, denying(getattr(os, name)))
    assert cache.get("k-1.so", _artifact) == host / "k-1.so"
    assert f"cannot write to {folder}" in capsys.readouterr().err


def test_folder_that_is_closed_after_its_lock_was_made(work, monkeypatch, capsys):
    host = work / "host"
    host.mkdir()
    monkeypatch.setattr(cache, "host_folder", lambda: host)
    real = cache.tempfile.mkdtemp

    def denying(*args, dir, **kwargs):
        if Path(dir) != host:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))
        return real(*args, dir=dir, **kwargs)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", denying)
    assert cache.get("k-1.so", _artifact) == host / "k-1.so"
    assert "cannot write to" in capsys.readouterr().err


def test_a_failure_that_cannot_be_noted_is_still_the_builds(work, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def build(attempt):
        raise RuntimeError("the compiler's output")

    monkeypatch.setattr(cache, "_write", full)
    with pytest.raises(cache.BuildError, match="the compiler's output"):
        cache.get("k-1.so", build)


def test_host_folder_is_private(monkeypatch, tmp_path):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    first = cache.host_folder()
    assert first == cache.host_folder() and first.stat().st_mode & 0o077 == 0
    first.chmod(0o777)  # others might have put code there
    assert cache.host_folder() != first


def test_default_folder_is_torchs(monkeypatch):
    monkeypatch.delenv(cache.CACHE_ENV, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert cache.folder() == Path("/somewhere/ds_fp4")


# ---- the op builder, through DeepSpeed and torch ----

TINY_SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fp4", "", -1, nullptr};
PyMODINIT_FUNC PyInit_fp4() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", 42);
    return module;
}
"""

# A compiler that tells of each compilation, waits while a file "slow" is there and fails if one named "fail" is.
TINY_COMPILER = """#!/bin/sh
case "$*" in
*tiny.cpp*-o*|*-o*tiny.cpp*)
    echo compiling >>{work}/log
    while [ -e {work}/slow ]; do sleep 0.05; done
    if [ -e {work}/fail ]; then echo "tiny.cpp:1: the compiler said no" >&2; exit 1; fi ;;
esac
exec {compiler} "$@"
"""

TINY_PROCESS = """
import os, sys, time
from pathlib import Path
from ds_fp4.ops import builder

work = Path(sys.argv[1])

class TinyBuilder(builder.FP4Builder):
    def sources(self): return [str(work / "tiny.cpp")]
    def nvcc_args(self): return []
    def obstacle(self): return None
    def architectures(self): return ["9.0"]

(work / f"ready-{os.getpid()}").touch()
while len(list(work.glob("ready-*"))) < int(sys.argv[2]):
    time.sleep(0.01)
try:
    module = TinyBuilder().load()
    print(module.answer, module.__file__)
except RuntimeError as error:
    print("failed:", error)
"""


@pytest.fixture
def tiny(work, monkeypatch):
    (work / "tiny.cpp").write_text(TINY_SOURCE)
    compiler = work / "compiler"
    compiler.write_text(TINY_COMPILER.format(work=work, compiler=os.environ.get("CXX", "g++")))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    # A lock that a killed build left where torch, and DeepSpeed with it, would build.
    extensions = work / "torch_extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    for folder in (extensions / "fp4", work / "cache" / "fp4"):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    return work


def _tiny_processes(work: Path, count: int) -> list[subprocess.Popen]:
    return [_start(TINY_PROCESS, work, count) for _ in range(count)]


def test_four_processes_start_cold_and_one_is_killed(tiny):
    (tiny / "slow").touch()
    processes = _tiny_processes(tiny, 4)
    try:
        _wait_for((tiny / "log").exists)
        builder = json.loads(next((tiny / "cache").glob("*.lock")).read_text())["pid"]
        killed = next(process for process in processes if process.pid == builder)
        # The process alone: ninja and the compiler live on, and finish their work when "slow" is gone.
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        others = [process for process in processes if process is not killed]
        _wait_for(lambda: len((tiny / "log").read_text().split()) == 2)
        (tiny / "slow").unlink()
        outputs = [_finish(process)[0] for process in others]
    finally:
        for process in processes:
            _end_session(process)
    (module,) = (tiny / "cache").glob("*.so")
    assert outputs == [f"42 {module}\n"] * 3
    # A later process finds the module and compiles nothing.
    for path in tiny.glob("ready-*"):
        path.unlink()
    assert _finish(_tiny_processes(tiny, 1)[0])[0] == f"42 {module}\n"
    assert len((tiny / "log").read_text().split()) == 2


def test_compiler_errors_reach_every_process(tiny):
    (tiny / "fail").touch()
    (tiny / "slow").touch()
    processes = _tiny_processes(tiny, 2)
    _wait_for((tiny / "log").exists)
    time.sleep(1)
    (tiny / "slow").unlink()
    outputs = [_finish(process)[0] for process in processes]
    assert all(output.startswith("failed:") and "tiny.cpp:1: the compiler said no" in output for output in outputs)
    assert len((tiny / "log").read_text().split()) == 1


def test_the_same_process_can_try_again(tiny):
    script = TINY_PROCESS + textwrap.dedent("""
        (work / "fail").unlink()
        print(TinyBuilder().load().answer)
    """)
    (tiny / "fail").touch()
    output, _ = _finish(_start(script, tiny, 1))
    assert output.startswith("failed:") and output.endswith("\n42\n")


# ---- the real kernels, where nvcc is there ----

# Makes torch for the host look as one for CUDA 13 to torch's and DeepSpeed's build code; nothing is launched.
CUDA_TORCH = """
import sys, torch
from torch.utils import cpp_extension
if torch.version.cuda is None:
    torch.version.cuda = sys.argv[1]
    cpp_extension.CUDA_HOME = sys.argv[2]
    torch.cuda.is_available = lambda: True
"""

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


def _cuda() -> tuple[str, Path]:
    """Version and root of the nvcc on PATH."""
    report = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    dry_run = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    return re.search(r"release (\d+\.\d+)", report).group(1), Path(re.search(r"_HERE_=(\S+)", dry_run).group(1)).parent


@pytest.fixture
def cuda_torch(work, monkeypatch):
    """Arguments for CUDA_TORCH; libraries that torch's build links on a CUDA torch, empty."""
    stubs = work / "stubs"
    stubs.mkdir()
    (stubs / "empty.cpp").touch()
    for library in ("c10_cuda", "torch_cuda"):
        command = ["g++", "-shared", "-fPIC", str(stubs / "empty.cpp"), "-o", str(stubs / f"lib{library}.so")]
        subprocess.run(command, check=True)
    monkeypatch.setenv("LIBRARY_PATH", str(stubs))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stubs))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    return _cuda()


@needs_nvcc
def test_the_kernels_build_on_first_use(work, cuda_torch):
    script = CUDA_TORCH + textwrap.dedent("""
        import json
        from ds_fp4.ops.builder import FP4Builder
        module = FP4Builder().load()
        try:
            module.launch(0, 1, 256, b"", 0)
        except ValueError as error:
            refusal = str(error)
        print(json.dumps([module.__file__, module.kernel_names(), module.architectures, refusal]))
    """)
    output, errors = _finish(_start(script, *cuda_torch), timeout=600)
    assert output, errors
    path, names, architectures, refusal = json.loads(output)
    assert Path(path).parent == work / "cache"
    expected = [f"{kernel.name}<{t}>" for kernel in kernels.KERNELS.values() for t in kernel.instantiations]
    assert names == expected
    assert architectures == "sm90"
    assert b"sm_90a" in Path(path).read_bytes()
    sizes = {name: kernel.packing.size for name, kernel in kernels.KERNELS.items()}
    assert f"takes {sizes['bf16_to_fp4_row']} bytes" in refusal


@needs_nvcc
def test_what_an_install_builds(work, cuda_torch):
    script = CUDA_TORCH + textwrap.dedent("""
        import json
        sys.path.insert(0, sys.argv[3])
        import build_support
        options = build_support.extension_options(sys.argv[4])
        (extension,) = options["ext_modules"]
        print(json.dumps([extension.name, extension.sources, extension.extra_compile_args["nvcc"]]))
    """)
    output, errors = _finish(_start(script, *cuda_torch, OPS, OPS.parent))
    assert output, errors
    name, sources, flags = json.loads(output)
    assert name == "ds_fp4.ops.fp4_kernels"
    assert sorted(sources) == ["ops/csrc/binding.cpp", "ops/csrc/fused_kernels.cu", "ops/csrc/kernels.cu"]
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert "--use_fast_math" not in flags


def test_an_install_with_an_old_setuptools_says_so(monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match="setuptools 77 or later, got 65.5.0"):
        runpy.run_path(str(OPS.parent / "setup.py"))


def test_an_install_without_cuda_says_why(monkeypatch):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA")
    with pytest.raises(SystemExit, match="built without CUDA"):
        build_support.extension_options(OPS.parent)


@pytest.mark.parametrize(
    ("archs", "flags"),
    [
        (["9.0"], ["-gencode=arch=compute_90a,code=sm_90a"]),
        (["8.0"], ["-gencode=arch=compute_80,code=sm_80"]),
        (["9.0+PTX"], ["-gencode=arch=compute_90,code=compute_90", "-gencode=arch=compute_90a,code=sm_90a"]),
        (["99.0"], ["-gencode=arch=compute_100,code=compute_100"]),
    ],
)
def test_gencode_flags(monkeypatch, archs, flags):
    from ds_fp4.ops import builder

    monkeypatch.setattr(builder, "_nvcc_architectures", lambda: frozenset({"sm_80", "sm_90", "sm_100"}))
    assert builder.gencode_flags(archs) == flags


@pytest.fixture
def hopper(monkeypatch):
    """torch and nvcc for CUDA 13 and one H200, as far as `FP4Builder.obstacle` looks."""
    import torch

    from ds_fp4.ops import builder

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(builder, "nvcc_version", lambda: "13.0")
    return builder


def test_architectures_may_name_features_of_one_gpu(hopper, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 10.0f+PTX;7.5")
    assert hopper.FP4Builder().architectures() == ["9.0", "10.0+PTX"]


def test_what_keeps_nvcc_from_building_is_named(hopper, monkeypatch):
    import torch

    fp4 = hopper.FP4Builder()
    assert fp4.is_compatible() and fp4.error_log is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not fp4.is_compatible()
        assert "compute capability 7.5; ds_fp4 needs 8.0" in fp4.error_log
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "nvcc_version", lambda: None)
        assert "there is no nvcc" in fp4.obstacle()
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "nvcc_version", lambda: "12.8")
        assert re.search(r"nvcc is CUDA 12.8, torch .* CUDA 13.0", fp4.obstacle())
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert "without CUDA" in fp4.obstacle()


def test_a_module_from_another_install_is_not_used(hopper, monkeypatch):
    fp4 = hopper.FP4Builder()
    with monkeypatch.context() as patch:
        patch.setattr(hopper.importlib.util, "find_spec", lambda name: None)
        assert fp4.load_prebuilt() == (None, "none was built at install (DS_BUILD_FP4=1)")
    module = types.SimpleNamespace(
        __file__="fp4_kernels.so", sources_hash=f"h{kernels.sources_hash()}", cuda_version="13.0"
    )
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(hopper.importlib, "import_module", lambda name: module)
    assert fp4.load_prebuilt() == (module, "")
    assert fp4.load() is module
    module.cuda_version = "12.8"
    assert fp4.load_prebuilt() == (None, "fp4_kernels.so is for CUDA 12.8, torch for 13.0")
    module.sources_hash = "h0"
    assert "built from other sources; reinstall" in fp4.load_prebuilt()[1]


# ---- choosing ----


def test_importing_ops_compiles_nothing_and_leaves_cuda_alone():
    script = """
        import sys
        import ds_fp4.ops, torch
        loaded = [name for name in ("cupy", "ds_fp4.ops.builder", "ds_fp4.ops.nvrtc") if name in sys.modules]
        print(loaded, torch.cuda.is_initialized(), ds_fp4.ops.describe_kernels())
    """
    output, errors = _finish(_start(script))
    assert output.startswith("[] False "), errors


def test_without_a_gpu_kernels_cannot_be_loaded():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="need a GPU"):
        ops.load_kernels()


def test_backend_names_are_checked(monkeypatch):
    monkeypatch.setenv(backends.KERNELS_ENV, "cuda")
    with pytest.raises(RuntimeError, match="must be one of builder, nvrtc"):
        backends._choice()


def test_error_when_nothing_can_be_had(monkeypatch):
    def refuse(text):
        def constructor(*arguments):
            raise RuntimeError(text)

        return constructor

    monkeypatch.setattr(backends, "BuilderBackend", refuse("there is no nvcc"))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="(?s)there is no nvcc.*cupy.*Install nvcc.*pip install"):
        backends.select(None)
