"""``splitserve abort``."""

import click

from splitserve.cli.options import router_option
from splitserve.client import Client


@click.command("abort")
@click.argument("request_id")
@router_option
def command(request_id: str, router: str) -> None:
    """Ends the running request REQUEST_ID; its client hears that it was aborted."""
    with Client(router) as client:
        client.abort(request_id)
    click.echo(f"aborted {request_id}")
