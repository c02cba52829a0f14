"""`prefill-node start`."""

from typing import Any

import click

from prefill_node.daemon import serve
from splitserve.core.config import NodeConfig
from splitserve.core.node import NodeKind
from splitserve.core.options import option
from splitserve.engine.join import take_rank
from splitserve.engine.options import node_config, node_options
from splitserve.rpc.daemon import run_daemon

NAME = "prefill-node"


@click.group()
def main() -> None:
    """Computes prompts and leases their KV to decode nodes."""


@main.command()
@node_options(NodeKind.PREFILL, port=50051)
@option(
    NAME,
    "--max-tokens-per-batch",
    default=NodeConfig.max_tokens_per_batch,
    help="Most prompt tokens in a step.",
)
@option(
    NAME,
    "--lease-ttl",
    default=NodeConfig.lease_ttl_s,
    type=float,
    help="Seconds that leased KV lives if its router no longer renews it.",
)
def start(log_level: str, lease_ttl: float, **options: Any) -> None:
    """Runs a prefill node until it is told to stop."""
    run_daemon(
        NAME,
        log_level,
        lambda: take_rank(node_config(NodeKind.PREFILL, lease_ttl_s=lease_ttl, **options)),
        serve,
    )


if __name__ == "__main__":
    main()
