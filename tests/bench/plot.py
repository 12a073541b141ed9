"""A line chart as SVG: both axes logarithmic, one line a series, labelled at its end."""

import math
from collections.abc import Callable, Mapping
from html import escape

WIDTH, HEIGHT = 840, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 310, 48, 52
COLOURS = ("#0b6e4f", "#1f5fa8", "#c1440e", "#8a5a00", "#6b3fa0", "#555555")
LABEL_HEIGHT = 16
TICKS = (1, 2, 5)


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Mapping[int, float]]) -> str:
    """SVG text. `series`: name -> {x: y}, all positive; at least one point."""
    xs = sorted({x for points in series.values() for x in points})
    ys = [y for points in series.values() for y in points.values()]
    x_of = _scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    y_ticks = _ticks(min(ys), max(ys))
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for x in xs:
        parts.append(f'<path d="M{x_of(x):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="rotate(-90 16 {middle_y})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{middle_y}" {turned}>{escape(y_label)}</text>')
    ends = {name: y_of(points[max(points)]) for name, points in series.items()}
    labels = _spread(ends)
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join(f"{x_of(x):.1f},{y_of(points[x]):.1f}" for x in sorted(points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"/>' for x, y in points.items()]
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{labels[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From a value between `low` and `high` to its place on a logarithmic axis from `start` to `end`."""
    factor = (end - start) / math.log(high / low) if high > low else 0.0
    return lambda value: start + factor * math.log(value / low)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at or below `low` to at or above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick * 10.0**power for power in powers for tick in TICKS]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first : last + 1]


def _spread(wanted: Mapping[str, float]) -> dict[str, float]:
    """Heights of the labels: where the lines end, but no two on top of each other."""
    placed: dict[str, float] = {}
    lowest = -math.inf
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        lowest = placed[name] = max(y, lowest + LABEL_HEIGHT)
    return placed
