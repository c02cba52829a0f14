"""Options of the daemons' commands; the environment can set each."""

from collections.abc import Callable
from typing import Any

import click

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

Command = Callable[..., Any]


def option(daemon: str, name: str, **attributes: Any) -> Callable[[Command], Command]:
    """A click option that the environment can set too.

    ``--max-batch-size`` of the prefill node reads ``SPLITSERVE_PREFILL_NODE_MAX_BATCH_SIZE``,
    then ``SPLITSERVE_MAX_BATCH_SIZE``, so that daemons on one host can share settings or differ.
    """
    stem = name.removeprefix("--").replace("-", "_").upper()
    prefix = daemon.replace("-", "_").upper()
    return click.option(
        name,
        envvar=[f"SPLITSERVE_{prefix}_{stem}", f"SPLITSERVE_{stem}"],
        show_envvar=True,
        show_default=attributes.pop("show_default", True),
        **attributes,
    )
