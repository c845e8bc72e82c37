"""Progress bars and aligned tables for commands that run in a terminal and end.

Bars go to stderr and only where somebody looks at it: a pipe gets results alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

Report = Callable[[int, int], None]
"""(done so far, all there is)."""


@contextmanager
def progress_bar(label: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """A bar that follows the reports and is erased at the end."""
    amount: ProgressColumn = DownloadColumn() if in_bytes else MofNCompleteColumn()
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), amount, TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task: TaskID = bar.add_task(label, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def render_columns(rows: Sequence[Sequence[str]], *, num_text_columns: int = 1) -> list[str]:
    """Lines of aligned columns; all but the first `num_text_columns` are numbers and end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if position < num_text_columns else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
