"""The demo's picture: time to first token by where the prompt's KV came from, and the trace's hit rate by tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, QUIET, GRID, PAPER = "#16202e", "#6b7686", "#e3e7ec", "#ffffff"
COLD, MEMORY, DISK, LIMIT = "#c9ced6", "#0f9d8a", "#3f6fd8", "#f0a13a"


@dataclass(frozen=True, slots=True)
class Bar:
    """One process: a label, a second line under it, seconds to the first token, the speed-up, and a colour."""

    label: str
    detail: str
    ttft_s: float
    speedup: float
    color: str


@dataclass(frozen=True, slots=True)
class TraceShare:
    """Hit rates of the replay in percent of all block references, and what an LRU of the same size would hit."""

    title: str
    memory_percent: float
    disk_percent: float
    lru_percent: float
    facts: list[str]


def draw(path: Path, heading: str, subheading: str, bars: list[Bar], trace: TraceShare) -> None:
    """Write the picture as a PNG of 2000 × 1050 pixels."""
    mpl.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": GRID})
    figure = plt.figure(figsize=(12.5, 6.5625), dpi=160, facecolor=PAPER)
    figure.text(0.045, 0.925, heading, fontsize=20, fontweight="bold", va="center")
    figure.text(0.045, 0.868, subheading, fontsize=11, color=QUIET, va="center")
    _ttft(figure.add_axes((0.175, 0.2, 0.465, 0.53)), bars)
    figure.text(0.045, 0.775, "Time to first token", fontsize=13, fontweight="bold", va="center")
    figure.text(0.725, 0.775, trace.title, fontsize=13, fontweight="bold", va="center")
    _trace(figure.add_axes((0.725, 0.2, 0.235, 0.53)), trace)
    figure.savefig(path, facecolor=PAPER)
    plt.close(figure)


def _ttft(axes: Axes, bars: list[Bar]) -> None:
    longest = max(bar.ttft_s for bar in bars)
    for place, bar in enumerate(reversed(bars)):
        axes.barh(place, max(bar.ttft_s, longest * 0.004), height=0.54, color=bar.color, zorder=3)
        inside = bar.ttft_s > longest * 0.6
        at = bar.ttft_s - longest * 0.015 if inside else bar.ttft_s + longest * 0.018
        side = "right" if inside else "left"
        number = axes.text(at, place, _seconds(bar.ttft_s), va="center", ha=side, fontsize=15, fontweight="bold")
        if bar.speedup > 1.05:
            axes.annotate(
                f"{bar.speedup:.0f}× faster", (1, 0.5), xycoords=number, xytext=(12, 0), textcoords="offset points",
                va="center", fontsize=13, color=bar.color, fontweight="bold",
            )  # fmt: skip
        margin = axes.get_yaxis_transform()
        axes.text(-0.02, place + 0.1, bar.label, va="center", ha="right", fontsize=12, transform=margin)
        axes.text(-0.02, place - 0.14, bar.detail, va="center", ha="right", fontsize=9, color=QUIET, transform=margin)
    axes.set_xlim(0, longest * 1.04)
    axes.set_ylim(-0.55, len(bars) - 0.45)
    axes.set_yticks([])
    axes.set_xlabel("seconds", fontsize=9.5, color=QUIET, loc="right")
    axes.grid(axis="x", color=GRID, linewidth=1)
    _bare(axes)


def _trace(axes: Axes, trace: TraceShare) -> None:
    total = trace.memory_percent + trace.disk_percent
    top = max(total, trace.lru_percent, 1.0) * 1.28
    axes.bar(0, trace.memory_percent, width=0.5, color=MEMORY, zorder=3)
    axes.bar(0, trace.disk_percent, bottom=trace.memory_percent, width=0.5, color=DISK, zorder=3)
    axes.plot([-0.36, 0.36], [trace.lru_percent] * 2, color=LIMIT, linewidth=2.4, zorder=4, solid_capstyle="round")
    labels = (
        (trace.memory_percent / 2, "from memory", MEMORY, trace.memory_percent),
        (trace.memory_percent + trace.disk_percent / 2, "from disk", DISK, trace.disk_percent),
    )
    for height, name, color, share in labels:
        if share > 0:
            text = f"{share:.1f} %\n{name}"
            axes.text(0.44, height, text, va="center", fontsize=10.5, linespacing=1.35, color=color, fontweight="bold")
    above = max(total, trace.lru_percent) + top * 0.035
    axes.text(0, above, f"{total:.1f} %", ha="center", fontsize=15, fontweight="bold")
    for line, fact in enumerate([f"— a perfect LRU of this size: {trace.lru_percent:.1f} %", *trace.facts]):
        axes.text(
            -0.62, -top * (0.085 + 0.067 * line), fact, fontsize=9, va="center", color=LIMIT if line == 0 else QUIET,
            fontweight="bold" if line == 0 else "normal",
        )  # fmt: skip
    axes.set_xlim(-0.6, 1.25)
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=QUIET)
    for side in axes.spines.values():
        side.set_visible(False)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
