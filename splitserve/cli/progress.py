"""A bar for work whose size is known, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar and gives the function that moves it: ``(done, total)``."""
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Nothing to draw, nothing drawn: the bar appears with the first news.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)
