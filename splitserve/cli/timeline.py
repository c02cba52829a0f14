"""A request's life, drawn for a terminal."""

from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.core.lifetime import Lifetime, LifetimeEvent, LifetimeEventKind

PHASES = ("queued", "prefill", "migration", "decode")
BAR_WIDTH_CELLS = 32
"""Leaves room for times and a node's name on a line of 80 characters."""

_STYLES = {"queued": "dim", "prefill": "blue", "migration": "magenta", "decode": "green"}
_NS_PER_MS = 1e6
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")

_K = LifetimeEventKind
_OPENS = {
    _K.ISSUED: "queued",
    _K.RETRIED: "queued",
    _K.PREFILL_BEGIN: "prefill",
    _K.MIGRATION_BEGIN: "migration",
    _K.DECODE_BEGIN: "decode",
    _K.RESUMED: "decode",
}
_CLOSES = {
    _K.PREFILL_END: ("prefill",),
    _K.MIGRATION_END: ("migration",),
    _K.DECODE_END: ("decode",),
    _K.PREEMPTED: ("decode",),
    _K.PREFILL_BEGIN: ("queued",),
    _K.RETRIED: PHASES,
    _K.FINISHED: PHASES,
}


@dataclass(slots=True)
class Phase:
    """A part of a life, in the stretches it was in; retries and preemptions make several.

    Attributes:
        name: One of `PHASES`.
        stretches_ns: Begin and end of each, from the life's first event.
        node: Where the last stretch was.
    """

    name: str
    stretches_ns: list[tuple[int, int]] = field(default_factory=list)
    node: str = ""

    @property
    def duration_ns(self) -> int:
        """Time spent in it, all stretches together."""
        return sum(end - begin for begin, end in self.stretches_ns)


def phases(lifetime: Lifetime) -> list[Phase]:
    """The phases a life has had, in their usual order; an open one ends at the last event."""
    if not lifetime.events:
        return []
    found: dict[str, Phase] = {}
    opened: dict[str, int] = {}
    origin = lifetime.events[0].time_ns

    def close(name: str, time_ns: int) -> None:
        if name in opened:
            found[name].stretches_ns.append((opened.pop(name), time_ns))

    for event in lifetime.events:
        time_ns = event.time_ns - origin
        for name in _CLOSES.get(event.kind, ()):
            close(name, time_ns)
        if begun := _OPENS.get(event.kind):
            opened.setdefault(begun, time_ns)
            found.setdefault(begun, Phase(begun)).node = event.node
    for name in list(opened):
        close(name, lifetime.events[-1].time_ns - origin)
    return [found[name] for name in PHASES if name in found]


def draw(lifetime: Lifetime) -> RenderableType:
    """One bar per phase, the events in order, and how the KV moved."""
    if not lifetime.events:
        return Text(f"{lifetime.request_id}: no events yet")
    span_ns = max(1, lifetime.events[-1].time_ns - lifetime.events[0].time_ns)
    return Group(
        Text(_headline(lifetime, span_ns)),
        _bars(phases(lifetime), span_ns),
        _events(lifetime.events),
        *(Text(line) for line in transfer_lines(lifetime)),
    )


def transfer_lines(lifetime: Lifetime) -> list[str]:
    """How the KV moved: transport, bytes and time of every migration."""
    lines = []
    for event in lifetime.events:
        if event.transfer is not None:
            moved = event.transfer
            size, duration = format_bytes(moved.size_bytes), format_ms(moved.duration_ns)
            lines.append(f"KV moved over {moved.transport}: {size} in {duration} to {event.node}")
    return lines or ["KV did not move"]


def format_ms(time_ns: float) -> str:
    """Nanoseconds as milliseconds."""
    return f"{time_ns / _NS_PER_MS:.1f} ms"


def format_bytes(size_bytes: float) -> str:
    """Bytes in the unit that keeps the number below 1,000."""
    for unit in _BYTE_UNITS:
        if size_bytes < 1000 or unit == _BYTE_UNITS[-1]:
            break
        size_bytes /= 1000
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"


def _headline(lifetime: Lifetime, span_ns: int) -> str:
    parts = [f"request {lifetime.request_id}", lifetime.outcome or "running"]
    if lifetime.time_to_first_token_ns:
        parts.append(f"first token after {format_ms(lifetime.time_to_first_token_ns)}")
    return ", ".join([*parts, f"{format_ms(span_ns)} in all"])


def _bars(found: list[Phase], span_ns: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    table.add_column("", no_wrap=True, min_width=BAR_WIDTH_CELLS)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for phase in found:
        bar = Text(bar_cells(phase.stretches_ns, span_ns), style=_STYLES[phase.name])
        table.add_row(phase.name, bar, format_ms(phase.duration_ns), phase.node)
    return table


def bar_cells(
    stretches_ns: list[tuple[int, int]], span_ns: int, width: int = BAR_WIDTH_CELLS
) -> str:
    """A line of ``width`` cells with the stretches filled, each at least one cell long."""
    cells = [" "] * width
    for begin, end in stretches_ns:
        first = min(width - 1, begin * width // span_ns)
        last = max(first, -(-end * width // span_ns) - 1)
        for cell in range(first, min(width, last + 1)):
            cells[cell] = "━"
    return "".join(cells)


def _events(events: list[LifetimeEvent]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("on", overflow="fold")
    for event in events:
        table.add_row(format_ms(event.time_ns - events[0].time_ns), event.kind.name, event.node)
    return table
