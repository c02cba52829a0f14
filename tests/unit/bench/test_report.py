"""Reports: a table for people, JSON for programs, and both say the same."""

import io
import json

import pytest
from rich.console import Console

from bench.machine import Machine
from bench.report import Comparison, Comparisons, Report, figure
from bench.rounds import Rounds


@pytest.fixture
def report() -> Report:
    machine = Machine("a processor", 2, 0.5, {"python": "3.11"})
    good = Comparison("a case", "tokens/s", Rounds([1234.0], [1000.0]), 0.9)
    bad = Comparison("another", "GB/s", Rounds([5.0, 6.0], [10.0, 10.0]), 0.8)
    notes = {"memory": "12 MB"}
    findings = Comparisons("peer", [good, bad])
    return Report("name", "a question", machine, {"threads": 2}, findings, notes)


def test_a_row_says_both_sides_their_ratio_and_whether_it_was_met(report):
    stream = io.StringIO()
    report.show(Console(file=stream, width=120))
    lines = stream.getvalue().splitlines()
    good, bad = (next(line for line in lines if line.startswith(c)) for c in ("a case", "another"))
    assert good.split()[2:] == ["tokens/s", "1,234", "1,000", "1.23", "1.23..1.23", "0.90", "met"]
    assert bad.split()[1:] == ["GB/s", "5.50", "10.0", "0.55", "0.50..0.60", "0.80", "missed"]
    assert "\x1b" not in stream.getvalue()


def test_where_a_limit_is_known_each_figure_says_its_share():
    cases = [
        Comparison("one", "tokens/s", Rounds([50.0], [40.0]), None, limit=100.0),
        Comparison("two", "tokens/s", Rounds([5.0], [4.0]), 1.0),
    ]
    findings = Comparisons("peer", cases)
    stream = io.StringIO()
    Console(file=stream, width=120).print(findings.table(coloured=False))
    heading, one, two = stream.getvalue().splitlines()
    assert heading.count("of limit") == 2
    assert one.split() == [
        "one",
        "tokens/s",
        "50.0",
        "50%",
        "40.0",
        "40%",
        "1.25",
        "1.25..1.25",
        "–",
    ]
    assert two.split() == ["two", "tokens/s", "5.00", "4.00", "1.25", "1.25..1.25", "1.00", "met"]
    told = findings.as_json()["comparisons"]
    assert [(case["limit"], case["met"]) for case in told] == [(100.0, None), (None, True)]


def test_the_file_holds_what_the_table_says(report, tmp_path):
    told = json.loads(report.write(tmp_path).read_text())
    assert [(one["ratio"], one["met"]) for one in told["comparisons"]] == [
        (1.234, True), (pytest.approx(0.55), False)
    ]  # fmt: skip
    assert told["comparisons"][1]["rounds"] == {"ours": [5.0, 6.0], "peers": [10.0, 10.0]}
    assert told["machine"]["processor"] == "a processor"
    assert [file.name for file in tmp_path.iterdir()] == ["name.json"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.50"), (9.876, "9.88"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_figures_have_three_digits(value, text):
    assert figure(value) == text
