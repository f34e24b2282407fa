# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench kernels` without a GPU: its cases on the host, its report, what it says when there is none."""

import json

import pytest
import torch

from ds_fp4.bench import conversion_cases, fused_cases, kernels, timing, weight_cases
from ds_fp4.bench.case import Case
from ds_fp4.cli import main as cli

CPU = torch.device("cpu")


@pytest.fixture
def on_host(monkeypatch):
    """Time nothing: run everything once."""

    def once(runs, **_):
        for run in runs:
            run()
        return 2e-6

    monkeypatch.setattr(timing, "median_seconds", once)
    monkeypatch.setattr(timing, "median_seconds_in_graph", lambda run, **_: once([run]))


def _main(*argv: str) -> int:
    return cli.main(["bench", "kernels", *argv])


def test_says_that_it_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert _main() == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_lists_and_selects(capsys):
    assert _main("--list", "--only", "fp4_row_to_fp8_*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"fp4_row_to_fp8_row", "fp4_row_to_fp8_col"}
    assert _main("--only", "nothing") == 2
    assert "--list" in capsys.readouterr().err


# Kernels that are launched by another's call, and timed with it.
WITHIN = {
    "sum_partials": "swiglu_backward",
    "route_count": "plan_send",
    "route_send": "plan_send",
    "route_receive": "plan_receive",
}


def test_every_kernel_of_the_table_has_a_case():
    from ds_fp4.ops.kernels import KERNELS

    calls = {case.name.split()[0] for case in kernels.registered_cases()}
    assert calls >= {WITHIN.get(name, name) for name in KERNELS}


def test_required_comparisons_come_first():
    required = [case for case in kernels.peers_first(kernels.registered_cases()) if case.required]
    assert {case.name.split()[0] for case in required} == {
        "bf16_to_fp4_row", "fp4_row_to_fp8_row", "fp4_row_to_fp8_col", "fp8_row_to_fp8_col", "bf16_to_fp8_row",
        "swiglu_forward", "swiglu_backward",
    }  # fmt: skip
    assert len(required) == 7 and all("DeepSeek-V3" in case.shapes for case in required)
    assert kernels.peers_first(kernels.registered_cases())[: len(required)] == required


@pytest.mark.parametrize("name", sorted({case.name for case in conversion_cases.CASES}))
def test_small_cases_run(on_host, name):
    case = next(c for c in conversion_cases.CASES if c.name == name and "small" in c.shapes)
    result = kernels.measure(case, CPU, with_peer=False)
    rows, k = (int(n) for n in case.shapes.split("]")[0].strip("[").split(","))
    assert result["bytes_per_second"] == result["bytes"] / 2e-6
    # MXFP4 is 17/32 of a byte a value, FP8 about one, BF16 two.
    size = {"bf16": 2.0, "fp4": 17 / 32, "fp8": 1.0}
    source, target = size[name.split("_")[0]], size[name.split("_to_")[1].split("_")[0]]
    if not name.endswith("_col"):
        assert result["bytes"] == pytest.approx(rows * k * (source + target), rel=0.04)
    else:
        padded = result["bytes"] - rows * k * (source + (target if "row_and_col" in name else 0))
        assert rows * k <= padded <= (rows + 8 * 128) * k * 1.02


@pytest.mark.parametrize("name", sorted({case.name for case in weight_cases.CASES}))
def test_small_weight_cases_run(on_host, name):
    case = next(c for c in weight_cases.CASES if c.name == name and "small" in c.shapes)
    size = 4 + 2 if name == "split_weight_gradient" else 2 + (2 if name == "weight_to_fp8" else 1)
    assert kernels.measure(case, CPU, with_peer=False)["bytes"] == pytest.approx(2 * 128 * 512 * size, rel=0.01)


def test_routed_cases_run(on_host):
    for make in (conversion_cases._routed_case, conversion_cases._column_case):
        name = "fp8_row_to_fp8_row" if make is conversion_cases._routed_case else "fp8_row_to_fp8_col"
        extra = (False,) if make is conversion_cases._routed_case else (True, False)
        case = Case(name, "[1024, 256]", lambda device, m=make, n=name, e=extra: m(n, device, 1024, 256, 8, *e))
        run, moved, _ = case.make(CPU)
        run()
        assert moved > 1024 * 256


@pytest.mark.parametrize(
    "make, arguments, moved",
    [
        # BF16 gate and up, a weight, FP8 and its FP32 scales, MXFP4 gate and up.
        (fused_cases.make_swiglu_forward, (256, 512, "mxfp4"), 256 * (512 * (4 + 1 + 4 / 128 + 17 / 16) + 4)),
        (fused_cases.make_swiglu_backward, ([100, 60], 128, "mxfp4"), None),
        (fused_cases.make_combine, (64, 512, 2, "bf16", "mxfp4"), 64 * (2 * 512 * 2 + 512 * 17 / 32 + 2 * 4)),
        (fused_cases.make_gather, (64, 3808, 2.0), (64 + 128) * 3808 + 128 * 4),  # a row named twice is read once
        (fused_cases.make_plan_send, (64, 2, 2, 4), None),
        (fused_cases.make_pack, (64, 2, 2, 4), None),
        (fused_cases.make_plan_receive, (64, 2, 4), None),
        (fused_cases.make_gather_gradients, (64, 2, 4), None),
        (fused_cases.make_return_gradients, (64, 2, 2, 4), 64 * 2 * (8 + 4 + 4 + 4)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fused_cases_run(on_host, make, arguments, moved):
    case = Case("any", "[1] small", lambda device: make(device, *arguments))
    assert kernels.measure(case, CPU, with_peer=False)["bytes"] > 0
    run, counted, peer = case.make(CPU)
    assert moved is None or counted == moved
    if peer is not None:
        peer()


def test_zipf_sizes_are_skewed_with_empty_groups():
    sizes = conversion_cases.zipf_sizes(65536, 32)
    assert sum(sizes) == 65536 and sizes.count(0) == 4 and sizes[0] > 10 * sizes[30] > 0


def test_report_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results = [
        {"kernel": "a", "shapes": "[1, 2]", "seconds": 1e-4, "bytes": 10**8, "bytes_per_second": 1e12,
         "peer_seconds": peer, "ratio_to_copy": 0.25}
        for peer in (None, 4e-4)
    ]  # fmt: skip
    print(kernels._line(results[1]))
    assert capsys.readouterr().out.split() == ["a", "[1,", "2]", "100.0", "100", "1.00", "0.25", "400.0", "4.0x"]
    kernels.plot(results, str(tmp_path / "bars.png"), "a GPU", 4e12)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_case_is_reported_and_the_others_are_kept(on_host, monkeypatch, tmp_path, capsys):
    def fail(device):
        raise RuntimeError("no such thing")

    cases = [Case("bad", "[1]", fail), Case("good", "[1]", lambda device: (lambda: None, 4096, None))]
    monkeypatch.setattr(kernels, "registered_cases", lambda only: cases)
    for name, value in {"is_available": True, "current_device": 0, "get_device_name": "a GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, v=value: v)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device: 4e12)
    assert _main("--json", str(tmp_path / "out.json")) == 1
    assert "no such thing" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert [case["kernel"] for case in report["cases"]] == ["good"]
