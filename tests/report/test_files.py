"""The files: jobs.csv, summary.json, and the folders they are found in."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from report_logs import CLUSTER, Log, generate

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.eventlog import SqliteLog
from icefrog.report import fold, load_dir, report_dir, summarise, summary_document, write_jobs_csv, write_summary
from icefrog.report.metrics import job_row
from icefrog.spec import ClusterSpec, NodeSpec

CONTRACT = ["job_id", "submit_s", "start_s", "finish_s", "jct_s", "queue_s", "gpu_s", "restarts", "status"]


def read(path: Path) -> pl.DataFrame:
    return pl.read_csv(path, infer_schema_length=None)


def test_jobs_csv_says_what_the_jobs_say(tmp_path: Path) -> None:
    run = fold(generate(seed=3, jobs=30, cluster=CLUSTER), CLUSTER)
    write_jobs_csv(run, tmp_path / "jobs.csv")
    table = read(tmp_path / "jobs.csv")
    assert table.columns[:9] == CONTRACT
    assert table.columns[-2:] == ["user", "vc"]
    for row, job in zip(table.iter_rows(named=True), run.jobs, strict=True):
        assert {key: row[key] for key in job_row(job)} == job_row(job)
        assert row["vc"] == job.labels["vc"]


def test_the_means_are_those_of_the_columns(tmp_path: Path) -> None:
    run = fold(generate(seed=5, jobs=60, cluster=CLUSTER, finish=False), CLUSTER)
    write_jobs_csv(run, tmp_path / "jobs.csv")
    table, row = read(tmp_path / "jobs.csv"), summarise(run)
    assert row["unfinished"] > 0
    assert row["avg_jct_s"] == pytest.approx(table["jct_s"].mean())
    assert row["avg_queue_s"] == pytest.approx(table["queue_s"].mean())
    assert row["p99_jct_s"] == pytest.approx(table["jct_s"].quantile(0.99, interpolation="linear"))
    assert row["restarts"] == table["restarts"].sum()
    assert row["gpu_hours"] * 3600 == pytest.approx(table["gpu_s"].sum())
    finished = table.filter(pl.col("jct_s").is_not_null())
    assert (finished["jct_s"] - (finished["finish_s"] - finished["submit_s"])).abs().max() == pytest.approx(0)


def test_unfinished_cells_are_empty(tmp_path: Path) -> None:
    log = Log()
    log.submit(0, "waits")
    write_jobs_csv(fold(log.records, CLUSTER), tmp_path / "jobs.csv")
    head, line = (tmp_path / "jobs.csv").read_text().splitlines()
    assert dict(zip(head.split(","), line.split(","), strict=True)) | {"gpu_s": "0.0"} == {
        **{"job_id": "waits", "submit_s": "0.0", "start_s": "", "finish_s": "", "jct_s": "", "queue_s": ""},
        **{"gpu_s": "0.0", "restarts": "0", "status": "unfinished", "workload": "resnet18", "crashes": "0"},
        **{"shared_s": "0.0", "max_frozen_layers": "0", "num_layers": "", "time_to_target_s": "", "metric": ""},
    }


def test_labels_do_not_take_a_columns_place(tmp_path: Path) -> None:
    log = Log()
    log.submit(0, "a", labels={"status": 'vip, "gold"', "team": "x\ny"})
    log.submit(0, "b")
    write_jobs_csv(fold(log.records, CLUSTER), tmp_path / "jobs.csv")
    table = read(tmp_path / "jobs.csv")
    assert table.columns[-2:] == ["label.status", "team"]
    assert table["label.status"].to_list() == ['vip, "gold"', None]
    assert table["team"].to_list() == ["x\ny", None]
    assert table["status"].to_list() == ["unfinished"] * 2


def test_an_empty_run_has_a_header(tmp_path: Path) -> None:
    write_jobs_csv(fold([], CLUSTER), tmp_path / "jobs.csv")
    assert (tmp_path / "jobs.csv").read_text().split(",")[:9] == CONTRACT


def simulation(folder: Path, policies: tuple[str, ...] = ("fifo", "icefrog"), jobs: int = 12) -> dict[str, object]:
    """A folder as ``simulate --out`` leaves it."""
    rows = []
    for policy in policies:
        records = generate(seed=1, jobs=jobs, cluster=CLUSTER, policy=policy, freezes=policy == "icefrog")
        (folder / policy).mkdir(parents=True)
        (folder / policy / "events.jsonl").write_text("".join(f"{ev.encode(record)}\n" for record in records))
        run = fold(records, CLUSTER)
        write_jobs_csv(run, folder / policy / "jobs.csv")
        rows.append(summarise(run, policy=policy, seed=4, wall_s=2.5, decision_s={"mean": 0.001, "max": 0.01}))
    document = summary_document({"source": "test", "load": 1.0}, CLUSTER, rows)
    write_summary(folder / "summary.json", document)
    return document


def test_a_report_of_a_simulation_changes_no_byte_of_its_results(tmp_path: Path) -> None:
    simulation(tmp_path)
    results = [tmp_path / "summary.json", *(tmp_path / p / "jobs.csv" for p in ("fifo", "icefrog"))]
    before = [path.read_bytes() for path in results]
    page = report_dir(tmp_path)
    assert page == tmp_path / "report.html"
    assert [path.read_bytes() for path in results] == before
    first = page.read_bytes()
    assert report_dir(tmp_path).read_bytes() == first


def test_lost_results_come_back_from_the_log(tmp_path: Path) -> None:
    document = simulation(tmp_path)
    kept = (tmp_path / "fifo" / "jobs.csv").read_bytes()
    (tmp_path / "fifo" / "jobs.csv").unlink()
    bare = {**document, "runs": [{"policy": "fifo", "note": "kept"}]}
    (tmp_path / "summary.json").write_text(json.dumps(bare))
    report_dir(tmp_path)
    row = json.loads((tmp_path / "summary.json").read_text())["runs"][0]
    assert row["avg_jct_s"] == document["runs"][0]["avg_jct_s"]  # type: ignore[index]
    assert (row["note"], row["wall_s"]) == ("kept", None)
    assert (tmp_path / "fifo" / "jobs.csv").read_bytes() == kept


def test_one_policys_folder_can_be_reported(tmp_path: Path) -> None:
    simulation(tmp_path)
    loaded = load_dir(tmp_path / "icefrog")
    assert list(loaded.runs) == ["icefrog"]
    assert report_dir(tmp_path / "icefrog") == tmp_path / "icefrog" / "report.html"
    assert not (tmp_path / "icefrog" / "summary.json").exists()
    assert list(load_dir(tmp_path).runs) == ["fifo", "icefrog"]


def home(folder: Path, records: list[ev.AnyRecord]) -> None:
    (folder / "cluster.json").write_text(
        json.dumps({"schema": 1, "cluster": CLUSTER.model_dump(mode="json"), "policy": "icefrog"})
    )
    with SqliteLog(folder / "events.db") as log:
        log.append(records)


def test_the_home_of_a_live_controller(tmp_path: Path) -> None:
    home(tmp_path, generate(seed=2, jobs=4, cluster=CLUSTER, origin_s=1.7e9))
    for _ in range(2):  # the summary it leaves must not hide that this is a home
        assert report_dir(tmp_path).exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["trace"]["first submission"].startswith("2023-11-14")
    assert [run["jobs"] for run in summary["runs"]] == [4]
    assert read(tmp_path / "jobs.csv")["submit_s"].to_list()[0] == 0


def test_a_home_before_the_first_job(tmp_path: Path) -> None:
    home(tmp_path, [])
    assert "No job was submitted" in report_dir(tmp_path).read_text()


def test_a_mixed_cluster_survives_the_summary(tmp_path: Path) -> None:
    cluster = ClusterSpec(nodes=(NodeSpec(gpus=8, count=2, gpu_type="a100"), NodeSpec(gpus=4, gpu_mem_bytes=16e9)))
    (tmp_path / "fifo").mkdir()
    (tmp_path / "fifo" / "events.jsonl").touch()
    row = summarise(fold([], cluster), policy="fifo")
    write_summary(tmp_path / "summary.json", summary_document({}, cluster, [row]))
    assert load_dir(tmp_path).runs["fifo"].cluster == cluster


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: (d / "summary.json").unlink(), "holds neither"),
        (lambda d: (d / "summary.json").write_text("{"), "cannot read"),
        (lambda d: (d / "summary.json").write_text("[]"), "not a JSON object"),
        (lambda d: (d / "summary.json").write_text('{"runs": []}'), "the cluster cannot be read"),
        (lambda d: (d / "fifo" / "events.jsonl").unlink(), "cannot read the event log"),
        (lambda d: (d / "fifo" / "events.jsonl").write_text("{}\n"), "not a record"),
        (lambda d: rewrite(d, [{"policy": "../elsewhere"}]), "'runs' is not a list"),
        (lambda d: rewrite(d, [{"policy": "fifo"}] * 2), "listed twice"),
        (lambda d: shuffle(d / "fifo" / "events.jsonl"), "cannot be replayed|is not a log"),
    ],
)
def test_damage_is_named(tmp_path: Path, break_it: object, message: str) -> None:
    simulation(tmp_path)
    break_it(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        report_dir(tmp_path)


def rewrite(folder: Path, runs: list[dict[str, str]]) -> None:
    document = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**document, "runs": runs}))


def shuffle(path: Path) -> None:
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def test_no_folder() -> None:
    with pytest.raises(UserError, match="no folder") as caught:
        load_dir(Path("nowhere"))
    assert "--out" in caught.value.hint
