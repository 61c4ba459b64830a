"""Curves as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby

from memtop.supervisor.language import tr
from memtop.supervisor.run.report.facts import Curve

_WIDTH, _HEIGHT = 860, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 8, 20
_BANDS = ((0.85, 0.90, "edge"), (0.90, 1.0, "danger"))


def curve_svg(curve: Curve, x_text: Callable[[float], str], *, marks: Sequence[float] = ()) -> str:
    """A curve fitted to its range. `marks`: vertical lines, for example where attempts began."""
    values = [y for _, y in curve.points if y is not None]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return _chart(
        curve,
        low,
        high,
        "",
        [(low, f"{low:.4g}"), ((low + high) / 2, f"{(low + high) / 2:.4g}"), (high, f"{high:.4g}")],
        x_text,
        marks,
    )


def memory_svg(curve: Curve, x_text: Callable[[float], str], *, marks: Sequence[float] = ()) -> str:
    """A share of memory from 0 to 100 %, with the bands."""
    bands = "".join(
        f'<rect class="{name}" x="{_LEFT}" width="{_WIDTH - _LEFT - _RIGHT}" y="{_y(top, 0, 1):.1f}"'
        f' height="{_y(bottom, 0, 1) - _y(top, 0, 1):.1f}"/>'
        for bottom, top, name in _BANDS
    )
    labels = [(0.0, "0 %"), (0.5, "50 %"), (0.85, "85 %"), (1.0, "100 %")]
    return _chart(curve, 0.0, 1.0, bands, labels, x_text, marks)


def _chart(
    curve: Curve,
    low: float,
    high: float,
    behind: str,
    labels: Sequence[tuple[float, str]],
    x_text: Callable[[float], str],
    marks: Sequence[float],
) -> str:
    begin, end = curve.points[0][0], max(curve.points[-1][0], curve.points[0][0] + 1e-9)

    def x(value: float) -> float:
        return _LEFT + (value - begin) / (end - begin) * (_WIDTH - _LEFT - _RIGHT)

    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>'
        for y, text in ((_y(value, low, high), text) for value, text in labels)
    )
    lines = "".join(
        f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        for mark in marks
        if begin < mark <= end
    )
    paths = "".join(
        f'<polyline points="{" ".join(f"{x(at):.1f},{_y(value, low, high):.1f}" for at, value in piece)}"/>'
        for piece in _pieces(curve)
    )
    ends = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{escape(x_text(begin))}</text>'
        f'<text class="y" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">{escape(x_text(end))}</text>'
    )
    title = escape(tr(curve.title))
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"{behind}{grid}{lines}{paths}{ends}</svg></figure>"
    )


def _y(value: float, low: float, high: float) -> float:
    return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _pieces(curve: Curve) -> Iterator[list[tuple[float, float]]]:
    """The parts of a curve between its gaps."""
    for known, points in groupby(curve.points, key=lambda point: point[1] is not None):
        if known:
            yield [(at, value) for at, value in points if value is not None]
