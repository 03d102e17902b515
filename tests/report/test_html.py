"""The page: complete, self-contained, and deaf to whatever users put into names and labels."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_logs import CLUSTER, Log, generate

from icefrog.report import RunRecord, fold, gantt, plots, summarise, summary_document
from icefrog.report.html import render, script_json
from icefrog.spec import ClusterSpec, Target

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u2028"


class Page(HTMLParser):
    """Tags with their attributes, and the text inside each kind of tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def data(self) -> dict[str, object]:
        at = next(i for i, (_, attrs) in enumerate(self.tags) if attrs.get("id") == "data")
        assert self.tags[at][0] == "script"
        return json.loads(next(text for tag, text in self.texts if tag == "script" and text.startswith('{"shared"')))


def runs(*policies: str, jobs: int = 12, cluster: ClusterSpec = CLUSTER, **kwargs: object) -> dict[str, RunRecord]:
    return {
        policy: fold(
            generate(seed=1, jobs=jobs, cluster=cluster, policy=policy, freezes=policy == "icefrog", **kwargs),  # type: ignore[arg-type]
            cluster,
        )
        for policy in policies
    }


def page(made: dict[str, RunRecord], trace: dict[str, object] | None = None) -> str:
    rows = [summarise(run, policy=policy, wall_s=1.0) for policy, run in made.items()]
    return render(made, summary_document(trace or {"source": "test"}, CLUSTER, rows))


def test_it_holds_everything() -> None:
    made = runs("fifo", "icefrog")
    parsed = Page(page(made))
    data = parsed.data()
    assert list(data["shared"]) == ["jct", "in_use", "waiting", "depth"]  # type: ignore[call-overload]
    assert all(figure["data"] for figure in data["shared"].values())  # type: ignore[attr-defined]
    assert list(data["runs"]) == ["fifo", "icefrog"]  # type: ignore[call-overload]
    for policy, run in made.items():
        shown = data["runs"][policy]  # type: ignore[index]
        assert [row[0] for row in shown["table"]["rows"]] == [job.job_id for job in run.jobs]
        assert shown["figures"]["timeline"]["data"]
    text = " ".join(text for _, text in parsed.texts)
    for wanted in ("mean JCT", "speed-up", "2x2 = 4 GPUs", "fifo, icefrog"):
        assert wanted in text


