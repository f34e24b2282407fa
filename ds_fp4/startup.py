# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The ranks agree on one `ds_fp4` block before they exchange a byte.

Ranks with different codecs would decode each other's bytes wrongly or hang in a collective. So each rank announces its
block, or the error it is about to raise, in the process group's key-value store, which works while a peer is dead or
has no ds_fp4 at all. Rank 0 compares and publishes one verdict, so N ranks cost N messages:

    rank r:  set  ds_fp4/start/<engine>/<r>         = an Announcement
    rank 0:  wait for all of them, compare, set ds_fp4/start/<engine>/verdict
    rank r:  wait for the verdict; raise StartError if it is not "agreed"
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch.distributed as torch_dist
from deepspeed.utils import logger

from ds_fp4.config import BLOCK
from ds_fp4.summary import shorten

TIMEOUT_VARIABLE = "DS_FP4_START_TIMEOUT"
# Ranks may load a large model at different speeds, or one of them may be compiling the kernels.
DEFAULT_TIMEOUT_S = 600.0
_REMIND_AFTER_S = 30.0
_LINGER_S = 5.0

_engine_counter = itertools.count()


class StartError(RuntimeError):
    """The ranks do not agree on how to train, or one of them cannot start. Raised on every rank."""


@dataclass
class Announcement:
    """What one rank says of itself.

    Attributes:
        version: of ds_fp4.
        block: full key path -> value (`ds_fp4.config.flatten`); empty if the configuration has no block.
        moe_layers: MoE layers in this rank's part of the model; pipeline stages may have none.
        moe_requests: keys that ask for something that only MoE layers can do (`DsFp4Config.moe_requests`).
        experts_by: by layer, what computes the experts that the block wants in FP8: names of the GEMM libraries, or
            "DeepSpeed" where this rank cannot.
        idle_patterns: patterns in the block that match nothing here, and why. In another pipeline stage they may.
        error: why this rank cannot start.
    """

    version: str
    block: dict[str, Any] = field(default_factory=dict)
    moe_layers: int = 0
    moe_requests: list[str] = field(default_factory=list)
    experts_by: dict[str, Any] = field(default_factory=dict)
    idle_patterns: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def enabled(self) -> bool:
        return bool(self.block.get(f"{BLOCK}.enabled"))


def start_timeout() -> float:
    """Seconds to wait for the other ranks, from DS_FP4_START_TIMEOUT."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r}: expected a number of seconds above 0")
    return seconds


def agree(mine: Announcement) -> None:
    """Announce this rank's block and return once every rank has announced the same one.

    Must be called once per engine on every rank. Raises StartError on every rank if blocks or versions differ, a rank
    announced an error, a rank is missing after `start_timeout()` seconds, or no rank has a MoE layer and the block
    asks for more than checkpointing of modules by name.
    """
    engine = next(_engine_counter)
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        _raise_unless_agreed(judge([mine]))
        return
    store = torch_dist.distributed_c10d._get_default_store()
    rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
    prefix = f"{BLOCK}/start/{engine}"
    keys = [f"{prefix}/{peer}" for peer in range(world)]
    try:
        timeout = start_timeout()
    except ValueError as error:
        # The other ranks have to hear of it too.
        mine.error, timeout = mine.error or str(error), DEFAULT_TIMEOUT_S
    try:
        verdict = _exchange(store, mine, rank, keys, prefix, timeout)
    except torch_dist.DistError as error:
        raise StartError(
            f"{BLOCK}: the process group's key-value store cannot be reached ({error}). Rank 0 usually hosts it and "
            "has probably died: its own log says why."
        ) from error
    _raise_unless_agreed(verdict)


def _exchange(store: Any, mine: Announcement, rank: int, keys: list[str], prefix: str, timeout: float) -> str | None:
    """Announce, wait for the others, and return the verdict that all ranks share."""
    verdict_key, read_key = f"{prefix}/verdict", f"{prefix}/read"
    store.set(keys[rank], json.dumps(asdict(mine)))
    if rank == 0:
        _wait(store, keys, timeout)
        announcements = _collect(store, keys)
        verdict = judge(announcements, timeout)
        store.set(verdict_key, json.dumps(verdict))
        if verdict is not None:
            # Rank 0 usually hosts the store: were it to exit now, its peers would see a lost connection.
            present = sum(announcement is not None for announcement in announcements)
            _poll(lambda: store.add(read_key, 0) >= present - 1, _LINGER_S)
    elif _wait(store, [verdict_key], timeout * 1.1 + _LINGER_S):
        verdict = json.loads(store.get(verdict_key))
        store.add(read_key, 1)
    else:
        # Rank 0 itself is missing, so nobody judges for us.
        verdict = judge(_collect(store, keys), timeout)
    return verdict


def _collect(store: Any, keys: list[str]) -> list[Announcement | None]:
    return [read_announcement(store.get(key)) if store.check([key]) else None for key in keys]


def read_announcement(text: str | bytes) -> Announcement:
    """What a rank announced; one with another version of ds_fp4 may announce more, which is judged by its version."""
    known = {each.name for each in fields(Announcement)}
    return Announcement(**{key: value for key, value in json.loads(text).items() if key in known})


def _poll(done: Callable[[], bool], timeout: float, remind: Callable[[], None] | None = None) -> bool:
    """Whether `done()` came true within `timeout` seconds; `remind()` is called once, after _REMIND_AFTER_S."""
    started = time.monotonic()
    pause = 0.01
    while not done():
        waited = time.monotonic() - started
        if waited > timeout:
            return False
        if remind is not None and waited > _REMIND_AFTER_S:
            remind()
            remind = None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
    return True


def _wait(store: Any, keys: list[str], timeout: float) -> bool:
    """Whether all keys were set within `timeout` seconds. Polls rather than blocks, to say what it waits for."""

    def remind() -> None:
        absent = [key for key in keys if not store.check([key])]
        logger.warning(
            f"{BLOCK}: waiting up to {timeout:.0f} s for {', '.join(absent[:8])}"
            f"{' ...' if len(absent) > 8 else ''}; {TIMEOUT_VARIABLE} sets the limit"
        )

    return _poll(lambda: store.check(keys), timeout, remind)


def _ranks(ranks: list[int]) -> str:
    """[0, 2, 3, 4] -> 'rank 0, 2-4'."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def judge(announcements: list[Announcement | None], timeout: float = DEFAULT_TIMEOUT_S) -> str | None:
    """None if all ranks may train together, else one message for all of them that names keys, values and ranks.

    An announcement is None for a rank that made none within `timeout` seconds.
    """
    present = {rank: announcement for rank, announcement in enumerate(announcements) if announcement is not None}
    failed: dict[str, list[int]] = {}
    for rank, announcement in present.items():
        if announcement.error is not None:
            failed.setdefault(announcement.error, []).append(rank)
    if failed:
        return "\n".join(f"{_ranks(ranks)}: {error}" for error, ranks in failed.items())

    missing = [rank for rank, announcement in enumerate(announcements) if announcement is None]
    enabled = [announcement.enabled for announcement in present.values()]
    if missing and not any(enabled):
        # Nobody asked for ds_fp4; that some ranks imported it changes nothing.
        return None
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return (
            f"{_ranks(missing)} {verb} missing: no announcement within {timeout:.0f} s. Either they never ran "
            "`import ds_fp4` (every rank needs it, or start the job with `ds-fp4 run`), or they died or are still "
            f"loading; raise {TIMEOUT_VARIABLE} (seconds) if they are slow."
        )

    values: dict[str, list[Any]] = {}
    if any(enabled):
        values[f"version of {BLOCK}"] = [announcement.version for announcement in announcements]
        if not all(enabled):
            # One side has nothing else to compare.
            values[f"{BLOCK}.enabled"] = enabled
        else:
            for key in dict.fromkeys(itertools.chain.from_iterable(a.block for a in announcements)):
                values[key] = [announcement.block.get(key, "absent") for announcement in announcements]
    differences = [
        f"  {key}: {ranks}" for key, per_rank in values.items() if (ranks := _differing(dict(enumerate(per_rank))))
    ]
    if differences:
        return f"the ranks' {BLOCK} blocks differ; give every rank the same configuration:\n" + "\n".join(differences)

    verdict = None
    if any(enabled) and not any(announcement.moe_layers for announcement in announcements):
        verdict = _judge_without_moe_layers(announcements)
    return verdict or _judge_names(announcements)


