# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench NAME`: benchmarks, each a module with `add_arguments(parser)` and `main(args)`."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "kernels": ("ds_fp4.bench.kernels", "time and bandwidth of every CUDA kernel against a copy and its peer"),
    "all-to-all": (
        "ds_fp4.bench.all_to_all",
        "dispatch from BF16 tokens to GEMM-ready rows, against DeepSpeed AutoEP",
    ),
    "experts": (
        "ds_fp4.bench.experts",
        "one layer's experts in FP8 against DeepSpeed's BF16 ones and the GEMMs alone",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, (module, summary) in BENCHMARKS.items():
        importlib.import_module(module).add_arguments(names.add_parser(name, help=summary, description=summary))


def main(args: argparse.Namespace) -> int:
    return importlib.import_module(BENCHMARKS[args.benchmark][0]).main(args)
