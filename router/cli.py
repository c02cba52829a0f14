"""`router start`."""

from pathlib import Path

import click

from router.daemon import serve
from splitserve.core.config import RouterConfig
from splitserve.core.options import LOG_LEVELS, option
from splitserve.rpc.daemon import run_daemon

NAME = "router"


@click.group()
def main() -> None:
    """Takes requests and sends them through prefill and decode nodes."""


@main.command()
@option(
    NAME, "--model", required=True, type=Path, help="Directory of the model; weights are not read."
)
@option(
    NAME,
    "--tokenizer",
    type=Path,
    show_default="the model's",
    help="Directory of tokenizer and chat template.",
)
@option(
    NAME,
    "--listen",
    default=RouterConfig.listen,
    help="host:port to serve on; port 0 takes a free one.",
)
@option(
    NAME,
    "--max-queued-requests",
    default=RouterConfig.max_queued_requests,
    help="Most requests without a token; more are refused.",
)
@option(
    NAME,
    "--max-retries",
    default=RouterConfig.max_retries,
    help="How often a request is started again after a failure.",
)
@option(
    NAME,
    "--no-overlapped-pull",
    is_flag=True,
    help="Decode nodes pull a prompt's KV only once all of it is computed.",
)
@option(
    NAME,
    "--handover-timeout",
    default=RouterConfig.handover_timeout_s,
    type=float,
    help="Seconds that a prefilled request waits for a decode node to take it.",
)
@option(
    NAME,
    "--drain-timeout",
    default=RouterConfig.drain_timeout_s,
    type=float,
    help="Seconds that running requests may take after SIGTERM.",
)
@option(
    NAME,
    "--log-level",
    default="INFO",
    type=click.Choice(LOG_LEVELS),
    help="Least severe messages logged.",
)
def start(
    model: Path,
    tokenizer: Path | None,
    listen: str,
    max_queued_requests: int,
    max_retries: int,
    no_overlapped_pull: bool,
    handover_timeout: float,
    drain_timeout: float,
    log_level: str,
) -> None:
    """Runs the router until it is told to stop."""
    run_daemon(
        NAME,
        log_level,
        lambda: RouterConfig(
            model=model,
            tokenizer=tokenizer,
            listen=listen,
            max_queued_requests=max_queued_requests,
            max_retries=max_retries,
            overlapped_pull=not no_overlapped_pull,
            handover_timeout_s=handover_timeout,
            drain_timeout_s=drain_timeout,
        ),
        serve,
    )


if __name__ == "__main__":
    main()
