"""``python -m bench [engine|pull|router]``."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from bench.child import ChildError
from bench.machine import QUIET_SHARE, Disturbance, available_cores
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
    path = model or default_model()
    for name in dict.fromkeys(questions or QUESTIONS):
        measure: Callable[..., Coroutine[Any, Any, Report]] = import_module(f"bench.{name}").measure
        others = Disturbance()
        try:
            report = asyncio.run(measure(path, dtype, threads, rounds))
        except Skipped as reason:
            output.print(f"\n{name}: skipped: {reason}")
            continue
        except (ChildError, SplitserveError) as error:
            raise click.ClickException(f"{name}: {error}") from error
        report.notes["others used"] = _describe(others.share)
        report.show(output)
        output.print(f"written: {report.write()}")


def _describe(share: float) -> str:
    text = f"{share:.1%} of the processors meanwhile"
    return text if share <= QUIET_SHARE else f"{text}: too much; measure again when it is quiet"


if __name__ == "__main__":
    main(prog_name="python -m bench")
