# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Writes the DeepSpeed JSON files that the loss table of docs/checkpointing.md compares, and prints the command.

    python launch/checkpointing_configs.py runs/checkpointing --jobs 4 [further options of launch/pretrain.py]
    python launch/checkpointing_configs.py runs/checkpointing --set fc1 recipe=mxfp4 experts.recompute=fc1 ...

Each is configs/<moe>/bf16.json with packed checkpointing and nothing else of ds_fp4, so that a difference in the loss
is checkpointing's alone. `--recipe mxfp4` puts it on top of another recipe. `--set` adds a file of any other recipe to
the same table, `--only` leaves out what does not match.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_fp4.config import parse_block

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def variants() -> dict[str, dict]:
    """Name -> `ds_fp4.checkpointing`."""
    return {
        f"{scope}-{format}{'' if exact else '-inexact'}": dict(enabled=True, format=format, exact=exact, scope=scope)
        for scope, format, exact in itertools.product(("layers", "experts"), ("mxfp4", "fp8"), (True, False))
    }


def load(moe: str, recipe: str) -> dict:
    """A shipped DeepSpeed JSON."""
    return json.loads((CONFIGS / moe / f"{recipe}.json").read_text())


def with_keys(moe: str, settings: list[str]) -> dict:
    """A shipped recipe, enabled, with keys of its `ds_fp4` block replaced.

    Args:
        settings: KEY=VALUE, keys with dots, values JSON or text; `recipe=NAME` says which file to start from.

    Raises ConfigError for a key or value that ds_fp4 does not know.
    """
    values = dict(setting.split("=", 1) for setting in settings)
    config = load(moe, values.get("recipe", "bf16"))
    config["ds_fp4"]["enabled"] = True
    for key, text in values.items():
        *parents, last = key.split(".")
        block = config["ds_fp4"]
        for parent in parents:
            block = block.setdefault(parent, {})
        try:
            block[last] = json.loads(text)
        except json.JSONDecodeError:
            block[last] = text
    parse_block(config["ds_fp4"])
    return config


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moe", choices=("autoep", "classic"), default="autoep")
    parser.add_argument("--recipe", choices=("bf16", "fp8", "mxfp4"), default="bf16")
    parser.add_argument(
        "--set", nargs="+", action="append", default=[], metavar="WORD", help="NAME KEY=VALUE ...: one more file"
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of --recipe's variants")
    parser.add_argument("--jobs", type=int, help="print a command that shares the runs among so many jobs")
    parser.add_argument("--processes", type=int, default=2, help="of each job (default: %(default)s)")
    args, further = parser.parse_known_args(argv)
    base = load(args.moe, args.recipe)
    configs = {
        name: {**base, "ds_fp4": {**base["ds_fp4"], "enabled": True, "checkpointing": checkpointing}}
        for name, checkpointing in variants().items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.only)
    }
    for name, *settings in args.set:
        if name in configs or name == args.recipe or not all("=" in setting for setting in settings):
            parser.error(f"--set {name} {' '.join(settings)}: expected a new name, then KEY=VALUE ...")
        configs[name] = with_keys(args.moe, settings)
    args.folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, config in configs.items():
        paths.append(args.folder / f"{name}.json")
        paths[-1].write_text(json.dumps(config, indent=2) + "\n")
    command = ["deepspeed", "--num_gpus", str(args.processes), "launch/pretrain.py"]
    if args.jobs:
        command = ["python", "launch/jobs.py", "--jobs", str(args.jobs), "--processes", str(args.processes)]
        command += ["--keep-going"]
    command += ["--moe", args.moe, "--compare", args.recipe, *map(str, paths), "--seeds", "0", "1", "2"]
    print(shlex.join([*command, "--output", str(args.folder), *further]))


if __name__ == "__main__":
    main()
