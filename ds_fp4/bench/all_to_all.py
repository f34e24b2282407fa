# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds-fp4 bench all-to-all`: dispatch, from BF16 tokens at home to rows that a GEMM can read at their experts.

DeepSpeed AutoEP sends a BF16 row for each of a token's experts and orders them by expert; ds_fp4 sends one record for
each rank and makes FP8 rows in expert order from it. Both are timed whole, with their plans and copies to the host;
AutoEP's count of each expert's tokens, which its router makes, is apart. They run between processes that this command
starts itself: over what NCCL picks (NVLink where there is one), and over sockets, which stand for a slow network.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ds_fp4.bench import arguments, profiling

TRANSPORTS = {
    "nccl": {},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},
}
RECIPES = ("fp8", "mxfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=arguments.count, help="processes, one a GPU (default: all GPUs)")
    parser.add_argument("--tokens", type=arguments.count, default=8192, help="of each rank (default 8192)")
    parser.add_argument("--top-k", type=arguments.count, default=8)
    parser.add_argument("--experts", type=arguments.count, default=32, help="on each rank (default 32)")
    parser.add_argument("--hidden", type=arguments.count, default=7168)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--repeats", type=arguments.count, default=10)
    parser.add_argument("--profile", action="store_true", help="kernels of one dispatch, and when the GPU was idle")
    parser.add_argument("--json", type=arguments.output_file, metavar="FILE", help="write the results there")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns an exit status."""
    ranks = args.ranks or torch.cuda.device_count()
    if not 2 <= ranks <= torch.cuda.device_count():
        print(f"ds-fp4 bench all-to-all needs 2 GPUs or more, one a rank; torch sees {torch.cuda.device_count()} here")
        return 1
    print(
        f"{ranks} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}: {args.tokens} tokens a rank, top-"
        f"{args.top_k} of {ranks * args.experts} experts, hidden {args.hidden}"
    )
    print(
        f"{'transport':10s} {'what':16s} {'rows':>8s} {'MB sent':>8s} {'ms':>9s} {'exchange ms':>14s} {'faster':>7s}"
    )
    results = []
    for transport in args.transports:
        rows = _run_ranks(ranks, transport, args)
        for row in rows:
            row["faster"] = rows[0]["seconds"] / row["seconds"]
            print(
                f"{transport:10s} {row['what']:16s} {row['rows']:8d} {row['bytes'] / 1e6:8.1f} "
                f"{row['seconds'] * 1e3:9.3f} {row['exchange_seconds'] * 1e3:14.3f} {row['faster']:6.2f}x",
                flush=True,
            )
            for line in row.get("profile", ()):
                print(f"    {line}")
        results.append({"transport": transport, "rows": rows})
    if args.json:
        given = {k: str(v) for k, v in vars(args).items()}
        arguments.write_json(args.json, {"arguments": given, "results": results})
    return 0


def _run_ranks(ranks: int, transport: str, args: argparse.Namespace) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results.json")
        multiprocessing.spawn(_rank_main, (ranks, port, transport, args, path), ranks)
        with open(path) as file:
            return json.load(file)


def _rank_main(rank: int, ranks: int, port: int, transport: str, args: argparse.Namespace, path: str) -> None:
    # NCCL reads its variables when it is first used.
    os.environ.update(
        TRANSPORTS[transport],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import deepspeed

    torch.cuda.set_device(rank)
    deepspeed.init_distributed(verbose=False)
    rows = _measure(args, torch.device("cuda", rank))
    if rank == 0:
        with open(path, "w") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run` from a common start to the last rank's end."""
    for _ in range(2):
        run()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _profile(run: Callable[[], object]) -> list[str]:
    def marked() -> None:
        run()  # the profiler's own start falls into this one
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        profiling.mark()
        run()
        profiling.mark()

    return profiling.profile(marked)[0].lines()


def _measure(args: argparse.Namespace, device: torch.device) -> list[dict]:
    from deepspeed.module_inject import auto_ep_layer as autoep

    from ds_fp4 import gemm
    from ds_fp4.bench.experts import recipe_for
    from ds_fp4.experts import ExpertLayer, LayerSpec
    from ds_fp4.experts.function import dispatch

    ranks = dist.get_world_size()
    experts, k = ranks * args.experts, args.top_k
    torch.manual_seed(dist.get_rank())
    x = torch.randn(args.tokens, args.hidden, device=device).to(torch.bfloat16)
    ids = torch.multinomial(torch.ones(args.tokens, experts, device=device), k)
    scores = torch.rand(args.tokens, k, device=device)
    group = dist.group.WORLD
    # AutoEP's router counts tokens an expert in any case.
    counts = torch.bincount(ids.flatten(), minlength=experts).to(torch.int32)
    elsewhere = (ids // args.experts != dist.get_rank()).sum().item()

    def bf16() -> torch.Tensor:
        order = torch.argsort(ids.view(-1), stable=True)
        rows = x[order // k]
        plan = autoep.compute_split_plan(ids, experts, ranks, args.experts, group, counts)
        rows = autoep._AllToAllV.apply(group, rows, plan.input_splits, plan.output_splits)
        return autoep.permute_by_local_expert(rows, plan.local_counts_by_source)[0]

    def exchange_seconds(row_bytes: int, sent: list[int], received: list[int]) -> float:
        outgoing = torch.randint(0, 256, (sum(sent), row_bytes), dtype=torch.uint8, device=device)
        incoming = torch.empty(sum(received), row_bytes, dtype=torch.uint8, device=device)
        return _median_seconds(
            lambda: dist.all_to_all_single(incoming, outgoing, received, sent, group=group), args.repeats
        )

    with torch.no_grad():
        plan = autoep.compute_split_plan(ids, experts, ranks, args.experts, group, counts)
        rows = [
            {
                "what": "BF16, AutoEP",
                "rows": elsewhere,
                "bytes": elsewhere * 2 * args.hidden,
                "seconds": _median_seconds(bf16, args.repeats),
                "exchange_seconds": exchange_seconds(2 * args.hidden, plan.input_splits, plan.output_splits),
                "profile": _profile(bf16) if args.profile else [],
            }
        ]
        for recipe in RECIPES:
            spec = LayerSpec(args.hidden, 128, args.experts, ranks, k)
            layer = ExpertLayer(spec, recipe_for({"recipe": recipe}), group, gemm.choose("emulation", "emulation"))

            def ours(layer: ExpertLayer = layer) -> torch.Tensor:
                received, routing, _, _ = dispatch(layer, x, scores, ids)
                return layer.dispatch.gemm_rows(received, routing.order)[0]

            _, _, records, _ = dispatch(layer, x, scores, ids)
            away = sum(records.sent) - records.sent[dist.get_rank()]
            size = layer.dispatch.record_bytes
            rows.append(
                {
                    "what": f"ds_fp4, {recipe}",
                    "rows": away,
                    "bytes": away * size,
                    "seconds": _median_seconds(ours, args.repeats),
                    "exchange_seconds": exchange_seconds(size, records.sent, records.received),
                    "profile": _profile(ours) if args.profile else [],
                }
            )
    return rows
