"""Draws a run as one SVG picture: the distributions of TTFT, ITL and E2EL, and tokens and requests over time.

No plotting library is used, because four panels of lines do not need one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeserve.cli.workload.metrics import Outcome, concurrency, populations, tokens_per_second

Numbers = npt.NDArray[np.float64]

PANEL_W, PANEL_H = 470, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 34, 42  # margins inside a panel
MAX_POINTS = 1500  # of a line; more than a panel's pixels
MAX_BINS = 240  # of a rate over time
COLOURS = ("#1f6fb2", "#d1602b", "#3d9140")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    x: Numbers
    y: Numbers


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_title: str
    lines: tuple[Line, ...]
    log_x: bool = False


def write_plot(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Draws the outcomes to an SVG file. Raises OSError."""
    path.write_text(draw(title, outcomes))


def draw(title: str, outcomes: Sequence[Outcome]) -> str:
    panels = _panels([outcome for outcome in outcomes if not outcome.error])
    columns = 2
    width, height = columns * PANEL_W, 30 + math.ceil(len(panels) / columns) * PANEL_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for place, panel in enumerate(panels):
        x, y = place % columns * PANEL_W, 30 + place // columns * PANEL_H
        parts += [f'<g transform="translate({x},{y})">', *_draw_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panels(done: Sequence[Outcome]) -> list[Panel]:
    by_name = {name: np.sort(values) * 1e3 for name, values in populations(done).items() if values.size}
    panels: list[Panel] = []
    for title, names in (
        ("Latency to the first and the last token", ("ttft", "e2el")),
        ("Between tokens", ("itl", "tpot")),
    ):
        lines = tuple(_distribution(name.upper(), by_name[name]) for name in names if name in by_name)
        panels.append(Panel(f"{title}: share of requests or gaps", "ms", lines, log_x=True))
    panels.append(Panel("Output tokens per second", "s", (_rate(tokens_per_second(done)),)))
    times, counts = concurrency(done)
    steps = Line("", np.repeat(times, 2)[1:], np.repeat(counts.astype(np.float64), 2)[:-1])
    panels.append(Panel("Requests in progress", "s", (steps,)))
    return panels


def _rate(per_second: npt.NDArray[np.int64]) -> Line:
    """Returns means over intervals of a whole number of seconds."""
    width = -(-len(per_second) // MAX_BINS) or 1
    starts = np.arange(0, len(per_second), width)
    sums = np.add.reduceat(per_second, starts) if len(starts) else starts
    return Line("", starts.astype(np.float64), sums / np.minimum(width, len(per_second) - starts))


def _distribution(name: str, ms: Numbers) -> Line:
    """Returns the share of values that are at most x; `ms` is sorted."""
    share = np.arange(1, len(ms) + 1) / len(ms)
    median, p99 = np.percentile(ms, [50, 99])
    return Line(f"{name}: median {_duration(median)}, P99 {_duration(p99)}", np.maximum(ms, 1e-3), share)


def _duration(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:,.1f} s"


def _draw_panel(panel: Panel) -> list[str]:
    x_all = np.concatenate([np.empty(0), *(line.x for line in panel.lines)])
    y_all = np.concatenate([np.empty(0), *(line.y for line in panel.lines)])
    parts = [
        f'<text x="{LEFT}" y="{TOP - 12}" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{PANEL_W - RIGHT}" y="{PANEL_H - 10}" text-anchor="end">{panel.x_title}</text>',
    ]
    if x_all.size == 0:
        return [*parts, f'<text x="{LEFT}" y="{PANEL_H / 2}">nothing was measured</text>']
    x_ticks = _log_ticks(x_all.min(), x_all.max()) if panel.log_x else _ticks(x_all.max())
    y_ticks = _ticks(y_all.max())
    x_scale = AxisScale(x_ticks, LEFT, PANEL_W - RIGHT, log=panel.log_x)
    y_scale = AxisScale(y_ticks, PANEL_H - BOTTOM, TOP, log=False)
    parts += _axes(x_ticks, y_ticks, x_scale(np.array(x_ticks)), y_scale(np.array(y_ticks)))
    for place, line in enumerate(panel.lines):
        colour = COLOURS[place]
        kept = np.linspace(0, len(line.x) - 1, min(len(line.x), MAX_POINTS)).astype(np.int64)
        points = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in zip(x_scale(line.x[kept]), y_scale(line.y[kept]), strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if line.name:
            parts.append(
                f'<text x="{LEFT + 8}" y="{TOP + 12 + 14 * place}" fill="{colour}">{escape(line.name)}</text>'
            )
    return parts


def _axes(x_ticks: list[float], y_ticks: list[float], x_at: Numbers, y_at: Numbers) -> list[str]:
    right, bottom = PANEL_W - RIGHT, PANEL_H - BOTTOM
    parts: list[str] = []
    for value, x in zip(x_ticks, x_at, strict=True):
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>')
    for value, y in zip(y_ticks, y_at, strict=True):
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    return parts


class AxisScale:
    """Maps values to pixels. The axis goes from the first tick, at `start`, to the last, at `end`."""

    def __init__(self, ticks: list[float], start: float, end: float, *, log: bool) -> None:
        self._log = log
        self._low, self._high = (math.log10(v) if log else v for v in (ticks[0], ticks[-1]))
        self._start, self._end = start, end

    def __call__(self, values: Numbers) -> Numbers:
        linear = np.log10(values) if self._log else values
        pixels: Numbers = self._start + (linear - self._low) / (self._high - self._low) * (
            self._end - self._start
        )
        return pixels


def _ticks(high: float) -> list[float]:
    """Returns at most six ticks from 0 to `high` or the next round number."""
    step = 10.0 ** math.floor(math.log10(max(high, 1e-9)))
    step *= next(f for f in (0.2, 0.5, 1.0, 2.0) if high / (step * f) <= 5)
    return [step * i for i in range(max(math.ceil(high / step - 1e-9), 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten around low .. high; also 2 and 5 times them if the range spans at most two powers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last += first == last
    if last - first > 2:
        return [10.0**e for e in range(first, last + 1)]
    ticks = [m * 10.0**e for e in range(first, last) for m in (1, 2, 5)] + [10.0**last]
    begin = max(place for place, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min(place for place, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return ticks[begin : max(end, begin + 1) + 1]
