# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Runs a script, or with -m a module, as `__main__` after `import ds_fp4`: what each rank of `ds-fp4 run` executes."""

from __future__ import annotations

import os
import runpy
import sys


def main(argv: list[str]) -> None:
    """`argv` is [--local_rank=N] [-m] SCRIPT [arguments]; the deepspeed launcher puts --local_rank first."""
    import ds_fp4  # noqa: F401  (the hook must be in place before the script builds its engine)

    words = list(argv)
    launcher_words = []
    while words and words[0].startswith("--local_rank"):
        launcher_words.append(words.pop(0))
    as_module = bool(words) and words[0] in ("-m", "--module")
    if as_module:
        words.pop(0)
    if not words:
        raise SystemExit("ds-fp4 run: no script given; expected ds-fp4 run [launcher options] train.py [its options]")
    target, *rest = words
    if target.startswith("-"):
        raise SystemExit(
            f"ds-fp4 run: expected a script, got {target}. A launcher has already started this process (RANK or an "
            "MPI rank is set), so that it takes no launcher options: ds-fp4 run train.py [its options]"
        )
    sys.argv = [target, *launcher_words, *rest]
    if as_module:
        # As `python -m` does.
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(target):
        raise SystemExit(f"ds-fp4 run: {target!r} is not a file")
    # As `python train.py` does, so that the script finds the modules beside it.
    sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
