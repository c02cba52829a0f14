"""``splitserve model``."""

from pathlib import Path

import click

from splitserve.cli.progress import progress_bar


@click.group("model")
def command() -> None:
    """Imports models."""


@command.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace what DEST holds.")
def import_(source: Path, dest: Path, overwrite: bool) -> None:
    """Converts the model at SOURCE (GGUF, .bin, safetensors) into the directory DEST."""
    # Brings transformers and torch: seconds that only this command needs.
    from splitserve.model.importer import import_model

    with progress_bar("importing") as progress:
        import_model(source, dest, progress, overwrite=overwrite)
    click.echo(dest)


@command.command("default")
def default() -> None:
    """Prints the directory of the default model, which it imports on first use."""
    from splitserve.model.importer import default_model

    with progress_bar("importing the default model") as progress:
        directory = default_model(progress=progress)
    click.echo(directory)
