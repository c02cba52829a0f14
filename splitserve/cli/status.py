"""``splitserve status``."""

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.cli.as_json import as_json as to_json
from splitserve.cli.options import json_option, router_option
from splitserve.client import Client, ClusterStatus

_COUNTS = (
    "blocks_total",
    "blocks_free",
    "blocks_owned",
    "blocks_leased",
    "blocks_quarantined",
    "waiting",
    "running",
    "importing",
)


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
    """A line about the router and a table of its nodes."""
    finished = ", ".join(f"{count} {name}" for name, count in sorted(status.finished.items()))
    router = Text(
        f"router {status.address}  model {status.model}  queued {status.queued}  "
        f"running {status.running}  finished: {finished or 'none'}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("kind", "address", "model", "transports"):
        table.add_column(name, overflow="fold")
    for name in _COUNTS:
        # "blocks_free" becomes two short lines.
        table.add_column(name.replace("_", "\n"), justify="right")
    table.add_column("serving")
    for node in status.nodes:
        table.add_row(
            node.info.kind.label,
            node.info.address,
            node.info.model,
            ", ".join(node.info.transports),
            *(str(getattr(node, name)) for name in _COUNTS),
            "yes" if node.serving else "no",
        )
    return Group(router, table if status.nodes else Text("no node has joined"))
