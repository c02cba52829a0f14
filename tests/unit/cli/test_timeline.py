from io import StringIO

import pytest
from rich.console import Console
from scripted_router import MS, WHOLE_LIFE, K, life

from splitserve.cli.timeline import bar_cells, draw, format_bytes, format_ms, phases
from splitserve.core.lifetime import Lifetime


def drawn(lifetime: Lifetime) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(draw(lifetime))
    text: str = console.file.getvalue()
    return text


def test_a_life_is_drawn_with_every_phase_event_and_the_way_the_kv_went() -> None:
    text = drawn(WHOLE_LIFE)
    for name, duration in [
        ("queued", "10.0 ms"),
        ("prefill", "30.0 ms"),
        ("migration", "5.0 ms"),
        ("decode", "47.0 ms"),
    ]:
        [line] = [line for line in text.splitlines() if line.startswith(name)]
        assert "━" in line
        assert duration in line
    names = [event.kind.name for event in WHOLE_LIFE.events]
    positions = [text.index(f" {name} ") for name in names]
    assert positions == sorted(positions)
    assert "KV moved over shm: 2.0 MB in 3.0 ms to decode@127.0.0.1:2" in text
    assert "request r1, stop, first token after 40.0 ms, 100.0 ms in all" in text


def test_bars_stand_one_after_the_other() -> None:
    bars = {p.name: bar_cells(p.stretches_ns, 100 * MS, 100) for p in phases(WHOLE_LIFE)}
    assert bars["queued"].strip() == "━" * 10
    assert bars["prefill"].index("━") == 10
    assert bars["decode"].index("━") == 52
    assert all(len(bar) == 100 for bar in bars.values())


def test_a_phase_too_short_to_see_is_seen() -> None:
    assert bar_cells([(0, 1)], 10**9).count("━") == 1
    assert bar_cells([(10**9, 10**9)], 10**9).endswith("━")


def test_preemption_and_retry_leave_a_gap() -> None:
    lifetime = life(
        (K.ISSUED, 0),
        (K.PREFILL_BEGIN, 5),
        (K.RETRIED, 10),
        (K.PREFILL_BEGIN, 20),
        (K.PREFILL_END, 30),
        (K.DECODE_BEGIN, 40),
        (K.PREEMPTED, 50),
        (K.RESUMED, 70),
        (K.DECODE_END, 100),
    )
    stretches = {phase.name: phase.stretches_ns for phase in phases(lifetime)}
    assert stretches == {
        "queued": [(0, 5 * MS), (10 * MS, 20 * MS)],
        "prefill": [(5 * MS, 10 * MS), (20 * MS, 30 * MS)],
        "decode": [(40 * MS, 50 * MS), (70 * MS, 100 * MS)],
    }


def test_a_request_that_never_moved_says_so() -> None:
    text = drawn(life((K.ISSUED, 0), (K.PREFILL_BEGIN, 1), (K.PREFILL_END, 2), (K.FINISHED, 2)))
    assert "KV did not move" in text
    assert "migration" not in text


def test_a_life_that_has_only_begun_can_be_drawn() -> None:
    assert "ISSUED" in drawn(life((K.ISSUED, 0)))
    assert "no events yet" in drawn(Lifetime("r9"))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3 * 10**15, "3000.0 TB")],
)
def test_bytes_are_readable(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_times_are_in_milliseconds() -> None:
    assert format_ms(1_250_000) == "1.2 ms"
