# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Memory and speed of activation checkpointing: none, PyTorch's, and ds_fp4's scopes and formats, in one run.

    deepspeed --num_gpus 2 launch/bench_checkpointing.py
    deepspeed --num_gpus 2 launch/bench_checkpointing.py --variants none torch layers-mxfp4 layers-mxfp4-offload
    for try in 1 2 3; do deepspeed --num_gpus 2 launch/bench_checkpointing.py --output a.json && break; done

The default shape is DeepSeek-V3's with 4 layers (1 dense), 32 experts, expert-parallel over all ranks. The model is
made on the device, and one engine runs all variants, one after the other, on the same batch: checkpointing is taken
off and put on between them. Columns, of the rank where they are largest:

- kept: bytes that autograd and checkpointing keep on the device for backward, per token and layer, counted by hooks
  over the decoder layers (distinct storages, parameters apart);
- after forward: what the allocator holds after the forward more than before it (logits and loss included);
- peak: of the allocator over whole steps, more than before them (weights, optimizer and gradient buffers apart);
- tokens/s: per rank, of the median step, with forward, backward and optimizer.

With --output, the same command again goes on with the variants that are missing. A variant that fails ends a run of
several ranks (the others may wait for the failed one, and what they have sent cannot be taken back), as does one that
takes longer than --limit; it is tried once more after all others, unless memory was what it lacked.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # launchers start this file by its path

import deepspeed
import torch
import torch.distributed as dist

import ds_fp4
from ds_fp4.bench import arguments
from ds_fp4.checkpointing import CheckpointOptions
from ds_fp4.engine import find_layers
from ds_fp4.integrations import checkpointing
from ds_fp4.integrations.expert_level import ExpertLevelLayer
from launch.engine import find_json, start_distributed
from launch.model import expert_count, load_config

V3_OVERRIDES = ["num_hidden_layers=4", "first_k_dense_replace=1", "n_routed_experts=32"]
DENSE = ("none", "torch", "torch-offload")
PACKED = [
    f"{scope}-{format}{exact}{offload}"
    for scope in ("layers", "experts")
    for format in ("mxfp4", "fp8")
    for exact in ("", "-inexact")
    for offload in ("", "-offload")
]
VARIANTS = [*DENSE, "saved-mxfp4", "saved-fp8", *PACKED]
# Exactness costs nothing in memory, so only one combination is timed without it; all others can be asked for by name.
DEFAULT = [v for v in VARIANTS if "inexact" not in v or v == "layers-mxfp4-inexact"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v3", help="a config.json, or a name in configs/models")
    parser.add_argument(
        "--model-args", nargs="*", help=f"KEY=VALUE for the config (deepseek-v3: {' '.join(V3_OVERRIDES)})"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=DEFAULT, metavar="NAME", help=", ".join(VARIANTS)
    )
    parser.add_argument("--recipe", default="bf16", choices=("bf16", "fp8", "mxfp4"), help="of the MoE layers")
    parser.add_argument("--seq-len", type=arguments.count, default=4096)
    parser.add_argument("--micro-batch-size", type=arguments.count, default=4)
    parser.add_argument("--steps", type=arguments.count, default=5, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=1, help="besides the step whose kept bytes are counted")
    parser.add_argument(
        "--limit",
        type=arguments.count,
        default=180,
        metavar="SECONDS",
        help="longest time of a variant (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=arguments.output_file, help="a JSON file for all numbers, rewritten after each variant"
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model_args is None:
        args.model_args = V3_OVERRIDES if args.model == "deepseek-v3" else []
    return args


def build_engine(args: argparse.Namespace, device: torch.device) -> deepspeed.DeepSpeedEngine:
    """The model on `device`, random weights, plain SGD: optimizer state would only hide what is measured."""
    from transformers import AutoModelForCausalLM

    config = load_config(find_json(args.model, "models"), args.model_args)
    world = dist.get_world_size()
    if expert_count(config) % world:
        raise ValueError(
            f"{expert_count(config)} experts cannot be shared by {world} ranks evenly. Choose another number."
        )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    ds_config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-5}},
        "expert_parallel": {"enabled": True, "autoep_size": world},
        "ds_fp4": {"enabled": True, "recipe": args.recipe},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)
    return engine


