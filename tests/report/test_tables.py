"""What people read: durations, chains, and the tables on a terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from report_logs import CLUSTER, Log
from rich.console import Console, RenderableType

from icefrog.report import comparison, fold, render_comparison, render_table, summarise, summary_document, text
from icefrog.spec import Target


def printed(table: RenderableType) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *(
            (None, "–"),
            (0, "0.0 s"),
            (42.04, "42.0 s"),
            (59.96, "1 min 00 s"),
            (200, "3 min 20 s"),
            (3599.6, "1 h 00 min"),
        ),
        *((3600, "1 h 00 min"), (18420, "5 h 07 min"), (187200, "2 d 04 h"), (-5, "-5.0 s")),
    ],
)
def test_durations(seconds: float | None, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], "–"), ([1, 2, 4], "1→2→4"), ([1, 1, 0.5, 1], "1→½→1"), (range(12), "0→1→2→3→4→5→…→11")],
)
def test_chains(values: list[float], expected: str) -> None:
    assert text.chain(values) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "–"), (3, "3"), (1234567.0, "1,234,567"), (0.1234, "0.12"), (12.345, "12.3")]
)
def test_numbers(value: float | None, expected: str) -> None:
    assert text.number(value) == expected


def three_jobs() -> Log:
    log = Log()
    log.submit(0, "reaches", target=Target(metric="f1[bold]", value=0.9))
    log.submit(0, "misses", target=Target(value=0.9))
    log.submit(0, "runs", target=Target(value=0.9))
    log.start(0, "reaches", [(0, 0)])
    log.start(0, "misses", [(0, 1)])
    log.start(0, "runs", [(1, 0)])
    log.progress(10, "reaches", metric=0.5, frozen_layers=3, variance=(1.0,) * 8)
    log.resize(20, "reaches", [(0, 0), (1, 1)], gap_s=5)
    log.progress(30, "reaches", metric=0.93, frozen_layers=2, variance=(1.0,) * 8)
    log.finish(31, "reaches", metric=0.93)
    log.progress(40, "misses", metric=0.8)
    log.finish(40, "misses", outcome="target_missed")
    return log


def test_the_demos_table() -> None:
    shown = printed(render_table(fold(three_jobs().records, CLUSTER)))
    lines = {line.split("│")[1].strip(): line for line in shown.splitlines() if line.startswith("│")}
    cells = [cell.strip() for cell in lines["reaches"].split("│")[1:-1]]
    assert cells == ["reaches", "30.0 s", "yes, f1[bold] 0.93 (target 0.9)", "1→2", "0→3→2 (of 8)", "1"]
    assert "no, accuracy 0.8 (target 0.9; target missed)" in lines["misses"]
    assert [cell.strip() for cell in lines["runs"].split("│")[2:4]] == ["–", "no, accuracy 0.9 (unfinished)"]


def rows(*jct_s: float | None, **more: object) -> list[dict[str, object]]:
    base = summarise(fold([], CLUSTER), policy="x")
    return [{**base, "policy": f"p{i}", "jobs": 2, "avg_jct_s": value, **more} for i, value in enumerate(jct_s)]


def test_speed_up_is_over_the_first_and_the_best_is_marked() -> None:
    runs = rows(120.0, 60.0, 90.0)
    titles = [column.title for column in comparison.columns(runs)]
    assert titles.index("speed-up") == titles.index("mean JCT") + 1
    table = [cells for _, cells in comparison.rows(runs)]
    jct, speed_up = titles.index("mean JCT"), titles.index("speed-up")
    assert [cells[speed_up].text for cells in table] == ["1.00×", "2.00×", "1.33×"]
    assert [cells[jct].best for cells in table] == [False, True, False]
    assert not any(cells[titles.index("completed")].best for cells in table)  # all the same: none is the best


def test_a_comparison_without_completions() -> None:
    runs = rows(None, 60.0)
    assert "speed-up" not in [column.title for column in comparison.columns(runs)]
    assert "p1" in printed(render_comparison(summary_document({}, CLUSTER, runs)))
    assert printed(render_comparison(summary_document({}, CLUSTER, [])))


def test_lost_jobs_are_told() -> None:
    (line,) = comparison.caveats(rows(60.0, unfinished=1, target_missed=1))
    assert line == (
        "p0: 1 target missed, 1 unfinished of 2 jobs; "
        "jobs that failed, were cancelled or are unfinished are out of the means."
    )
    assert comparison.caveats(rows(60.0)) == []
