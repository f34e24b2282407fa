# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Pre-trains a Mixture-of-Experts model on text with DeepSpeed, and compares recipes.

    deepspeed launch/pretrain.py --recipe mxfp4
    deepspeed launch/pretrain.py --compare bf16 mxfp4 --seeds 0 1 2

It runs under torchrun and mpirun as well. `import ds_fp4` is all that ds_fp4 needs here: what it does is in the JSON's
`ds_fp4` block. docs/training.md explains the options and every key of the shipped JSON files.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # launchers start this file by its path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

import ds_fp4  # noqa: F401  (hooks engine construction)
from launch.compare import Run, claim, compare, labels_of, run_names, setup_of, write_run
from launch.data import load_corpus
from launch.engine import start_distributed
from launch.loop import train
from launch.metrics import Summary

# Of the options that are not given. None leaves the JSON's value.
DEFAULTS = {
    "gpu": dict(model="mixtral-120m", steps=300, seq_len=1024, batch_size=None, micro_batch_size=None),
    "cpu": dict(model="mixtral-tiny", steps=120, seq_len=256, batch_size=16, micro_batch_size=8),
}

DEFAULT_EVAL_TOKENS = {"gpu": 1 << 20, "cpu": 1 << 16}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pre-trains a MoE with DeepSpeed on text files; see docs/training.md."
    )
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--model", metavar="JSON", help="a Hugging Face config.json, or the name of one in configs/models"
    )
    what.add_argument("--model-args", nargs="+", metavar="KEY=VALUE", help="replaces keys of that config")
    what.add_argument(
        "--moe", choices=("autoep", "classic"), default="autoep", help="AutoEP, or deepspeed.moe.layer.MoE"
    )
    what.add_argument("--recipe", default="mxfp4", help="the name of a JSON in configs/<moe> (default: %(default)s)")
    what.add_argument("--config", metavar="JSON", help="a DeepSpeed JSON instead of a recipe")
    what.add_argument("--compare", nargs="+", metavar="RECIPE|JSON", help="train each, and compare them to the first")
    what.add_argument("--seeds", nargs="+", type=int, help="with --compare: train each entry once per seed")
    what.add_argument(
        "--data", nargs="+", metavar="PATH", help="text files, folders (default: the standard library's sources)"
    )

    how = parser.add_argument_group("how to train (defaults: the JSON's on GPUs, smaller ones on CPUs)")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--steps", type=int)
    how.add_argument("--seq-len", type=int)
    how.add_argument("--batch-size", type=int, metavar="ROWS", help="global batch, whatever the number of processes")
    how.add_argument(
        "--micro-batch-size", type=int, metavar="ROWS", help="largest batch of one forward of one process"
    )
    how.add_argument("--lr", type=float)
    how.add_argument(
        "--ep-size", type=int, help="expert-parallel size (default: the largest that divides experts and processes)"
    )
    how.add_argument("--capacity-factor", type=float, default=1.25, help="of --moe classic (default: %(default)s)")
    how.add_argument("--gradient-checkpointing", action="store_true", help="recompute every layer in backward")

    out = parser.add_argument_group("evaluation, checkpoints, output")
    out.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="besides the evaluation at the end")
    out.add_argument("--eval-tokens", type=int, help="held-out tokens (default: up to 1 Mi on GPUs, 64 Ki on CPUs)")
    out.add_argument("--save-every", type=int, default=0, metavar="STEPS")
    out.add_argument(
        "--init-from", type=Path, metavar="FOLDER", help="start from the weights of the last checkpoint in this folder"
    )
    out.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    out.add_argument("--output", type=Path, default=Path("runs"), metavar="FOLDER")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    # launch/jobs.py passes it: where jobs say which runs they have taken.
    parser.add_argument("--share", type=Path, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    for name, value in DEFAULTS["cpu" if get_accelerator().device_name() == "cpu" else "gpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.compare and (args.config or args.resume or args.save_every):
        parser.error("--compare starts each entry anew: it takes no --config, --resume or --save-every.")
    for name, least in (("steps", 1), ("seq_len", 1), ("eval_every", 0), ("save_every", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}.")
    if args.seeds and len(set(args.seeds)) < len(args.seeds):
        parser.error(f"--seeds {' '.join(map(str, args.seeds))}: the seeds must differ.")
    if args.seeds and not args.compare:
        parser.error("--seeds belongs to --compare; a single run takes --seed.")
    return args


def main() -> None:
    args = parse_args()
    quieten_deepspeed()
    device = start_distributed()
    args.output.mkdir(parents=True, exist_ok=True)
    corpus, given = load_corpus(args.data), argparse.Namespace(**vars(args))
    if args.eval_tokens is None:  # as many as there are, whatever the text
        default = DEFAULT_EVAL_TOKENS["cpu" if device.type == "cpu" else "gpu"]
        args.eval_tokens = min(default, (len(corpus.held_out) - 1) // args.seq_len * args.seq_len)
    require_equal_data(corpus.digest)
    title = f"{Path(args.model).stem}, {args.moe}, {dist.get_world_size()} x {device.type}, {args.steps} steps"
    if dist.get_rank() == 0:
        print(f"{title}\n{corpus}", flush=True)
    seeds = args.seeds or [args.seed]
    if args.share:
        share_runs(given, seeds, title, run=lambda entry, seed: train(args, corpus, device, entry, seed))
    elif args.compare:
        compare(
            args.compare, seeds, args.output, title, run=lambda entry, seed: train(args, corpus, device, entry, seed)
        )
    else:
        train(args, corpus, device, args.config or args.recipe, args.seed)
    dist.destroy_process_group()


def share_runs(
    args: argparse.Namespace, seeds: list[int], title: str, run: Callable[[str, int], Summary | None]
) -> None:
    """Does the runs of the comparison `args`, as given on the command line, that no other job has taken."""
    labels = labels_of(args.compare)
    for (label, seed), name in run_names(labels, seeds).items():
        entry = args.compare[labels.index(label)]
        mine = [claim(args.share, name) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(mine)
        if not mine[0]:
            continue
        summary = run(entry, seed)
        if summary is not None:
            write_run(Run(title, dist.get_world_size(), setup_of(args, entry), summary), args.output, name)


def quieten_deepspeed() -> None:
    """Leaves DeepSpeed's warnings and ds_fp4's summary, not the hundred lines that each engine logs about itself."""
    ours = re.compile(r"(\[Rank \d+\] )?ds_fp4\b")
    logger.addFilter(lambda record: record.levelno >= logging.WARNING or bool(ours.match(record.getMessage())))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls


def require_equal_data(digest: str) -> None:
    """Ranks that read different text (nodes with different Python versions, say) would train on a mixture of both."""
    digests: list[str] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise ValueError(
            f"Ranks {different} read other text than rank 0. Give the same files to every node with --data."
        )


if __name__ == "__main__":
    main()