def targets_of(model: torch.nn.Module, variant: str) -> dict[str, torch.nn.Module]:
    """The modules that a variant in PACKED checkpoints."""
    layers = find_layers(model)
    own_saving = {layer.name for layer in layers if isinstance(layer.module, ExpertLevelLayer)}
    return checkpointing.find_targets(model, layers, variant.partition("-")[0], own_saving)


def why_not(engine: deepspeed.DeepSpeedEngine, variant: str, device: torch.device) -> str | None:
    """Why a variant would measure nothing of its own; None if it does."""
    if variant == "torch-offload" and device.type != "cuda":
        return "wants pinned memory"
    if variant in PACKED and not targets_of(engine.module, variant):
        return "ds_fp4 computes the experts of every MoE layer, which keep packed activations in every variant"
    return None


def choose(engine: deepspeed.DeepSpeedEngine, variant: str) -> None:
    """Make `engine` checkpoint as `variant` says."""
    model = engine.module
    checkpointing.remove(model)
    model.gradient_checkpointing_disable()
    if variant in ("torch", "torch-offload"):
        model.gradient_checkpointing_enable({"use_reentrant": False}, offload=variant == "torch-offload")
    elif variant in PACKED:
        _, format, *rest = variant.split("-")
        options = CheckpointOptions(format, "inexact" not in rest, "cpu" if "offload" in rest else "none")
        checkpointing.install(model, targets_of(model, variant), options)


