# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Runs a Python file as a program, in a process that has imported what takes long, and nothing of ds_fp4."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import sys
from pathlib import Path

from tests.distributed.harness import run_ranks


def _program(file: str, words: list[str], folder: str) -> tuple[int | str | None, str]:
    assert "ds_fp4" not in sys.modules
    os.chdir(folder)
    sys.argv = [file, *words]
    sys.path[:] = [os.path.dirname(file), *(path for path in sys.path if path not in ("", folder))]
    importlib.invalidate_caches()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            return end.code, output.getvalue()
    return None, output.getvalue()


def run_program(file: str, words: list[str], folder: Path) -> tuple[int | str | None, str]:
    """`python file words...` as rank 0 of 1, the working folder `folder` not on its path.

    Returns:
        what it gave to `sys.exit` (a text means that Python prints it and ends with status 1), and what it printed.
    """
    return run_ranks(1, _program, file, words, str(folder), joins=False, on_cpu=True)[0]
