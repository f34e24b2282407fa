# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Trains several recipes from the same seeds and data, and says how far they are from the first one."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.engine import find_json
from launch.metrics import Summary
from launch.plot import plot_losses

LARGEST_SPREAD = 0.3  # percent: a baseline that moves more from seed to seed cannot show a difference of that size

Results = dict[str, dict[int, Summary]]  # entry, then seed; the first entry is what the others are compared to


# Options of launch/pretrain.py that do not change what one run of a comparison computes.
_NOT_SETUP = ("compare", "seeds", "seed", "recipe", "config", "output", "share", "local_rank")


@dataclass
class Run:
    """A finished run of a comparison that several jobs share, as `<output>/<label>-seed<seed>.summary.json`."""

    title: str
    processes: int
    setup: dict
    summary: Summary


def labels_of(entries: list[str]) -> list[str]:
    """The names of recipes or files in tables. ValueError if two are equal."""
    labels = [Path(entry).stem for entry in entries]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--compare {' '.join(entries)}: the names {labels} must differ. Rename one of the files.")
    return labels


def run_names(labels: list[str], seeds: list[int]) -> dict[tuple[str, int], str]:
    """(label, seed) -> name of the run, in the order in which runs are done: pair by pair."""
    return {(label, seed): f"{label}-seed{seed}" for seed in seeds for label in labels}


def setup_of(args: argparse.Namespace, entry: str) -> dict:
    """Everything that a run's losses depend on, its seed and the number of processes apart; as JSON gives it back."""
    options = {key: str(value) for key, value in sorted(vars(args).items()) if key not in _NOT_SETUP}
    return {"options": options, "json": json.loads(find_json(entry, args.moe).read_text())}


def write_run(run: Run, output: Path, name: str) -> None:
    """Writes it whole or not at all: others look for it meanwhile."""
    path = output / f"{name}.summary.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(run), indent=2) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def read_run(output: Path, name: str) -> Run | None:
    """None if the run has not finished."""
    path = output / f"{name}.summary.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Run(**{**values, "summary": Summary(**values["summary"])})


def claim(folder: Path, name: str) -> bool:
    """Whether this is the first to claim `name`."""
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def compare(
    entries: list[str], seeds: list[int], output: Path, title: str, run: Callable[[str, int], Summary | None]
) -> None:
    """Runs every entry with every seed; rank 0 (where `run` returns a summary) prints the table and draws the picture.

    Args:
        entries: recipes or paths of DeepSpeed JSON files, with different stems.
        output: folder for `compare.json`, rewritten after each run, and `compare.png`.
        run: trains one entry with one seed.
    """
    labels = labels_of(entries)
    results: Results = {label: {} for label in labels}
    summary = None
    for seed in seeds:
        for label, entry in zip(labels, entries, strict=True):
            summary = run(entry, seed)
            if summary is not None:
                results[label][seed] = summary
                write_results(results, output / "compare.json", title)
    if summary is not None:
        report(results, output, title)


def report(results: Results, output: Path, title: str, notes: list[str] | None = None) -> None:
    """Writes `compare.json`, draws `compare.png`, prints the table with `notes` below."""
    write_results(results, output / "compare.json", title)
    picture = output / "compare.png"
    plot_losses(results, picture, title)
    print(
        "\n".join(["", title, "", format_table(results), *(notes or []), ""])
        + f"\nLoss curves: {picture}\nAll numbers: {output / 'compare.json'}",
        flush=True,
    )


def spread_percent(losses: list[float]) -> float | None:
    """(largest - smallest) / mean, in percent; None for a single loss."""
    return 100 * (max(losses) - min(losses)) / statistics.fmean(losses) if len(losses) > 1 else None


