# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Ranks that do not agree, or cannot start, all say why before anything is sent; none hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import RankFailure, run_ranks

MXFP4 = {"enabled": True, "recipe": "mxfp4"}


def _start(blocks: list, importing: list[bool], model: str = "classic", config: dict | None = None) -> str:
    """Build an engine on this rank; the error's text, or 'started'."""
    rank = torch.distributed.get_rank()
    if importing[rank]:
        import ds_fp4  # noqa: F401
    block = blocks[rank]
    started = time.monotonic()
    try:
        if model == "dense":
            engine = models.build(torch.nn.Linear(8, 8), models.ds_config(block))
        elif model == "autoep":
            engine = models.build(models.mixtral(), models.ds_config(block, ep_size=2, **(config or {})))
        else:
            engine = models.build(models.classic_model(), models.ds_config(block, **(config or {})))
    except Exception as error:
        assert time.monotonic() - started < 60
        if importing[rank]:
            # stay alive as long as the slowest peer may need the store
            time.sleep(1.0)
        return f"{type(error).__name__}: {error}"
    del engine
    return "started"


def _texts(blocks: list, importing: list[bool] | None = None, **options) -> list[str]:
    return run_ranks(len(blocks), _start, blocks, importing or [True] * len(blocks), **options)


def test_equal_blocks_start():
    assert _texts([MXFP4, dict(reversed(MXFP4.items()))]) == ["started"] * 2


def test_differing_blocks_name_keys_values_and_ranks_everywhere():
    other = {**MXFP4, "all_to_all": {"dispatch_forward": "fp8"}}
    for text in _texts([MXFP4, MXFP4, other, MXFP4]):
        assert 'ds_fp4.all_to_all.dispatch_forward: "mxfp4" on ranks 0-1, 3; "fp8" on rank 2' in text
        assert "give every rank the same configuration" in text


def test_a_block_on_one_rank_only():
    for text in _texts([None, MXFP4]):
        assert "ds_fp4.enabled: false on rank 0; true on rank 1" in text


def test_an_invalid_block_on_one_rank_is_reported_everywhere():
    for text in _texts([MXFP4, {**MXFP4, "recipe": "mxfp5"}]):
        assert "rank 1: ConfigError: ds_fp4.recipe = 'mxfp5': allowed values are 'bf16', 'fp8' or 'mxfp4'" in text


@pytest.mark.parametrize("absent", (0, 1))
def test_a_rank_that_never_imported_ds_fp4_is_named(absent):
    importing = [rank != absent for rank in range(2)]
    # The rank without ds_fp4 goes on into DeepSpeed's first collective, where it loses its peer.
    with pytest.raises(RankFailure) as failure:
        environment = {"DS_FP4_START_TIMEOUT": "2"}
        run_ranks(2, _start_and_reraise, [MXFP4, MXFP4], importing, env=environment, timeout=60, patience=1)
    text = failure.value.errors[1 - absent]
    assert f"rank {absent} is missing: no announcement within 2 s" in text
    assert "ds-fp4 run" in text and "DS_FP4_START_TIMEOUT" in text


def _rank_0_dies_while_rank_1_waits() -> None:
    if torch.distributed.get_rank() == 0:
        time.sleep(2)
        os._exit(3)
    raise RuntimeError(_start([MXFP4, MXFP4], [True, True]))


def test_a_dead_rank_0_is_named():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _rank_0_dies_while_rank_1_waits, timeout=60)
    assert "StartError: ds_fp4: the process group's key-value store cannot be reached" in failure.value.errors[1]
    assert "Rank 0" in failure.value.errors[1]


def _wrong_timeout_on_rank_1() -> str:
    if torch.distributed.get_rank() == 1:
        os.environ["DS_FP4_START_TIMEOUT"] = "soon"
    return _start([MXFP4, MXFP4], [True, True])


def test_a_wrong_timeout_on_one_rank_is_reported_everywhere():
    for text in run_ranks(2, _wrong_timeout_on_rank_1):
        assert "rank 1: DS_FP4_START_TIMEOUT='soon': expected a number of seconds above 0" in text


