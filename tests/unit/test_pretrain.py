# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The parts of the main job that need no process group: data, configurations, metrics, the comparison's arithmetic."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import compare, data, engine, metrics, model, plot

CONFIGS = Path(engine.CONFIGS)
MODELS = sorted((CONFIGS / "models").glob("*.json"))
RECIPES = sorted(CONFIGS.glob("autoep/*.json")) + sorted(CONFIGS.glob("classic/*.json"))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "some words of text. " * (20 + i))
    return folder


# Data


def test_the_split_depends_on_the_text_alone(texts, tmp_path):
    renamed = tmp_path / "renamed" / "deep"
    renamed.mkdir(parents=True)
    for file in texts.iterdir():
        (renamed / f"x{file.stem}.md").write_bytes(file.read_bytes())
    first, second = data.load_corpus([str(texts)]), data.load_corpus([str(renamed)])
    assert first.digest == second.digest
    assert np.array_equal(first.train, second.train) and np.array_equal(first.held_out, second.held_out)
    total = len(first.train) + len(first.held_out)
    assert 0.04 < len(first.held_out) / total < 0.12
    assert (first.train == data.SEPARATOR).sum() + (first.held_out == data.SEPARATOR).sum() == 40


def test_no_held_out_document_is_trained_on(texts):
    (texts / "copy.txt").write_bytes((texts / "3.txt").read_bytes())
    corpus = data.load_corpus([str(texts)])

    def documents(tokens):
        return {tuple(d) for d in np.split(tokens, np.flatnonzero(tokens == data.SEPARATOR) + 1) if len(d)}

    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert held_out and not train & held_out and len(train) + len(held_out) == 40


def test_tokens_are_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes("größer\n".encode() * 9)
    (tmp_path / "b").write_bytes(b"other")
    corpus = data.load_corpus([str(tmp_path / "a"), str(tmp_path / "b")])
    tokens = max(corpus.train, corpus.held_out, key=len)
    assert bytes(tokens[:-1].astype(np.uint8)) == "größer\n".encode() * 9 and tokens[-1] == data.SEPARATOR


def test_one_large_file_is_split_too(tmp_path):
    file = tmp_path / "large.txt"
    file.write_bytes(b"".join(b"line %d of a large file\n" % i for i in range(100_000)))
    corpus = data.load_corpus([str(file)])
    assert corpus.files == 1 and len(corpus.held_out) >= data.DOCUMENT_BYTES / 2


def test_binary_files_are_skipped_and_counted(texts):
    expected = data.load_corpus([str(texts)])
    (texts / "picture.png").write_bytes(b"\x89PNG\r\n\0\0\0")
    corpus = data.load_corpus([str(texts)])
    assert corpus.binary_files == 1 and corpus.digest == expected.digest
    assert "1 binary files skipped" in str(corpus) and "skipped" not in str(expected)


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="missing: no such file or folder"):
        data.load_corpus([str(tmp_path / "missing")])
    with pytest.raises(ValueError, match="holds no files"):
        data.load_corpus([str(tmp_path)])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match=r"2 files hold 0 different documents of text \(1 files are binary\)"):
        data.load_corpus([str(tmp_path)])


def test_the_default_data_is_the_standard_library():
    corpus = data.load_corpus()
    assert len(corpus.train) > 5_000_000 and len(corpus.held_out) > 200_000


def test_batches_depend_on_seed_and_step_only():
    tokens = np.arange(10_000, dtype=np.uint16)
    batches = [data.TrainingBatches(tokens, 16, 8, seed) for seed in (0, 0, 1)]
    late = batches[0].rows(70, 0, 8)  # an epoch has 624 rows: this is in it, the next ones are not
    for step in (200, 78, 0):
        batches[0].rows(step, 0, 8)
    assert torch.equal(batches[0].rows(70, 0, 8), late) and torch.equal(batches[1].rows(70, 0, 8), late)
    assert not torch.equal(batches[2].rows(70, 0, 8), late)
    parts = [batches[1].rows(70, first, 2) for first in (0, 2, 4, 6)]
    assert torch.equal(torch.cat(parts), late) and late.shape == (8, 17) and late.dtype == torch.int64


