"""What a person sees while a controller runs: a live table on a terminal, a line per important event elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from icefrog import events as ev
from icefrog.driver import Turn
from icefrog.live import View
from icefrog.livequery import JobRow, row_of, told
from icefrog.state import GRANTED, ClusterState, Phase

_STYLES = {
    Phase.PENDING: "yellow",
    Phase.STARTING: "cyan",
    Phase.RUNNING: "green",
    Phase.RESIZING: "cyan",
    Phase.PREEMPTING: "magenta",
    Phase.STOPPING: "magenta",
    Phase.COMPLETED: "bold green",
    Phase.TARGET_MISSED: "bold yellow",
    Phase.FAILED: "bold red",
    Phase.CANCELLED: "dim",
}
_REFRESH_S = 0.5
_MAX_FINISHED = 8  # finished jobs shown; the rest are counted


def live_view(console: Console | None = None) -> View:
    """The table on a terminal, else lines."""
    chosen = console if console is not None else Console()
    return TableView(chosen) if chosen.is_terminal else LineView(chosen)


class LineView:
    """A line for every event that changes where a job stands. Fit for a pipe or a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._origin_s: float | None = None
        self._depth: dict[str, int] = {}

    def turn(self, turn: Turn, state: ClusterState) -> None:
        """Print what happened."""
        records: list[ev.AnyRecord] = [*turn.events, *turn.step.facts, *turn.step.commands]
        for record in records:
            if self._origin_s is None:
                self._origin_s = record.time_s
            job_id = getattr(record, "job_id", "")
            text = told(record, self._depth.get(job_id, 0))
            if isinstance(record, ev.ProgressReported):
                self._depth[job_id] = record.frozen_layers
            if text is not None:
                line = f"{record.time_s - self._origin_s:8.1f} s  {job_id}: {text}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self, state: ClusterState, now_s: float) -> None:
        """Nothing between events."""

    def message(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to close."""


class TableView:
    """A table that is drawn over and over. What must not be lost is printed above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawn_s = -_REFRESH_S
        self._lines = LineView(console)
        self._live.start()

    def turn(self, turn: Turn, state: ClusterState) -> None:
        """Draw at once when something happened."""
        for event in turn.events:
            if isinstance(event, ev.JobCrashed | ev.JobWarned):
                self._lines.turn(Turn(turn.now_s, [event], type(turn.step)(), 0.0), state)
        self._draw(state, turn.now_s)

    def refresh(self, state: ClusterState, now_s: float) -> None:
        """Draw now and then, for the clocks in it."""
        if now_s - self._drawn_s >= _REFRESH_S:
            self._draw(state, now_s)

    def _draw(self, state: ClusterState, now_s: float) -> None:
        self._drawn_s = now_s
        self._live.update(Group(header(state, now_s), table(state, now_s)), refresh=True)

    def message(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._live.stop()


def header(state: ClusterState, now_s: float) -> Text:
    """GPUs in use and jobs by where they stand."""
    total = state.cluster.num_gpus
    used = len({gpu for job in state.active.values() for gpu in job.gpus})
    waiting = sum(job.phase is Phase.PENDING for job in state.active.values())
    running = sum(job.phase in GRANTED for job in state.active.values())
    finished = len(state.jobs) - len(state.active)
    text = Text("IceFrog", style="bold cyan")
    text.append(f"  {used}/{total} GPUs granted", style="default")
    text.append(f"   {running} running, {waiting} waiting, {finished} finished", style="dim")
    return text


def table(state: ClusterState, now_s: float) -> JobsTable:
    """The last few jobs that are finished, and the unfinished ones."""
    finished = [job for job in state.jobs.values() if job.finished]
    shown = [*sorted(finished, key=lambda job: job.finish_s or 0.0)[-_MAX_FINISHED:], *state.active.values()]
    return jobs_table([row_of(job, now_s) for job in shown])


def jobs_table(rows: Iterable[JobRow]) -> JobsTable:
    """One line a job, with as many columns as the terminal is wide enough for."""
    return JobsTable(tuple(rows))


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[JobRow], RenderableType]
    width: int
    rank: int
    """Columns of a low rank stay when there is little room."""
    right: bool = True


@dataclass(frozen=True, slots=True)
class JobsTable:
    """A table of jobs that fits its columns to the console it is printed on."""

    rows: tuple[JobRow, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Columns by rank while there is room; the reason takes what is left."""
        longest = max((len(row.job_id) for row in self.rows), default=3)
        room = options.max_width - longest - 2
        chosen = []
        for column in sorted(_COLUMNS, key=lambda column: column.rank):
            if column.width + 2 <= room:
                room -= column.width + 2
                chosen.append(column)
        view = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        view.add_column("job", no_wrap=True, style="bold")
        kept = [column for column in _COLUMNS if column in chosen]
        for column in kept:
            width = column.width + (room if column.name == "reason" else 0)
            justify: Literal["left", "right"] = "right" if column.right else "left"
            view.add_column(column.name, justify=justify, width=width, no_wrap=True, overflow="ellipsis")
        for row in self.rows:
            view.add_row(Text(row.job_id), *(column.cell(row) for column in kept))
        yield view


def _once_started(text: Callable[[JobRow], str]) -> Callable[[JobRow], str]:
    return lambda row: "-" if row.first_start_s is None else text(row)


def _number(row: JobRow) -> str:
    return "-" if row.metric is None else f"{row.metric:.4g}"


def _layers(row: JobRow) -> str:
    return f"{row.frozen_layers}" + ("" if row.num_layers is None else f"/{row.num_layers}")


_COLUMNS = (
    _Column("phase", lambda row: Text(row.phase, style=_STYLES[Phase(row.phase)]), 13, 0, right=False),
    _Column("GPUs", lambda row: "1/2" if row.shared else str(len(row.gpus) or "-"), 4, 1),
    _Column("epoch", _once_started(lambda row: str(row.epoch)), 5, 2),
    _Column("metric", _number, 6, 3),
    _Column("target", lambda row: row.target or "-", 16, 6),
    _Column("frozen", _once_started(_layers), 6, 4),
    _Column("psi", _once_started(lambda row: f"{row.psi:.3f}"), 5, 8),
    _Column("samples/s", lambda row: f"{row.throughput:.0f}" if row.throughput and not row.finished else "-", 9, 7),
    _Column("effective", lambda row: ProgressBar(total=1.0, completed=row.progress or 0.0, width=12), 12, 9),
    _Column("restarts", lambda row: str(row.restarts), 8, 10),
    _Column("reason", lambda row: Text(row.reason, style="dim"), 24, 5, right=False),
)
