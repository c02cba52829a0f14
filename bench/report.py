"""What came out: a table for people, JSON for everything else."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from bench.machine import QUIET_SHARE, Machine
from bench.rounds import Rounds

RESULTS_DIR = Path(__file__).parent / "results"
PLAIN_WIDTH = 140
"""Columns where the output is no terminal: no row is broken."""


class Skipped(Exception):  # noqa: N818  (no error)
    """A question that cannot be asked here; says why."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line: a case, both sides, and what is expected of them.

    Attributes:
        case: What was measured.
        unit: Of both sides' figures; larger is better.
        rounds: The figures.
        expected: Least ratio of ours to the peer's; None where nothing is expected.
        limit: The figure that the hardware allows; None where none is known.
    """

    case: str
    unit: str
    rounds: Rounds
    expected: float | None
    limit: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the ratio is what it is expected to be."""
        return None if self.expected is None else self.rounds.ratio >= self.expected

    def as_json(self) -> dict[str, Any]:
        """Everything measured and what follows from it."""
        return {
            "case": self.case,
            "unit": self.unit,
            "ours": self.rounds.our_median,
            "peer": self.rounds.peer_median,
            "ratio": self.rounds.ratio,
            "expected_ratio": self.expected,
            "met": self.met,
            "limit": self.limit,
            "rounds": asdict(self.rounds),
        }


class Findings(Protocol):
    """The figures of a report."""

    def as_json(self) -> dict[str, Any]:
        """Everything measured and what follows from it."""

    def table(self, coloured: bool) -> Table:
        """The same for people."""


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Ours beside a peer's, case by case.

    Attributes:
        peer: Whom ours is compared with.
        cases: The lines.
    """

    peer: str
    cases: Sequence[Comparison]

    def as_json(self) -> dict[str, Any]:
        """See `Findings`."""
        return {"peer": self.peer, "comparisons": [case.as_json() for case in self.cases]}

    def table(self, coloured: bool) -> Table:
        """See `Findings`."""
        limited = any(one.limit for one in self.cases)
        limit = ["of limit"] if limited else []
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        headings = ("", "splitserve", *limit, self.peer, *limit, "ratio", "lowest..highest")
        for heading in (*headings, "expected"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for one in self.cases:
            ratios = one.rounds.ratios
            table.add_row(
                one.case,
                one.unit,
                *_figure_and_share(one.rounds.our_median, one.limit, limited),
                *_figure_and_share(one.rounds.peer_median, one.limit, limited),
                f"{one.rounds.ratio:.2f}",
                f"{min(ratios):.2f}..{max(ratios):.2f}",
                "–" if one.expected is None else f"{one.expected:.2f}",
                _verdict(one.met, coloured),
            )
        return table


def _figure_and_share(value: float, limit: float | None, limited: bool) -> list[str]:
    """A table's cells for one figure; the second only where any line has a limit."""
    share = f"{value / limit:.0%}" if limit else ""
    return [figure(value), share] if limited else [figure(value)]


def _verdict(met: bool | None, coloured: bool) -> str:
    if met is None:
        return ""
    text, colour = ("met", "green") if met else ("missed", "red")
    return f"[{colour}]{text}[/]" if coloured else text


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to one question.

    Attributes:
        name: The question's; also the JSON file's.
        title: The question.
        machine: Where.
        settings: What all sides were told, for example threads and dtype.
        findings: The figures.
        notes: What else is worth knowing, by its name.
        others: Share of the processors that nobody of ours used; set once it is known.
    """

    name: str
    title: str
    machine: Machine
    settings: dict[str, Any]
    findings: Findings
    notes: dict[str, str] = field(default_factory=dict)
    others: float = 0.0

    def show(self, console: Console) -> None:
        """Prints it."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine.versions.items())
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        console.print(f"\n{self.name}: {self.title}", style="bold")
        console.print(f"{self.machine.processor}, {self.machine.cores} cores, load before: "
                      f"{self.machine.load:.2f}")  # fmt: skip
        console.print(versions)
        console.print(settings + "\n")
        console.print(self.findings.table(console.is_terminal))
        for name, text in self.notes.items():
            console.print(f"{name}: {text}")
        console.print(f"others used {self.others:.1%} of the processors meanwhile")
        if self.others > QUIET_SHARE:
            console.print("That is too much: measure again when it is quiet.", style="yellow")

    def write(self, directory: Path = RESULTS_DIR) -> Path:
        """Writes it as JSON; the file is replaced whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{self.name}.json"
        made = file.with_suffix(".new")
        made.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return made.replace(file)

    def as_json(self) -> dict[str, Any]:
        """The same, for programs."""
        return {
            "name": self.name,
            "title": self.title,
            "machine": asdict(self.machine),
            "settings": self.settings,
            **self.findings.as_json(),
            "notes": self.notes,
            "others_share": self.others,
        }


def console() -> Console:
    """Where reports go; nothing is wrapped where nobody has a window."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def figure(value: float) -> str:
    """Three digits that matter, thousands set apart."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