def test_an_epoch_draws_every_row_once():
    batches = data.TrainingBatches(np.arange(16 * 24 + 1, dtype=np.uint16), 16, 8, seed=3)
    rows = torch.cat([batches.rows(step, 0, 8) for step in range(3)])
    assert sorted(rows[:, 0].tolist()) == list(range(0, 16 * 24, 16))
    assert torch.equal(rows, rows[:, :1] + torch.arange(17))


def test_too_little_text_is_named():
    with pytest.raises(ValueError, match="one batch takes 8 rows of 16 tokens"):
        data.TrainingBatches(np.zeros(100, dtype=np.uint16), 16, 8, seed=0)
    with pytest.raises(ValueError, match=r"1 to 6 were expected.*Set --eval-tokens to 16\.\.96"):
        data.held_out_rows(np.zeros(100, dtype=np.uint16), 16, 1000)
    with pytest.raises(ValueError, match="makes 0 rows"):
        data.held_out_rows(np.zeros(100, dtype=np.uint16), 16, 15)


def test_held_out_rows_spread_over_the_text():
    rows = data.held_out_rows(np.arange(1000, dtype=np.uint16), 10, 50)
    assert rows.shape == (5, 11) and rows[0, 0] == 0 and rows[-1, 0] == 980 and len({*rows[:, 0].tolist()}) == 5


# Configurations


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_shipped_models_build(path):
    config = model.load_config(str(path))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in built.parameters())
    published = {"mixtral-8x7b": 46.7e9, "qwen3-235b-a22b": 235.1e9, "deepseek-v3": 671.0e9}
    low, high = {"tiny": (2e6, 8e6), "120m": (100e6, 130e6)}.get(path.stem.rsplit("-", 1)[-1], (0, math.inf))
    assert low <= parameters <= high
    assert path.stem not in published or parameters == pytest.approx(published[path.stem], rel=2e-3)
    assert config.hidden_size % 128 == 0 and config.vocab_size > data.SEPARATOR and model.expert_count(config) % 2 == 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_recipes(path):
    from ds_fp4.config import DsFp4Config, layer_recipe, parse_block

    config = json.loads(path.read_text())
    block = parse_block(config["ds_fp4"])
    assert block.recipe == path.stem and block.enabled == (path.stem != "bf16")
    # Legs are spelled out in the files for people to change; they must say what the preset says.
    name = "model.layers.0.mlp"
    assert layer_recipe(block, name) == layer_recipe(DsFp4Config(enabled=True, recipe=path.stem), name)
    assert config.get("expert_parallel") == (
        {"enabled": True, "autoep_size": 2} if path.parent.name == "autoep" else None
    )
    assert config["train_batch_size"] % config["train_micro_batch_size_per_gpu"] == 0


def test_recipes_differ_in_their_block_only():
    for folder in ("autoep", "classic"):
        rest = [json.loads(path.read_text()) for path in (CONFIGS / folder).glob("*.json")]
        for config in rest:
            config.pop("ds_fp4")
        assert len(rest) == 3 and all(config == rest[0] for config in rest)


def test_model_arguments():
    path = str(CONFIGS / "models" / "mixtral-tiny.json")
    assert model.load_config(path, ["num_hidden_layers=2", "tie_word_embeddings=true"]).num_hidden_layers == 2
    with pytest.raises(ValueError, match="has no key 'num_layers'"):
        model.load_config(path, ["num_layers=2"])
    with pytest.raises(ValueError, match="--model-args hidden_act=gelu: 'gelu' is not a JSON value"):
        model.load_config(path, ["hidden_act=gelu"])


def test_a_model_without_experts_is_refused(tmp_path):
    (tmp_path / "dense.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(ValueError, match="llama is not a MoE"):
        model.expert_count(model.load_config(str(tmp_path / "dense.json")))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match='no "model_type" key'):
        model.load_config(str(tmp_path / "other.json"))


@pytest.mark.parametrize(
    "asked, experts, world, expected",
    [(None, 8, 2, 2), (None, 8, 6, 2), (None, 8, 1, 1), (4, 8, 8, 4), (None, 256, 64, 64)],
)
def test_expert_parallel_size(asked, experts, world, expected):
    assert model.choose_ep_size(asked, experts, world) == expected


