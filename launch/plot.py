# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The loss-curve picture of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from launch.metrics import read_metrics

if TYPE_CHECKING:
    from launch.compare import Results

COLORS = (
    "#3b4252", "#d1495b", "#0f8b8d", "#e09f3e", "#6a4c93", "#4f772d", "#4d9de0", "#9c6644", "#e377c2", "#7f7f7f",
)  # fmt: skip


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values at each step, of all so far where there are fewer."""
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_losses(results: Results, path: Path, title: str) -> None:
    """Draws each run's loss (thin), means over seeds (bold), held-out losses, and differences to the first entry."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(11, 6.5), height_ratios=(3, 1), sharex=True, layout="constrained", dpi=150
    )
    first, reference, largest = next(iter(results)), None, 0.5
    for color, (label, runs) in zip(COLORS * len(results), results.items(), strict=False):
        curves = [_curve(Path(run.metrics)) for run in runs.values()]
        steps, held_out_steps = curves[0]["steps"], curves[0]["held_out_steps"]
        losses = np.stack([smooth(curve["losses"], max(1, len(steps) // 30)) for curve in curves])
        held_out = np.stack([curve["held_out"] for curve in curves]).mean(axis=0)
        # Where recipes agree the curves coincide: later ones are dashed, their markers larger, so that all are seen.
        is_first = reference is None
        _draw(upper, steps, losses, color, linestyle="-" if is_first else (0, (4, 2)))
        upper.plot(
            held_out_steps, held_out, "o" if is_first else "D", color=color, markersize=6 if is_first else 9,
            markerfacecolor="none", markeredgewidth=1.5, label=f"{label}: {held_out[-1]:.4f}",
        )  # fmt: skip
        if is_first:
            reference = losses
            continue
        difference = 100 * (losses / reference - 1)
        _draw(lower, steps, difference, color)
        # A loss that falls fast differs much from step to step; the first tenth would hide the rest.
        largest = max(largest, 1.15 * float(np.abs(difference[:, len(steps) // 10 :]).max()))
    upper.set_title(title, fontsize=11, loc="left")
    upper.set_ylabel("loss (nats per byte)")
    # Beside the curves, which would run through it.
    title = "lines: training\nmarkers, numbers: held-out"
    figure.legend(
        *upper.get_legend_handles_labels(), title=title, loc="outside right upper", frameon=False, fontsize=9,
        alignment="left",
    )  # fmt: skip
    lower.set_ylabel(f"vs {first} (%)")
    lower.set_xlabel("step")
    lower.axhline(0, color=COLORS[0], linewidth=1)
    if np.isfinite(largest):
        lower.set_ylim(-largest, largest)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _draw(axes, steps: np.ndarray, values: np.ndarray, color: str, linestyle="-") -> None:
    """One thin line a seed, values [seeds, steps], and their mean."""
    if len(values) > 1:
        axes.plot(steps, values.T, color=color, linewidth=0.6, alpha=0.4)
    axes.plot(steps, values.mean(axis=0), color=color, linewidth=1.8, linestyle=linestyle)


def _curve(path: Path) -> dict[str, np.ndarray]:
    records = read_metrics(path)
    steps = [record for record in records if "loss" in record]
    held_out = [record for record in records if "held_out_loss" in record]
    return {
        "steps": np.array([record["step"] for record in steps]),
        "losses": np.array([record["loss"] for record in steps]),
        "held_out_steps": np.array([record["step"] for record in held_out]),
        "held_out": np.array([record["held_out_loss"] for record in held_out]),
    }