def _start_and_reraise(blocks: list, importing: list[bool]) -> None:
    text = _start(blocks, importing)
    if importing[torch.distributed.get_rank()]:
        raise RuntimeError(text)


def test_importing_ds_fp4_on_some_ranks_without_a_block_changes_nothing():
    texts = _texts([None, None], importing=[True, False], env={"DS_FP4_START_TIMEOUT": "2"})
    assert texts == ["started"] * 2


def test_a_model_without_moe_layers_is_refused():
    for text in run_ranks(2, _refused, MXFP4, "dense", {}):
        assert "ds_fp4.enabled is true, but the model has no MoE layer" in text
        assert "expert_parallel" in text and "set ds_fp4.enabled to false" in text


def _refused(block: dict, kind: str, config: dict) -> str:
    return _start([block, block], [True, True], kind, config)


REFUSALS = [
    (
        "classic",
        {**MXFP4, "layers": {"blocks.7.*": "fp8"}},
        {},
        "ds_fp4.layers.blocks.7.*: matches none of the model's MoE layers: blocks.0.moe, blocks.1.moe",
    ),
    (
        "classic",
        {**MXFP4, "checkpointing": {"enabled": True}},
        {"activation_checkpointing": {"partition_activations": True}},
        "activation_checkpointing.partition_activations = True cannot be combined",
    ),
    ("classic", {**MXFP4, "scale_rounding": "up"}, {}, "ds_fp4.scale_rounding = 'up'"),
    ("classic", MXFP4, {"compile": {"deepcompile": True}}, "Set compile.deepcompile to false"),
    ("classic", {"enabled": "true"}, {}, "ds_fp4.enabled = 'true': expected true or false"),
    (
        "classic",
        {**MXFP4, "all_to_all": {"dispatch": "fp8"}},
        {},
        "ds_fp4.all_to_all.dispatch: unknown key; allowed keys here: "
        "dispatch_forward, combine_forward, combine_backward, dispatch_backward. Did you mean",
    ),
]


@pytest.mark.parametrize("kind, block, config, message", REFUSALS, ids=[message[:40] for *_, message in REFUSALS])
def test_refusals_say_what_to_set(kind, block, config, message):
    for text in run_ranks(2, _refused, block, kind, config):
        assert message in text


def _deepep() -> str:
    import ds_fp4.engine as hook
    from ds_fp4.startup import Announcement

    engine = models.build(models.mixtral(), models.ds_config(ep_size=2))
    for module in engine.module.modules():
        if hasattr(module, "comm_backend"):
            module.comm_backend = "deepep"
    try:
        hook.make_plan({"ds_fp4": MXFP4}, engine.module, torch.device("cpu"), Announcement("test"))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_deepep_transport_is_refused_by_name():
    for text in run_ranks(2, _deepep):
        assert (
            'expert_parallel.comm_backend = "deepep"' in text and 'Set expert_parallel.comm_backend to "comm"' in text
        )


def _wrong_version(package: str) -> str:
    from ds_fp4 import compat

    if package == "deepspeed":
        compat.DEEPSPEED_TESTED = ("0.1", "0.2")
    else:
        compat.TRANSFORMERS_TESTED = ("4.0", "4.1")
    return _start([MXFP4, MXFP4], [True, True], "autoep")


@pytest.mark.parametrize("package", ("deepspeed", "transformers"))
def test_untested_releases_are_refused_by_name(package):
    for text in run_ranks(2, _wrong_version, package):
        assert f"was tested with {package}" in text and "DS_FP4_SKIP_VERSION_CHECK=1" in text
    assert run_ranks(2, _wrong_version, package, env={"DS_FP4_SKIP_VERSION_CHECK": "1"}) == ["started"] * 2


def test_expert_parallel_size_1_warns_and_trains():
    text = run_ranks(1, _ep_size_1)[0]
    assert "expert-parallel size 1, so nothing is sent" in text


def _ep_size_1() -> str:
    import logging

    from deepspeed.utils import logger

    import ds_fp4  # noqa: F401

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    engine = models.build(models.classic_model(ep_size=1), models.ds_config(MXFP4))
    models.train(engine, models.batches(2, 0))
    return "\n".join(records)
