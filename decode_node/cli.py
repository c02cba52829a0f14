"""`decode-node start`."""

from typing import Any

import click

from decode_node.daemon import serve
from splitserve.core.config import NodeConfig
from splitserve.core.node import NodeKind
from splitserve.core.options import option
from splitserve.engine.join import take_rank
from splitserve.engine.options import node_config, node_options
from splitserve.rpc.daemon import run_daemon

NAME = "decode-node"


@click.group()
def main() -> None:
    """Pulls KV from prefill nodes and generates."""


@main.command()
@node_options(NodeKind.DECODE, port=50052)
@option(
    NAME,
    "--max-concurrent-pulls",
    default=NodeConfig.max_concurrent_pulls,
    help="Most requests whose KV is pulled at once.",
)
def start(log_level: str, **options: Any) -> None:
    """Runs a decode node until it is told to stop."""
    run_daemon(NAME, log_level, lambda: take_rank(node_config(NodeKind.DECODE, **options)), serve)


if __name__ == "__main__":
    main()