class Kept:
    """Bytes of distinct storages that are saved for backward by the decoder layers of one forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._storages: dict[int, int] = {}
        # Parameters and their storages are there anyway.
        self._known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._alive: list[torch.Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda t: t)
        self._open = False
        self._handles = [
            model.model.embed_tokens.register_forward_hook(lambda *_: self._enter()),
            model.model.norm.register_forward_pre_hook(lambda *_: self._leave()),
        ]

    def _enter(self) -> None:
        self._hooks.__enter__()
        self._open = True

    def _leave(self) -> None:
        if self._open:
            self._hooks.__exit__()
            self._open = False

    def _note(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        on_device = t.device.type == self.device_type
        if storage.data_ptr() not in self._known and on_device and not isinstance(t, torch.nn.Parameter):
            self._storages[storage.data_ptr()] = storage.nbytes()
            self._alive.append(t.detach())
        return t

    device_type = "cuda" if torch.cuda.is_available() else "cpu"

    def close(self) -> int:
        self._leave()  # if the forward failed between the two
        for handle in self._handles:
            handle.remove()
        self._alive.clear()
        return sum(self._storages.values())


def step(
    engine: deepspeed.DeepSpeedEngine, tokens: torch.Tensor, variant: str, device: torch.device
) -> tuple[float, int]:
    """One training step; seconds, and bytes allocated after its forward more than before it."""
    synchronize(device)
    start, before = time.perf_counter(), allocated(device)
    with ds_fp4.saved_tensors(variant.removeprefix("saved-")) if variant.startswith("saved-") else nullcontext():
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    # Not synchronized: the allocator's counters are the host's.
    held = allocated(device) - before
    engine.backward(loss)
    engine.step()
    synchronize(device)
    return time.perf_counter() - start, held


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(engine: deepspeed.DeepSpeedEngine, tokens: torch.Tensor, variant: str, args: argparse.Namespace) -> dict:
    device = tokens.device
    choose(engine, variant)
    kept = Kept(engine.module)
    try:
        step(engine, tokens, variant, device)
    finally:
        kept_bytes = kept.close()
    for _ in range(args.warmup):
        step(engine, tokens, variant, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    dist.barrier()
    state = allocated(device)
    times, helds = zip(*(step(engine, tokens, variant, device) for _ in range(args.steps)), strict=True)
    peak = torch.cuda.max_memory_allocated(device) - state if device.type == "cuda" else 0
    layers = len(engine.module.model.layers)
    # saved_tensors packs inside of what the hooks here see: only the allocator can tell.
    per_token = None if variant.startswith("saved-") else kept_bytes / tokens.numel() / layers
    mine = dict(
        variant=variant,
        kept_per_token_and_layer=per_token,
        after_forward=max(helds),
        peak=peak,
        model_state=state,
        seconds=[round(seconds, 4) for seconds in times],
        tokens_per_second=tokens.numel() / statistics.median(times),
    )
    ranks: list[dict] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    worst = {key: max(rank[key] for rank in ranks) for key in ("after_forward", "peak", "model_state")}
    if per_token is not None:
        worst["kept_per_token_and_layer"] = max(rank["kept_per_token_and_layer"] for rank in ranks)
    worst["tokens_per_second"] = min(rank["tokens_per_second"] for rank in ranks)
    return {**mine, **worst}


def table(rows: list[dict]) -> str:
    """Markdown, each number beside its ratio to the first variant's."""
    first = rows[0]
    lines = [
        "| checkpointing | kept per token and layer | after forward | peak above model state | tokens/s per rank |",
        "| --- " * 5 + "|",
    ]
    for row in rows:
        kept = row["kept_per_token_and_layer"]
        cells = [row["variant"], "-" if kept is None else f"{kept:,.0f} B"]
        for key in ("after_forward", "peak"):
            cells.append(f"{row[key] / 2**30:.2f} GiB ({row[key] / first[key]:.2f}x)" if first[key] else "-")
        ratio = row["tokens_per_second"] / first["tokens_per_second"]
        cells.append(f"{row['tokens_per_second']:,.0f} ({ratio:.2f}x)")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(args: argparse.Namespace, device: torch.device, rows: list[dict]) -> str:
    """The table with what it was measured on."""
    state = f", model state {rows[0]['model_state'] / 2**30:.1f} GiB" if device.type == "cuda" else ""
    return (
        f"{args.model} {' '.join(args.model_args)}, {dist.get_world_size()} x {device.type}, micro-batch "
        f"{args.micro_batch_size} x {args.seq_len}, recipe {args.recipe}{state}\n\n{table(rows)}"
    )


class Record:
    """What is known so far, in --output if there is one: a run that is cut short leaves what it has.

    Attributes:
        rows: the variants that were measured.
        tries: for each of the others, what became of each attempt.
    """

    TRIES = 2
    UNKNOWN = "did not end"  # what stands there if nothing else is ever written: killed, or a rank waits for another

    def __init__(self, path: Path | None, arguments: dict) -> None:
        self.path, self.arguments = path, arguments
        self.rows: list[dict] = []
        self.tries: dict[str, list[str]] = {}
        if path and path.is_file():
            found = json.loads(path.read_text())
            if found.get("arguments") != arguments:
                raise ValueError(
                    f"{path} has numbers of other arguments: {found.get('arguments')}, now {arguments}. Give another "
                    "--output, or remove the file."
                )
            self.rows, self.tries = found["rows"], found["tries"]

    def todo(self, variants: list[str]) -> list[str]:
        """What to measure, in order: what was not tried first, what failed once at the end."""
        done = {row["variant"] for row in self.rows}
        left = [v for v in dict.fromkeys(variants) if v not in done and not self._hopeless(v)]
        return sorted(left, key=lambda v: len(self.tries.get(v, ())))

    def _hopeless(self, variant: str) -> bool:
        tries = self.tries.get(variant, ())
        return len(tries) >= self.TRIES or any(why.startswith("OutOfMemoryError") for why in tries)

    def begin(self, variant: str) -> None:
        self.tries.setdefault(variant, []).append(self.UNKNOWN)
        self._write()

    def failed(self, variant: str, why: str) -> None:
        """On any rank: only the first knows all rows, and it may be waiting for this one."""
        if self.path and self.path.is_file():
            found = json.loads(self.path.read_text())
            self.rows, self.tries = found["rows"], found["tries"]
        tries = self.tries.setdefault(variant, [self.UNKNOWN])
        if tries[-1] == self.UNKNOWN:  # else another rank's failure is the cause of this one
            tries[-1] = why
        self._write()

    def finished(self, row: dict) -> None:
        self.tries.pop(row["variant"], None)
        self.rows.append(row)
        self.rows.sort(key=lambda row: VARIANTS.index(row["variant"]))
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = {"arguments": self.arguments, "rows": self.rows, "tries": self.tries}
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        part.write_text(json.dumps(values, indent=2) + "\n")
        part.replace(self.path)  # at once: a failing rank writes too


