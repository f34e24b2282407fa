# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What benchmarks take and give: argparse types, so that what cannot work is said before minutes of measuring."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path


def count(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def amount(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def output_file(text: str) -> Path:
    """A file that can be written, once folders that are missing have been made."""
    path = Path(text)
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that is yours")
    return path


def write_json(path: Path, content: object) -> None:
    """Write to what `output_file` gave."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))
