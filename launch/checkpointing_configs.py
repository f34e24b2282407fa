# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Writes the DeepSpeed JSON files that the loss table of docs/checkpointing.md compares, and prints the command.

    python launch/checkpointing_configs.py runs/checkpointing [further arguments of launch/pretrain.py]

Each is configs/<moe>/bf16.json with packed checkpointing and nothing else of ds_fp4, so that a difference in the loss
is checkpointing's alone. `--recipe mxfp4` puts it on top of another recipe.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def variants() -> dict[str, dict]:
    """Name -> `ds_fp4.checkpointing`."""
    return {
        f"{scope}-{format}{'' if exact else '-inexact'}": dict(enabled=True, format=format, exact=exact, scope=scope)
        for scope, format, exact in itertools.product(("layers", "experts"), ("mxfp4", "fp8"), (True, False))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moe", choices=("autoep", "classic"), default="autoep")
    parser.add_argument("--recipe", choices=("bf16", "fp8", "mxfp4"), default="bf16")
    args, further = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((CONFIGS / args.moe / f"{args.recipe}.json").read_text())
    paths = []
    for name, checkpointing in variants().items():
        config = {**base, "ds_fp4": {**base["ds_fp4"], "enabled": True, "checkpointing": checkpointing}}
        paths.append(args.folder / f"{name}.json")
        paths[-1].write_text(json.dumps(config, indent=2) + "\n")
    command = ["deepspeed", "launch/pretrain.py", "--moe", args.moe, "--compare", args.recipe, *map(str, paths)]
    print(shlex.join([*command, "--seeds", "0", "1", "2", "--output", str(args.folder), *further]))


if __name__ == "__main__":
    main()
