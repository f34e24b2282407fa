# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Entry point of `ds-fp4`."""

from __future__ import annotations

import argparse
import sys

from ds_fp4.cli import bench, report, run


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="ds-fp4", description="MXFP4 and FP8 for MoE training with DeepSpeed.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", add_help=False, help="start an unmodified training script with ds_fp4 switched on")
    commands.add_parser("report", help="what is installed, which kernels are used here and why")
    bench.add_arguments(commands.add_parser("bench", help="measure kernels"))
    # `run` hands its words to the deepspeed launcher, whose options argparse must not touch.
    if argv[:1] == ["run"]:
        return run.main(argv[1:])
    args = parser.parse_args(argv)
    return bench.main(args) if args.command == "bench" else report.main()


if __name__ == "__main__":
    sys.exit(main())
