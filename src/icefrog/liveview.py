"""What a person sees while a controller runs: a live table on a terminal, a line per important event elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from icefrog import events as ev
from icefrog.driver import Turn
from icefrog.live import View
from icefrog.livequery import JobRow, row_of, told
from icefrog.state import FINAL, GRANTED, ClusterState, Phase

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


def table(state: ClusterState, now_s: float) -> Table:
    """The last few jobs that are finished, and the unfinished ones."""
    finished = [job for job in state.jobs.values() if job.finished]
    shown = [*sorted(finished, key=lambda job: job.finish_s or 0.0)[-_MAX_FINISHED:], *state.active.values()]
    return jobs_table([row_of(job, now_s) for job in shown])


def jobs_table(rows: Iterable[JobRow]) -> Table:
    """One line a job."""
    view = Table(box=None, pad_edge=False, expand=True, header_style="bold")
    for name in ("job", "phase"):
        view.add_column(name, no_wrap=True)
    for name in ("GPUs", "epoch", "metric", "target", "frozen", "psi", "samples/s"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("effective samples", min_width=16, no_wrap=True)
    view.add_column("restarts", justify="right", no_wrap=True)
    view.add_column("reason", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        view.add_row(*_cells(row))
    return view


def _cells(row: JobRow) -> Iterable[Text | ProgressBar | str]:
    phase = Phase(row.phase)
    count = "1/2" if row.shared else str(len(row.gpus) or "-")
    layers = "" if row.num_layers is None else f"/{row.num_layers}"
    started = row.first_start_s is not None
    yield Text(row.job_id, style="bold")
    yield Text(row.phase, style=_STYLES[phase])
    yield count
    yield f"{row.epoch}/{row.max_epochs}" if started else "-"
    yield "-" if row.metric is None else f"{row.metric:.4g}"
    yield row.target or "-"
    yield f"{row.frozen_layers}{layers}" if started else "-"
    yield f"{row.psi:.3f}" if started else "-"
    yield f"{row.throughput:.0f}" if row.throughput and phase not in FINAL else "-"
    yield ProgressBar(total=1.0, completed=row.progress or 0.0, width=16)
    yield str(row.restarts)
    yield Text(row.reason, style="dim")