def read_record(args: argparse.Namespace) -> Record:
    """The first rank's record on every rank, so that all do the same variants. Raises on every rank if it cannot."""
    keys = ("model", "model_args", "recipe", "seq_len", "micro_batch_size", "steps", "warmup")
    arguments = {key: getattr(args, key) for key in keys} | {"ranks": dist.get_world_size()}
    sent: list = [None]
    if dist.get_rank() == 0:
        try:
            sent = [Record(args.output, arguments)]
        except (ValueError, KeyError) as error:
            sent = [error]
    dist.broadcast_object_list(sent)
    if isinstance(sent[0], Exception):
        raise sent[0]
    return sent[0]


def measure_all(
    variants: list[str], record: Record, measure: Callable[[str], dict], limit: int, say: Callable[..., None]
) -> None:
    """Measure one variant after the other. Ends the process if one of several ranks fails or `limit` seconds are over.

    Args:
        measure: a row of a variant's numbers; collective.
    """
    rank, failure = dist.get_rank(), None
    for number, variant in enumerate(variants, 1):
        say(f"{variant} ({number} of {len(variants)})", flush=True)
        faulthandler.dump_traceback_later(limit, exit=True)
        if rank == 0:
            record.begin(variant)
        dist.barrier()  # what a failing rank adds to the record is added to this
        begun = time.perf_counter()
        try:
            row = measure(variant)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".strip()
        faulthandler.cancel_dump_traceback_later()
        if failure is not None:
            print(f"{variant} failed on rank {rank}: {failure}", flush=True)
            record.failed(variant, failure)
            if dist.get_world_size() > 1:
                sys.stderr.flush()
                os._exit(1)  # not through destructors, which wait for the other ranks
            failure = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        if rank == 0:
            record.finished(row)
        say(f"{time.perf_counter() - begun:.1f} s: {json.dumps(row)}", flush=True)


def main() -> None:
    args = parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    started = time.perf_counter()
    device = start_distributed()
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    record = read_record(args)
    todo = record.todo(args.variants)
    if todo:
        engine = build_engine(args, device)
        if device.type == "cuda":
            ds_fp4.ops.load_kernels()
        say(f"model and kernels ready after {time.perf_counter() - started:.0f} s", flush=True)
        for variant in list(todo):
            reason = why_not(engine, variant, device)
            if reason is not None:
                say(f"{variant} is left out: {reason}", flush=True)
                todo.remove(variant)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (args.micro_batch_size, args.seq_len)
        tokens = torch.randint(0, engine.module.config.vocab_size, shape, generator=generator).to(device)

        def measure_variant(variant: str) -> dict:
            try:
                return measure(engine, tokens, variant, args)
            except Exception:
                engine.module.zero_grad()
                raise

        measure_all(todo, record, measure_variant, args.limit, say)
    if record.rows:
        say(f"\n{report(args, device, record.rows)}", flush=True)
    for variant, tries in record.tries.items():
        say(f"{variant} failed: {tries[-1]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
