"""Attainment over the rate, and when every token of every request came."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.serving.curves import Curves, Point
from bench.serving.objectives import GOODPUT_ATTAINMENT

FORMATS = ("svg", "png")


def plot_attainment(curves: Curves, title: str, path: Path) -> list[Path]:
    """Draws the share of requests that meet their objectives, side by side; returns the files."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.sides.items():
        rates = [point.rate for point in points]
        axes.plot(rates, [100 * point.attainment for point in points], "o-", label=name)
    axes.axhline(100 * GOODPUT_ATTAINMENT, color="grey", linestyle=":", linewidth=1)
    axes.set(title=title, xlabel="requests a second", ylabel="objectives met, %", ylim=(0, 104))
    axes.legend()
    return _save(figure, path)


def plot_timelines(points: dict[str, Point], path: Path) -> list[Path]:
    """Draws each request as a line from its due time on, with a dot per token."""
    figure = Figure(figsize=(9, 3.2 * len(points)), layout="constrained")
    all_axes = figure.subplots(len(points), sharex=True, squeeze=False)[:, 0]
    for axes, (name, point) in zip(all_axes, points.items(), strict=True):
        _draw_requests(axes, point)
        axes.set(title=f"{name}, {point.rate:g} requests a second", ylabel="request")
    all_axes[-1].set_xlabel("seconds")
    return _save(figure, path)


def _draw_requests(axes: Axes, point: Point) -> None:
    for number, answer in enumerate(point.answers):
        times = answer.token_times_s
        first = times[0] if times else answer.due_s
        axes.hlines(number, answer.due_s, first, color="lightgrey", linewidth=1)
        axes.scatter(times, [number] * len(times), s=1.5, linewidths=0, color="tab:blue")


def _save(figure: Figure, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{kind}") for kind in FORMATS]
    for file in files:
        figure.savefig(file, dpi=120)
    return files
