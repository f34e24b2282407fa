# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Runs a Python file as a program, in processes that have imported what takes long, and nothing of this project."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import sys
from pathlib import Path

from tests.distributed.harness import run_ranks

ROOT = str(Path(__file__).resolve().parents[2])


def _program(file: str, words: list[str], folder: str) -> tuple[int | str | None, str]:
    assert not {"ds_fp4", "launch"} & set(sys.modules)
    os.chdir(folder)
    sys.argv = [file, *words]
    sys.path[:] = [os.path.dirname(file), *(path for path in sys.path if path not in ("", folder, ROOT))]
    importlib.invalidate_caches()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            return end.code, output.getvalue()
    return None, output.getvalue()


def run_program(file: str, words: list[str], folder: Path, ranks: int = 1) -> list[tuple[int | str | None, str]]:
    """`python file words...` on CPU ranks. The working folder is `folder`; on their path is the file's folder alone.

    Returns:
        by rank, what it gave to `sys.exit` (None if it did not call it; a text means that Python prints it and ends
        with status 1), and what it printed.
    """
    return run_ranks(ranks, _program, file, words, str(folder), joins=False, on_cpu=True)