def test_it_loads_nothing() -> None:
    html = page(runs("icefrog", jobs=3, target=Target(value=0.9)))
    parsed = Page(html)
    for tag, attrs in parsed.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
        assert tag not in ("iframe", "object", "embed", "base")
        assert attrs.get("http-equiv") is None
    style = " ".join(text for tag, text in parsed.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    own = html[html.rindex('<script>\n"use strict"') :]
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(", own)
    assert html.count("<script") - html.count("<script>alert") >= 3
    assert sum(tag == "script" for tag, _ in parsed.tags) == 3


def test_same_runs_same_bytes() -> None:
    assert page(runs("fifo", "icefrog")) == page(runs("fifo", "icefrog"))


def test_labels_and_reasons_are_text() -> None:
    log = Log()
    log.submit(0, "a", labels={"user": NASTY, NASTY: "x"}, target=Target(metric=NASTY, value=0.9))
    log.start(0, "a", [(0, 0)])
    log.progress(5, "a", metric=0.5)
    log.crash(8, "a", reason=NASTY)
    log.start(9, "a", [(0, 0)])
    log.finish(20, "a")
    made = {"icefrog": fold(log.records, CLUSTER)}
    html = page(made, {"source": NASTY, NASTY: NASTY})
    parsed = Page(html)
    assert sum(tag == "script" for tag, _ in parsed.tags) == 3
    assert not any(tag == "img" for tag, _ in parsed.tags)
    assert "<script>alert" not in html.replace("\\u003cscript", "")
    table = parsed.data()["runs"]["icefrog"]["table"]  # type: ignore[index]
    assert any(isinstance(cell, str) and f"user={NASTY}" in cell for cell in table["rows"][0])  # shown as text
    # What plotly takes for markup is escaped for it.
    figures = parsed.data()["runs"]["icefrog"]["figures"]  # type: ignore[index]
    assert "<script" not in json.dumps(figures)
    assert "<img" not in json.dumps(figures)


@given(st.recursive(st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_json_in_a_script_survives(value: object) -> None:
    dumped = script_json(value)
    assert not set("<>&\u2028\u2029") & set(dumped)
    assert json.loads(dumped) == value


@pytest.mark.parametrize("policies", [(), ("fifo",), ("fifo", "icefrog")])
def test_no_jobs(policies: tuple[str, ...]) -> None:
    html = page({policy: fold([], CLUSTER) for policy in policies})
    assert "No job was submitted" in html
    assert "<script" not in html


def test_nothing_finished() -> None:
    log = Log()
    log.submit(0, "a")
    log.submit(0, "b")
    log.start(0, "b", [(0, 0)])
    run = fold(log.records, CLUSTER)
    html = page({"icefrog": run})
    assert "2 unfinished of 2 jobs" in html
    assert Page(html).data()["shared"]["jct"]["data"] == []  # type: ignore[index]


def test_one_run_of_two_is_empty() -> None:
    made = {"fifo": fold([], CLUSTER), **runs("icefrog")}
    assert "icefrog" in page(made)


def test_a_live_run_shows_metric_and_target() -> None:
    made = runs("icefrog", jobs=3, origin_s=1.7e9, target=Target(value=0.9))
    figures = Page(page(made)).data()["runs"]["icefrog"]["figures"]  # type: ignore[index]
    lines = figures["metric"]["data"]
    assert {line["name"] for line in lines} == {"job-0000", "job-0001", "job-0002"}
    targets = [line for line in lines if line["line"]["dash"] == "dot"]
    assert [line["y"] for line in targets] == [[0.9, 0.9]] * 3
    assert len(figures["depths"]["data"]) == 3


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_distribution_ends_at_the_share_that_completed() -> None:
    log = Log()
    for name, end_s in (("a", 10), ("b", 100)):
        log.submit(0, name)
        log.start(0, name, [(0, 0)])
        log.finish(end_s, name)
    log.submit(0, "never")
    figure = plots.jct_distribution({"p": fold(log.records, CLUSTER)})
    assert figure["data"][0]["x"] == [10, 10, 100]
    assert figure["data"][0]["y"] == pytest.approx([0, 100 / 3, 200 / 3], abs=1e-4)


def test_mean_depth_is_weighted_by_gpus() -> None:
    log = Log()
    log.submit(0, "a")
    log.submit(0, "b")
    log.start(0, "a", [(0, 0)])
    log.start(0, "b", [(0, 1), (1, 0), (1, 1)])
    log.progress(0, "a", frozen_layers=8, variance=(1.0,) * 10)
    log.progress(0, "b", frozen_layers=4, variance=(1.0,) * 10)
    log.finish(100, "a")
    log.finish(100, "b")
    figure = plots.frozen_depth({"p": fold(log.records, CLUSTER)})
    assert figure["data"][0]["y"][5] == pytest.approx((8 + 3 * 4) / 4 * 10)


def test_timeline_bars_are_the_segments() -> None:
    run = runs("icefrog")["icefrog"]
    figure = gantt.timeline(run)
    bars = {trace["name"]: trace for trace in figure["data"] if trace["type"] == "bar"}
    parts = [part for job in run.jobs for part in job.segments(run.end_s)]
    assert len(bars["running"]["x"]) == sum(part.gpus > 0 for part in parts)
    assert len(bars["waiting"]["x"]) == sum(part.gpus == 0 for part in parts)
    assert sum(bars["running"]["x"]) == pytest.approx(
        sum(part.end_s - part.start_s for part in parts if part.gpus > 0) / plots.text.time_unit(run.end_s)[1], rel=1e-4
    )


def test_large_runs_are_sampled_and_say_so() -> None:
    log = Log()
    for i in range(900):
        log.submit(10 * i, f"j{i}")
        log.start(10 * i, f"j{i}", [(0, 0)])
        for k in range(45):
            log.progress(10 * i + k / 9, f"j{i}", frozen_layers=1 + k % 3, variance=(1.0,) * 100)
        log.finish(10 * i + 6, f"j{i}")
    run = fold(log.records, CLUSTER)
    figure = gantt.timeline(run)
    assert len(figure["layout"]["yaxis"]["tickvals"]) == gantt.MAX_ROWS
    assert figure["note"].startswith("150 of 900 jobs")
    assert "Depths within 5 %" in figure["note"]
    (bars,) = (trace for trace in figure["data"] if trace["type"] == "bar")
    assert len(bars["x"]) == gantt.MAX_ROWS  # 1 to 3 of 100 layers are one bar
    in_use = plots.gpus_in_use({"p": run})
    assert len(in_use["data"][0]["x"]) == plots.MAX_STEPS + 1
    assert "intervals" in in_use["note"]
    assert len(Page(page({"p": run})).data()["runs"]["p"]["table"]["rows"]) == 900  # type: ignore[index]


@settings(max_examples=30)
@given(st.floats(0, 1))
def test_colours_get_darker_with_depth(fraction: float) -> None:
    def lightness(value: str) -> float:
        return sum(w * int(value[i : i + 2], 16) for w, i in ((0.30, 1), (0.59, 3), (0.11, 5)))

    shallower, deeper = gantt.colour(fraction * 0.9), gantt.colour(fraction)
    assert lightness(deeper) <= lightness(shallower) + 1