def test_bad_expert_parallel_size_is_named():
    with pytest.raises(
        ValueError, match="--ep-size 3 must divide the 8 experts and the 6 processes. Set it to a divisor of 2"
    ):
        model.choose_ep_size(3, 8, 6)


def arguments(**values):
    return argparse.Namespace(
        **{
            "moe": "autoep",
            "ep_size": None,
            "batch_size": None,
            "micro_batch_size": None,
            "lr": None,
            "steps": 300,
            **values,
        }
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("moe", ["autoep", "classic"])
def test_the_global_batch_does_not_depend_on_the_processes(moe, world):
    config, ep_size = engine.deepspeed_config(arguments(moe=moe, batch_size=48, micro_batch_size=10), "bf16", 8, world)
    micro, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert micro * accumulation * world == config["train_batch_size"] == 48 and micro <= 10 and ep_size == world
    assert config.get("expert_parallel", {}).get("autoep_size", ep_size) == world


@pytest.mark.parametrize("batch, micro, world", [(128, 32, 3), (128, 32, 6), (16, 8, 3), (1, 8, 2), (127, 16, 2)])
def test_a_batch_that_does_not_divide_is_rounded_up(batch, micro, world):
    rounded, size, accumulation = engine.divide_batch(batch, micro, world)
    assert rounded == size * accumulation * world and batch < rounded < batch + world * accumulation and size <= micro


def test_the_command_line_reaches_the_json():
    config, _ = engine.deepspeed_config(arguments(lr=5e-4, steps=50), "mxfp4", 8, 2)
    schedule = config["scheduler"]["params"]
    assert (config["optimizer"]["params"]["lr"], schedule["total_num_steps"], schedule["warmup_num_steps"]) == (
        5e-4,
        50,
        5,
    )
    config, _ = engine.deepspeed_config(arguments(), "mxfp4", 8, 2)
    assert config["train_batch_size"] == 128 and config["scheduler"]["params"]["warmup_num_steps"] == 30


def test_bad_configurations_are_named(tmp_path):
    with pytest.raises(ValueError, match="nor one of configs/autoep: bf16, fp8, mxfp4"):
        engine.deepspeed_config(arguments(), "fp2", 8, 2)
    with pytest.raises(ValueError, match="at least 1, but --batch-size is -8"):
        engine.deepspeed_config(arguments(batch_size=-8), "bf16", 8, 2)
    with pytest.raises(ValueError, match='--moe classic excludes an "expert_parallel" block'):
        engine.deepspeed_config(arguments(moe="classic"), str(CONFIGS / "autoep" / "bf16.json"), 8, 2)
    with pytest.raises(ValueError, match='--moe autoep needs "expert_parallel"'):
        engine.deepspeed_config(arguments(), str(CONFIGS / "classic" / "bf16.json"), 8, 2)


# Metrics and comparison


def write_run(path: Path, losses: list[float], held_out: float) -> metrics.Summary:
    file = metrics.MetricsFile(path)
    for step, loss in enumerate(losses, start=1):
        file.write(
            step=step,
            loss=loss,
            forward_bytes=200.0,
            recompute_bytes=0.0,
            backward_bytes=400.0,
            tokens_per_second=step,
        )
    file.write(step=len(losses), held_out_loss=held_out)
    file.close()
    return metrics.summarize(path, peak_bytes=2**30, memory_name="peak RSS")


def test_a_resumed_run_continues_its_file(tmp_path):
    path = tmp_path / "run.jsonl"
    write_run(path, [3.0, 2.0, 1.0], 1.5)
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # the run was killed while writing
    metrics.truncate_metrics(path, 2)
    assert [record["step"] for record in metrics.read_metrics(path)] == [1, 2]
    metrics.truncate_metrics(path, -1)
    assert metrics.read_metrics(path) == []
    path.write_text("broken\n{}\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        metrics.read_metrics(path)


def test_summary(tmp_path):
    summary = write_run(tmp_path / "run.jsonl", [float(20 - i) for i in range(20)], 0.5)
    assert summary.held_out_loss == 0.5 and summary.forward_bytes == 200 and summary.backward_bytes == 400
    assert summary.tokens_per_second == 13  # the median of steps 6 to 20
    assert summary.train_loss == 5.5  # the last ten


def test_peak_memory_starts_anew():
    peak = metrics.PeakMemory(torch.device("cpu"))
    block = torch.ones(64 * 2**20)
    with_block = peak.read()
    del block
    peak.reset()
    assert with_block - peak.read() > 128 * 2**20


def results(tmp_path, losses: dict[str, list[float]]) -> compare.Results:
    return {
        label: {
            seed: write_run(tmp_path / f"{label}-{seed}.jsonl", [loss + 2, loss + 1, loss], loss)
            for seed, loss in enumerate(values)
        }
        for label, values in losses.items()
    }


def test_differences_are_paired_by_seed(tmp_path):
    rows = compare.summarize_entries(
        results(tmp_path, {"bf16": [2.0, 2.002, 2.004], "mxfp4": [2.002, 2.004002, 2.006004]})
    )
    assert rows["mxfp4"]["difference_percent"] == pytest.approx(0.1, abs=1e-3)
    assert rows["bf16"]["difference_percent"] == 0
    assert rows["bf16"]["spread_percent"] == pytest.approx(0.2, abs=1e-3)


def test_table(tmp_path):
    text = compare.format_table(results(tmp_path, {"bf16": [2.0, 2.002], "mxfp4": [2.002, 2.004]}))
    header, _, bf16, mxfp4 = text.splitlines()[:4]
    assert "vs bf16" in header and "sent recompute" not in header and "peak RSS" in header
    assert (
        bf16.split()[:3] == ["bf16", "2.0010", "-"]
        and "+0.10 %" in mxfp4
        and "(1.000x)" in mxfp4
        and "1.00 GiB" in mxfp4
    )
    assert "judges nothing" not in text and "means of 2 pairs" in text


def test_the_table_says_when_it_judges_nothing(tmp_path):
    assert "this setup judges nothing" in compare.format_table(
        results(tmp_path, {"bf16": [2.0, 2.01], "mxfp4": [2.0, 2.0]})
    )
    assert "One seed: bf16's own spread is unknown" in compare.format_table(
        results(tmp_path, {"bf16": [2.0], "mxfp4": [2.0]})
    )


def test_entries_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must differ"):
        compare.compare(["bf16", "elsewhere/bf16.json"], [0], tmp_path, "title", run=lambda entry, seed: None)


def test_compare_runs_pairs_and_writes_everything(tmp_path, capsys):
    order = []

    def run(entry, seed):
        order.append((entry, seed))
        return write_run(tmp_path / f"{entry}-{seed}.jsonl", [3.0, 2.5, 2.2 + seed / 1000], 2.0 + seed / 1000)

    compare.compare(["bf16", "mxfp4"], [0, 1], tmp_path, "a title", run)
    assert order == [("bf16", 0), ("mxfp4", 0), ("bf16", 1), ("mxfp4", 1)]
    written = json.loads((tmp_path / "compare.json").read_text())
    assert (
        written["entries"]["mxfp4"]["1"]["held_out_loss"] == 2.001
        and written["comparison"]["mxfp4"]["difference_percent"] == 0
    )
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "a title" in (printed := capsys.readouterr().out) and "compare.png" in printed


def test_smoothing():
    values = np.array([4.0, 2.0, 0.0, 2.0])
    assert plot.smooth(values, 2).tolist() == [4, 3, 1, 1] and plot.smooth(values, 1).tolist() == values.tolist()


def test_command_line():
    from launch.pretrain import parse_args

    args = parse_args(["--compare", "bf16", "mxfp4"])
    assert args.model and args.steps and args.seq_len
    with pytest.raises(SystemExit):
        parse_args(["--compare", "bf16", "--resume"])
    with pytest.raises(SystemExit):
        parse_args(["--seeds", "1", "2"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seq-len", "0"], "--seq-len must be at least 1, got 0"),
        (["--save-every", "-1"], "--save-every must be at least 0, got -1"),
        (["--compare", "bf16", "--seeds", "1", "1"], "--seeds 1 1: the seeds must differ"),
    ],
)
def test_a_wrong_command_line(words, message, capsys):
    from launch.pretrain import parse_args

    with pytest.raises(SystemExit):
        parse_args(words)
    assert message in capsys.readouterr().err
