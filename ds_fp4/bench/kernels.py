# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench kernels`: each kernel's time, its bandwidth and that of a copy, and its peer, in one run.

Bandwidth is the bytes that must move (each input read once, each output written once) over the median time. Working
sets smaller than the GPU's cache are made several times, up to eight, and taken in turn. A shape with "small" in its
name is timed in a CUDA graph, without the host's share, over the same buffers: they are in the cache. So are a peer's
where they fit, which is in its favor.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import sys
import time
from pathlib import Path

import torch

from ds_fp4.bench import arguments, peers, timing
from ds_fp4.bench.case import Case, Run

# Modules with a list CASES.
CASE_MODULES = ("conversion_cases", "weight_cases", "fused_cases")
COLD_BYTES = 256 << 20  # several times the largest cache: what one turn over the buffers must exceed
MAX_SETS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="PATTERN", help='kernels or shapes to time: "fp4_row*", "*small", "*_col*"')
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--json", type=arguments.output_file, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=arguments.output_file, metavar="FILE", help="draw a bar chart (PNG) there")
    parser.add_argument("--no-peers", action="store_true", help="leave out torchao and plain PyTorch")
    parser.add_argument(
        "--budget",
        type=arguments.amount,
        default=80.0,
        metavar="SECONDS",
        help="leave out peers after this long (default: 80)",
    )


def registered_cases(only: str | None = None) -> list[Case]:
    """All cases, or those whose name or "name shapes" matches the pattern."""
    cases: list[Case] = []
    for module in CASE_MODULES:
        if importlib.util.find_spec(f"ds_fp4.bench.{module}") is not None:
            cases += importlib.import_module(f"ds_fp4.bench.{module}").CASES
    if only is None:
        return cases
    return [c for c in cases if fnmatch.fnmatch(c.name, only) or fnmatch.fnmatch(f"{c.name} {c.shapes}", only)]


def peers_first(cases: list[Case]) -> list[Case]:
    """The cases whose peers must not fall victim to the budget, then the others, both in their order."""
    return sorted(cases, key=lambda case: not case.required)


def measure(case: Case, device: torch.device, with_peer: bool) -> dict:
    """Time one case and its peer."""
    run, moved, peer = case.make(device)
    if "small" in case.shapes:
        seconds = timing.median_seconds_in_graph(run)
        peer_seconds = None
    else:
        runs = [run]
        while len(runs) * moved < COLD_BYTES and len(runs) < MAX_SETS:
            runs.append(case.make(device)[0])
        seconds = timing.median_seconds(runs)
        peer_seconds = _peer_seconds(case, peer) if peer and with_peer else None
    return {
        "kernel": case.name,
        "shapes": case.shapes,
        "seconds": seconds,
        "bytes": moved,
        "bytes_per_second": moved / seconds,
        "peer_seconds": peer_seconds,
    }


def _peer_seconds(case: Case, peer: Run) -> float | None:
    try:
        return timing.median_seconds([peer], repeats=5, warmup=2)
    except Exception as error:  # a peer that fails must not cost the kernel's own numbers
        peers.problems[f"{case.name} {case.shapes}"] = str(error).splitlines()[0] if str(error) else repr(error)
        return None


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns an exit status."""
    cases = registered_cases(args.only)
    if args.list:
        for case in cases:
            print(f"{case.name:28s} {case.shapes}")
        return 0
    if not cases:
        print(f"ds-fp4 bench kernels: nothing matches {args.only!r}; --list prints what there is", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("ds-fp4 bench kernels needs a CUDA GPU; torch sees none here", file=sys.stderr)
        return 1
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    gpu, copy = torch.cuda.get_device_name(device), timing.copy_bandwidth(device)
    print(f"{gpu}, torch {torch.__version__}; a copy moves {copy / 1e12:.2f} TB/s")
    print(_HEADER)
    results, failures = [], []
    for case in cases if args.no_peers else peers_first(cases):
        try:
            result = measure(case, device, not args.no_peers and time.monotonic() - started < args.budget)
        except Exception as error:  # one kernel must not hide the others' numbers
            failures.append((case, error))
            print(f"{case.name:26s} {case.shapes:52s} failed: {str(error).splitlines()[0] if str(error) else error!r}")
            torch.cuda.synchronize()
            continue
        finally:
            torch.cuda.empty_cache()
        result["ratio_to_copy"] = result["bytes_per_second"] / copy
        results.append(result)
        print(_line(result), flush=True)
    order = {(case.name, case.shapes): i for i, case in enumerate(cases)}
    results.sort(key=lambda result: order[result["kernel"], result["shapes"]])
    _print_notes(args, time.monotonic() - started)
    if args.json:
        arguments.write_json(args.json, {"gpu": gpu, "copy_bytes_per_second": copy, "cases": results})
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(results, args.plot, gpu, copy)
    return 1 if failures else 0


_HEADER = (
    f"{'kernel':26s} {'shape':52s} {'us':>8s} {'MB':>7s} {'TB/s':>6s} {'of copy':>7s} {'peer us':>9s} {'faster':>7s}"
)


def _line(result: dict) -> str:
    peer = result["peer_seconds"]
    columns = (
        f"{result['kernel']:26s} {result['shapes']:52s} {result['seconds'] * 1e6:8.1f} {result['bytes'] / 1e6:7.0f} "
        f"{result['bytes_per_second'] / 1e12:6.2f} {result['ratio_to_copy']:7.2f}"
    )
    return columns if peer is None else f"{columns} {peer * 1e6:9.1f} {peer / result['seconds']:6.1f}x"


def _print_notes(args: argparse.Namespace, seconds: float) -> None:
    for what, problem in peers.problems.items():
        print(f"no peer: {what}: {problem}")
    if not args.no_peers and seconds > args.budget:
        print(f"peers were left out after {args.budget:.0f} s (--budget)")
    print(f"took {seconds:.0f} s")


def plot(results: list[dict], path: str | Path, gpu: str, copy: float) -> None:
    """Bars of bandwidth relative to a copy, the peer's behind the kernel's, as a PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in results if "small" not in r["shapes"]]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.24 * len(shown)))
    position = range(len(shown))
    axes.barh(position, [r["ratio_to_copy"] for r in shown], color="#2a6f97", label="ds_fp4")
    with_peer = [(i, r) for i, r in enumerate(shown) if r["peer_seconds"]]
    peer_ratios = [r["bytes"] / r["peer_seconds"] / copy for _, r in with_peer]
    axes.barh([i for i, _ in with_peer], peer_ratios, color="#f4a259", height=0.4, label="peer")
    axes.set_yticks(position, [f"{r['kernel']} {r['shapes']}" for r in shown], fontsize=7)
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"bytes that must move per second, relative to a copy ({copy / 1e12:.2f} TB/s), {gpu}")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=80, bbox_inches="tight")