def differences_percent(losses: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """Each seed's difference to the baseline's loss with the same seed, in percent."""
    return [100 * (loss / baseline[seed] - 1) for seed, loss in losses.items() if seed in baseline]


def write_results(results: Results, path: Path, title: str) -> None:
    """Everything that the table shows, and each run's own numbers, as JSON."""
    entries = {
        label: {str(seed): summary.as_dict() for seed, summary in runs.items()} for label, runs in results.items()
    }
    path.write_text(
        json.dumps({"title": title, "entries": entries, "comparison": summarize_entries(results)}, indent=2) + "\n"
    )


def summarize_entries(results: Results) -> dict[str, dict]:
    """One row per entry that has runs: means over its seeds, and the comparison with the first entry."""
    baseline = {seed: summary.held_out_loss for seed, summary in next(iter(results.values())).items()}
    rows = {}
    for label, runs in results.items():
        if not runs:
            continue
        row = {
            key: statistics.fmean(getattr(summary, key) for summary in runs.values())
            for key in (
                "held_out_loss",
                "forward_bytes",
                "recompute_bytes",
                "backward_bytes",
                "tokens_per_second",
                "peak_bytes",
            )
        }
        losses = {seed: summary.held_out_loss for seed, summary in runs.items()}
        differences = differences_percent(losses, baseline)
        row.update(
            difference_percent=statistics.fmean(differences),
            differences_percent=differences,
            spread_percent=spread_percent(list(losses.values())),
        )
        rows[label] = row
    return rows


def format_table(results: Results) -> str:
    """The table as text, and below it what it may be read as saying."""
    rows = summarize_entries(results)
    first = next(iter(rows))
    some_run = next(iter(results[first].values()))
    with_recompute = any(row["recompute_bytes"] for row in rows.values())
    header = ["recipe", "held-out loss", f"vs {first}", "seed spread", "sent forward"]
    header += ["sent recompute"] if with_recompute else []
    header += ["sent backward", "tokens/s", some_run.memory_name]
    lines = [header]
    for label, row in rows.items():
        line = [label, f"{row['held_out_loss']:.4f}"]
        line.append("-" if label == first else _difference(row))
        line.append("one seed" if row["spread_percent"] is None else f"{row['spread_percent']:.2f} %")
        for leg in ("forward", "recompute", "backward") if with_recompute else ("forward", "backward"):
            sent, reference = row[f"{leg}_bytes"], rows[first][f"{leg}_bytes"]
            line.append(f"{sent / 2**20:.1f} MiB" + (f" ({sent / reference:.3f}x)" if reference else ""))
        line += [f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 2**30:.2f} GiB"]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "-" * len(text[0]))
    return "\n".join([*text, "", *explain(rows, first, len(results[first]))])


def _difference(row: dict) -> str:
    differences = row["differences_percent"]
    text = f"{row['difference_percent']:+.2f} %"
    return text if len(differences) < 2 else f"{text} ({min(differences):+.2f} to {max(differences):+.2f})"


def explain(rows: dict[str, dict], first: str, seeds: int) -> list[str]:
    """What the numbers mean, and when they mean nothing."""
    spread = rows[first]["spread_percent"]
    notes = [
        "Sent: payload that left its rank, per step, all ranks together. Loss: nats per byte on text never trained on."
    ]
    if spread is None:
        notes.append(
            f"One seed: {first}'s own spread is unknown, so the loss difference judges nothing. Use --seeds 0 1 2."
        )
    elif spread > LARGEST_SPREAD:
        notes.append(
            f"{first} itself moves by {spread:.2f} % from seed to seed, more than {LARGEST_SPREAD} %: this setup "
            "judges nothing. Make it stable first: more steps, a larger batch, another --lr, more --eval-tokens."
        )
    else:
        notes.append(
            f"Differences are means of {seeds} pairs with equal seeds (smallest to largest); {first} itself moves by "
            f"{spread:.2f} % from seed to seed (max - min)."
        )
    if not rows[first]["forward_bytes"]:
        notes.append("Nothing was sent: there is no other rank that holds experts. Start at least two processes.")
    return notes