def _differing(values: dict[int, Any]) -> str | None:
    """Which value on which ranks; None if all are the same. `values` are by rank."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(json.dumps(value), []).append(rank)
    if len(by_value) < 2:
        return None
    return "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())


def _judge_names(announcements: list[Announcement]) -> str | None:
    """Pipeline stages hold different layers: ranks have to agree on those they share, and patterns match in one."""
    layers = dict.fromkeys(itertools.chain.from_iterable(a.experts_by for a in announcements))
    alike: dict[str, list[str]] = {}
    for layer in layers:
        by_rank = {rank: a.experts_by[layer] for rank, a in enumerate(announcements) if layer in a.experts_by}
        ranks = _differing(by_rank)
        if ranks is not None:
            alike.setdefault(ranks, []).append(layer)
    if alike:
        return (
            "the ranks would compute the same experts in different ways and could not read each other's rows. Make "
            f'`ds-fp4 report` say the same on all of them, or set {BLOCK}.experts.compute to "bf16":\n'
        ) + "\n".join(f"  {shorten(names)}: computed by: {ranks}" for ranks, names in alike.items())

    idle = [
        pattern for pattern in announcements[0].idle_patterns if all(pattern in a.idle_patterns for a in announcements)
    ]
    # Where there are no layers, nothing is to be learnt from their names.
    telling = [a for a in announcements if a.moe_layers] or announcements
    reasons = dict.fromkeys(f"{pattern}: {a.idle_patterns[pattern]}" for pattern in idle for a in telling)
    return "\n".join(reasons) or None


def _judge_without_moe_layers(announcements: list[Announcement]) -> str | None:
    """Checkpointing is all that a model without MoE layers can have, and a block that says nothing of them may ask."""
    block = announcements[0].block
    expected = (
        "the model has no MoE layer: expected deepspeed.moe.layer.MoE modules, or a Hugging Face MoE with the "
        "expert_parallel block enabled"
    )
    if not block.get(f"{BLOCK}.checkpointing.enabled"):
        return (
            f"{BLOCK}.enabled is true, but {expected}. Add one of them, or set {BLOCK}.enabled to false (or "
            f"{BLOCK}.checkpointing.enabled to true, which works without them)."
        )
    requests = dict.fromkeys(key for announcement in announcements for key in announcement.moe_requests)
    if requests:
        keys = ", ".join(requests)
        return (
            f"{keys}: {expected}. Add one of them, or leave {keys} out, so that the block asks for checkpointing only."
        )
    scope = block[f"{BLOCK}.checkpointing.scope"]
    if isinstance(scope, str):
        return (
            f'{BLOCK}.checkpointing.scope = "{scope}" is found by MoE layers, but {expected}. Set scope to a list of '
            'patterns of module names, such as ["model.layers.*"], or to [] for what the model checkpoints by itself '
            "(gradient_checkpointing_enable(), deepspeed.checkpointing.checkpoint)."
        )
    return None


def _raise_unless_agreed(verdict: str | None) -> None:
    if verdict is not None:
        raise StartError(f"{BLOCK}: {verdict}")
