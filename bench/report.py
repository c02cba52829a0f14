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
PLAIN_WIDTH = 120
"""Columns where the output is no terminal: no row is broken."""


class Skipped(Exception):  # noqa: N818  (no error)
    """A question that cannot be asked here; says why."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line: a case, both sides, and what their ratio is expected to be.

    Attributes:
        case: What was measured.
        unit: Of both sides' figures; larger is better.
        rounds: The figures.
        expected: Least ratio of ours to the peer's.
    """

    case: str
    unit: str
    rounds: Rounds
    expected: float

    @property
    def met(self) -> bool:
        """Whether the ratio is what it is expected to be."""
        return self.rounds.ratio >= self.expected

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
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for heading in ("", "splitserve", self.peer, "ratio", "lowest..highest", "expected"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for one in self.cases:
            ratios = one.rounds.ratios
            colour = "green" if one.met else "red"
            met = "met" if one.met else "missed"
            table.add_row(
                one.case,
                one.unit,
                figure(one.rounds.our_median),
                figure(one.rounds.peer_median),
                f"{one.rounds.ratio:.2f}",
                f"{min(ratios):.2f}..{max(ratios):.2f}",
                f"{one.expected:.2f}",
                f"[{colour}]{met}[/]" if coloured else met,
            )
        return table


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
