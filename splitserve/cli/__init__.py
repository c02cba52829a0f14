"""The `splitserve` command; a file per subcommand, loaded when it is used."""

from importlib import import_module
from typing import Any

import click

from splitserve.core.errors import SplitserveError

EXIT_INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C has ended."""

_COMMANDS = {
    "abort": "End a running request.",
    "demo": "Start a cluster on this machine, ask it something, show what happened.",
    "generate": "Stream an answer to the terminal.",
    "model": "Import models.",
    "place": "Propose which host takes which ranks.",
    "status": "Show the router and its nodes.",
}


class _LazyGroup(click.Group):
    """Loads a command's module when it runs: gRPC alone would take a fifth of a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"splitserve.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SplitserveError as error:
            click.echo(f"splitserve: {error.code}: {error.message}", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(f"splitserve: {note}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_LazyGroup)
@click.version_option(package_name="splitserve")
def main() -> None:
    """Serves large language models with prefill and decode on separate daemons."""
