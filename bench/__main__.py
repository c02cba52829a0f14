"""``python -m bench [engine|pull|router]``."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.child import ChildError
from bench.machine import Disturbance, available_cores
from bench.report import Report, Skipped, console
from splitserve.core.config import DTYPES
from splitserve.core.errors import SplitserveError
from splitserve.model.importer import default_model

QUESTIONS = ("engine", "pull", "router")


@click.command()
@click.argument("questions", nargs=-1, type=click.Choice(QUESTIONS))
@click.option("--model", type=Path, show_default="SmolLM2-135M-Instruct", help="Its directory.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
@click.option(
    "--threads",
    default=available_cores,
    show_default="all cores",
    type=click.IntRange(min=1),
    help="Compute threads of either side of the engine question.",
)
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="How often both sides take their turn; medians count.",
)
def main(
    questions: tuple[str, ...], model: Path | None, dtype: str, threads: int, rounds: int
) -> None:
    """Measures splitserve beside others, and writes bench/results/NAME.json.

    QUESTIONS: engine, pull, router; all of them unless named.
    """
    # What we started is ended by `finally` blocks, which a plain SIGTERM would skip.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output = console()
    try:
        path = model or default_model()
        for name in dict.fromkeys(questions or QUESTIONS):
            _answer(name, output, path, dtype, threads, rounds)
    except (ChildError, SplitserveError) as error:
        raise click.ClickException(str(error)) from error


def _answer(name: str, output: Console, *arguments: Any) -> None:
    """One question, from measuring to the file; one that cannot be asked here is skipped."""
    measure: Callable[..., Coroutine[Any, Any, Report]] = import_module(f"bench.{name}").measure
    others = Disturbance()
    try:
        report = asyncio.run(measure(*arguments))
    except Skipped as reason:
        output.print(f"\n{name}: skipped: {reason}")
        return
    report = replace(report, others=others.share)
    report.show(output)
    output.print(f"written: {report.write()}")


if __name__ == "__main__":
    main(prog_name="python -m bench")
