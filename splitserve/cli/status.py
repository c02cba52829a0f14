"""``splitserve status``."""

from collections.abc import Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from splitserve.cli.as_json import as_json as to_json
from splitserve.cli.options import json_option, router_option
from splitserve.client import Client, ClusterStatus
from splitserve.core.node import NodeStatus

_COUNTS = {
    "blocks_total": "blocks",
    "blocks_free": "free",
    "blocks_cached": "cached",
    "blocks_owned": "owned",
    "blocks_leased": "leased",
    "blocks_quarantined": "quaran-\ntined",
    "waiting": "waiting",
    "running": "running",
    "importing": "import-\ning",
}
"""Fields of a node's status, and headings short enough for a line of 80 characters."""


@click.command("status")
@router_option
@json_option
def command(router: str, as_json: bool) -> None:
    """Shows the router, its nodes, their blocks and queues."""
    with Client(router) as client:
        status = client.status()
    if as_json:
        click.echo(to_json(status, indent=2))
    else:
        Console().print(draw_status(status), highlight=False)


def draw_status(status: ClusterStatus) -> RenderableType:
    """A line about the router, what its nodes are, their blocks, queues and memory."""
    finished = ", ".join(f"{count} {name}" for name, count in sorted(status.finished.items()))
    router = Text(
        f"router {status.address}, model {status.model}: {status.queued} queued, "
        f"{status.running} running, finished: {finished or 'none'}"
    )
    if not status.nodes:
        return Group(router, Text("no node has joined"))
    tables = (_nodes(status.nodes), _counts(status.nodes), _ranks(status.nodes))
    return Group(router, *(part for table in tables for part in (Text(), table)))


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = _table("kind", "address", "model", "transports", "serving")
    for node in nodes:
        info, serving = node.info, "yes" if node.serving else "no"
        transports = ", ".join(info.transports)
        table.add_row(info.kind.label, info.address, info.model, transports, serving)
    return table


def _counts(nodes: Sequence[NodeStatus]) -> Table:
    table = _table("address")
    for heading in _COUNTS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for node in nodes:
        table.add_row(node.info.address, *(str(getattr(node, field)) for field in _COUNTS))
    return table


def _ranks(nodes: Sequence[NodeStatus]) -> Table:
    table = _table("address")
    for heading in ("rank", "weights", "KV"):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in nodes:
        for number, rank in enumerate(node.info.ranks):
            sizes = map(decimal, (rank.weight_bytes, rank.kv_bytes))
            table.add_row(node.info.address, str(number), *sizes)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
