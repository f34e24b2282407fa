# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 run`: the `deepspeed` launcher for a script that does not import ds_fp4 itself.

    ds-fp4 run [options of the deepspeed launcher] train.py [options of train.py]
    ds-fp4 run [options of the deepspeed launcher] -m package.train [its options]

In a process that torchrun, mpirun or another launcher started, the script runs in that process:

    torchrun --nproc-per-node 8 --no-python ds-fp4 run train.py ...
    mpirun -np 16 ds-fp4 run train.py ...
"""

from __future__ import annotations

import argparse
import os
import sys

from ds_fp4.cli import run_script

# Set by torchrun and the deepspeed launcher, Open MPI, MPICH or Intel MPI, and srun --mpi=pmix.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def launched() -> bool:
    """Whether some launcher has already started this process as one rank of a job."""
    return any(variable in os.environ for variable in _RANK_VARIABLES)


def launcher_arguments(argv: list[str]) -> list[str]:
    """Arguments that make the deepspeed launcher start `ds_fp4.cli.run_script` on the user's script."""
    from deepspeed.launcher.runner import parse_args

    words = list(argv)
    if "-m" in words:
        # The launcher spells it --module. Behind the script it is an option of the script.
        at = words.index("-m")
        spelled_out = [*words[:at], "--module", *words[at + 1 :]]
        if _script_index(spelled_out, parse_args(spelled_out)) > at:
            words = spelled_out
    parsed = parse_args(words)
    at = _script_index(words, parsed)
    if parsed.no_python:
        raise SystemExit(
            "ds-fp4 run: --no_python starts something that is not Python, where ds_fp4 cannot be imported; "
            "leave it out"
        )
    script = ["-m", parsed.user_script] if parsed.module else [parsed.user_script]
    options = [option for option in words[:at] if option not in ("--module", "--")]
    return [*options, "--module", run_script.__name__, *script, *words[at + 1 :]]


def _script_index(words: list[str], parsed: argparse.Namespace) -> int:
    """Where in `words` the script is. Some versions of argparse drop a "--" from what follows it."""

    def essential(arguments: list[str]) -> list[str]:
        return [word for word in arguments if word != "--"]

    return next(
        at
        for at, word in enumerate(words)
        if word == parsed.user_script and essential(words[at + 1 :]) == essential(parsed.user_args)
    )


def main(argv: list[str]) -> int:
    """Run `argv`, the words after `ds-fp4 run`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    if launched():
        run_script.main(argv)
        return 0
    from deepspeed.launcher.runner import main as launch

    launch(launcher_arguments(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
