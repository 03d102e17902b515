"""What each format's reader keeps, what it drops and why, and how it is recognised."""

from __future__ import annotations

import io
import tarfile
from datetime import datetime
from pathlib import Path

import pytest
from logs import HELIOS, KALOS, LOGS, PAI_HEADERS, PAI_JOB, PAI_TASK, PHILLY_JSON, SLURM, write_log, write_pai

from icefrog.errors import UserError
from icefrog.traces import Trace, TraceJob, read_trace, to_specs, write_text
from icefrog.traces.pollux import applications
from icefrog.traces.slurm import parse_tres
from icefrog.workloads import load_catalogue


def by_id(trace: Trace) -> dict[str, TraceJob]:
    return {job.job_id: job for job in trace.jobs}


@pytest.mark.parametrize("format", LOGS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_format_is_recognised_read_converted_and_matched_to_the_catalogue(
    tmp_path: Path, format: str, packed: bool
) -> None:
    path = write_log(tmp_path, format, packed=packed)
    trace = read_trace(path)
    assert format in trace.source
    assert trace == read_trace(path, format)
    own = tmp_path / "own.csv"
    own.write_text(write_text(trace))
    assert read_trace(own, "icefrog-csv").jobs == trace.jobs
    specs = to_specs(trace, load_catalogue()).specs
    assert [spec.job_id for spec in specs] == [job.job_id for job in trace.jobs]
    assert [spec.labels.get("vc", "") for spec in specs] == [job.vc for job in trace.jobs]


def test_philly_json(tmp_path: Path) -> None:
    trace = read_trace(write_log(tmp_path, "philly-json"))
    first, second = trace.jobs
    assert (first.job_id, first.num_gpus, first.duration_s, first.queue_s) == ("application_1_0001", 12, 600.0, 300.0)
    assert (first.user, first.vc, first.state) == ("ce2f30", "ee9e8c", "completed")
    assert (second.submit_s, second.num_gpus, second.duration_s, second.state) == (120.0, 2, 900.0, "cancelled")
    assert trace.start == datetime(2017, 10, 7, 1)
    assert trace.report.read == 10
    assert trace.report.dropped == {
        "not a job": 2,
        "no attempt: GPU count not known": 1,
        "still running at the end of the log": 1,
        "no submission time": 1,
        "unreadable attempt time": 1,
        "attempt without a start or end": 1,
        "0 GPUs": 1,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "line 1: not a JSON list"),
        (PHILLY_JSON[:700], "not a JSON list"),
        ("[{}\n{}]", "line 2: not a JSON list: ',' or ']' is missing"),
        ("[]", "no jobs in it"),
        ("[1] 2", "after the end"),
        ("[" * 100_000, "cannot be decoded"),
        ("[" + "1" * 10_000 + "]", "cannot be decoded"),
        ('[{"jobid": "\\ud800", "attempts": {}}]', "no jobs in it"),
    ],
)
def test_json_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        read_trace(path)


def test_helios(tmp_path: Path) -> None:
    trace = read_trace(write_log(tmp_path, "helios"))
    assert trace.jobs == (
        TraceJob("104", 0.0, 16, 10.0, "u3", "vcB", state="node_fail", queue_s=3600.0),
        TraceJob("101", 39600.0, 8, 3600.0, "u1", "vcA", state="completed", queue_s=30.0),
    )
    assert (trace.start, trace.zone) == (datetime(2020, 4, 1, 23), "")
    assert trace.report.dropped == {
        "unreadable gpu_num": 1,
        "CPU job (0 GPUs)": 1,
        "never started": 1,
        "still running at the end of the log": 1,
        "negative duration": 1,
        "0 s long": 1,
    }
    assert trace.report.examples == {"unreadable gpu_num": "line 7, 'one'"}


def test_acme_seren_compares_instants_and_shows_local_time(tmp_path: Path) -> None:
    trace = read_trace(write_log(tmp_path, "acme"))
    assert trace.source == "trace_seren.csv (acme seren)"
    assert [(j.job_id, j.submit_s, j.num_gpus, j.duration_s) for j in trace.jobs] == [
        ("dlc2", 0.0, 512, 10.0),
        ("dlc1", 30.0, 8, 3600.0),  # not the log's own 1 s
    ]
    assert (trace.start, trace.zone) == (datetime(2023, 3, 1, 0, 0, 30), "+08:00")
    assert {(j.gpu_type, j.kind) for j in trace.jobs} == {("a100-80gb", "SFT"), ("a100-80gb", "Pretrain")}
    assert trace.report.dropped == {"unreadable submit_time": 1, "CPU job (0 GPUs)": 1, "never started": 1}


def test_acme_kalos(tmp_path: Path) -> None:
    path = tmp_path / "trace_kalos.csv"
    path.write_text(KALOS)
    trace = read_trace(path)
    assert trace.source == "trace_kalos.csv (acme kalos)"
    assert [(j.job_id, j.num_gpus, j.duration_s, j.queue_s) for j in trace.jobs] == [
        ("dj1", 16, 3600.0, 5.0),
        ("dj2", 1, 10.0, 5.0),
    ]
    assert (trace.start, trace.zone) == (datetime(2023, 5, 17, 12), "+00:00")


def test_pai_folder(tmp_path: Path) -> None:
    trace = read_trace(write_pai(tmp_path))
    one, two, three = trace.jobs
    assert (three.job_id, three.num_gpus, three.duration_s) == (
        "j8",
        2,
        90.0,
    )  # one of its tasks was never noted as done
    assert one == TraceJob(
        "j1", 0.0, 3, 750.0, "u1", gpu_type="P100+T4", state="completed", gpu_demand=2.25, queue_s=40.0
    )
    assert two == TraceJob("j2", 100.0, 1, 290.0, "u2", gpu_type="MISC", state="failed", gpu_demand=0.25, queue_s=10.0)
    assert one.gpu_s == 2.25 * 750
    assert trace.start is None
    assert trace.report.read == 7 + 10
    assert trace.report.dropped == {
        "task, merged into its job": 9,
        "task without a job in the job table": 1,
        "no task in the task table": 1,
        "CPU job (0 GPUs)": 1,
        "no submission time": 1,
        "still running at the end of the log": 1,
    }


def test_pai_task_table_alone_and_with_its_header_inside(tmp_path: Path) -> None:
    alone = tmp_path / "a"
    alone.mkdir()
    (alone / "pai_task_table.csv").write_text(PAI_TASK)
    inside = tmp_path / "b"
    inside.mkdir()
    (inside / "tasks.csv").write_text(PAI_HEADERS["pai_task_table.header"] + PAI_TASK)
    first, second = read_trace(alone / "pai_task_table.csv"), read_trace(inside / "tasks.csv")
    assert first.jobs == second.jobs
    assert [(j.job_id, j.submit_s, j.state, j.user) for j in first.jobs] == [
        ("j1", 0.0, "completed", ""),
        ("j2", 70.0, "failed", ""),
        ("j5", 170.0, "completed", ""),
        ("j7", 170.0, "completed", ""),
    ]


def test_pai_as_it_is_published_in_tar_archives(tmp_path: Path) -> None:
    for name, text in (("pai_job_table", PAI_JOB), ("pai_task_table", PAI_TASK)):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo(f"{name}.csv")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    whole = tmp_path / "whole"
    whole.mkdir()
    assert read_trace(tmp_path).jobs == read_trace(write_pai(whole)).jobs


def test_a_header_file_of_something_else_is_not_taken_for_the_header(tmp_path: Path) -> None:
    path = write_log(tmp_path, "icefrog-csv")
    path.with_suffix(".header").write_text("x,y\n")
    assert len(read_trace(path)) == 2


def test_pai_job_table_alone_is_not_enough(tmp_path: Path) -> None:
    path = tmp_path / "pai_job_table.csv"
    path.write_text(PAI_JOB)
    with pytest.raises(UserError, match="does not tell the GPUs"):
        read_trace(path)


def test_chronus(tmp_path: Path) -> None:
    trace = read_trace(write_log(tmp_path, "chronus"))
    assert trace.jobs == (
        TraceJob(
            *("1", 1200.0, 4, 1200.0, "vc_b", "b"),
            kind="soft",
            application="mobilenet_v2",
            deadline_s=1800.0,
            rewards=((1800.0, 10.0), (2400.0, 8.0), (3300.0, 5.0)),
        ),
        TraceJob("2", 1800.0, 2, 1800.0, "vc_a", "a", kind="best", application="alexnet"),
        TraceJob(
            *("0", 3000.0, 1, 600.0, "vc_a", "a"),
            kind="strict",
            application="vgg16",
            deadline_s=1500.0,
            rewards=((1500.0, 10.0),),
        ),
    )
    assert trace.start is None
    assert trace.report.dropped == {
        "0 GPUs": 1,
        "unreadable expect_time_list": 1,
        "as many rewards as deadlines are needed": 1,
        "deadline at the submission": 1,
    }
    spec = to_specs(trace, load_catalogue()).specs[0]
    labels = spec.labels
    assert spec.deadline_s == 1800.0
    assert (labels["deadline_s"], labels["rewards"]) == ("1800", "1800.0:10.0;2400.0:8.0;3300.0:5.0")


def test_pollux_names_what_is_trained(tmp_path: Path) -> None:
    trace = read_trace(write_log(tmp_path, "pollux"))
    assert [(j.job_id, j.submit_s, j.application, j.num_replicas, j.batch_size) for j in trace.jobs] == [
        ("ncf-1", 20.25, "ncf", 1, 32768),
        ("bert-3", 40.0, "bert", 12, 384),
        ("cifar10-0", 107.0, "cifar10", 6, 2048),
    ]
    assert trace.report.dropped == {
        "batch not a whole number >= the replicas": 1,
        "application that was not measured": 1,
    }
    specs = {spec.job_id: spec for spec in to_specs(trace, load_catalogue()).specs}
    assert specs["bert-3"].workload == "bert-squad"
    assert specs["bert-3"].batch.initial == 384  # 32 on each of 12: as it is
    assert specs["cifar10-0"].workload == "resnet18-cifar10"
    assert specs["cifar10-0"].batch.initial == 1536  # 2048 cannot be split over 6
    assert specs["ncf-1"].workload is not None  # not in the catalogue: by its GPU time


def test_duration_of_an_application_grows_with_work_and_falls_with_replicas() -> None:
    cifar = applications()["cifar10"]
    assert cifar.duration_s(1, 128) > cifar.duration_s(2, 256) > cifar.duration_s(4, 512) > cifar.duration_s(16, 4096)
    assert cifar.duration_s(1, 2048) > cifar.duration_s(1, 1024) / 2  # accumulates: no speed-up beyond the iterations


@pytest.mark.data
def test_estimated_durations_are_those_of_the_published_runs_that_did_not_wait(data_dir: Path) -> None:
    import json

    published = json.loads((data_dir / "pollux/published_jct.json").read_text())["tiresias"]
    shortest: dict[tuple[str, int, int | None], tuple[float, float]] = {}
    for number in range(1, 7):
        for job in read_trace(data_dir / f"pollux/workloads/workload-{number}.csv").jobs:
            jct_s = published[f"workload-{number}"]["jct_s"][job.job_id]
            key = (job.application, job.num_gpus, job.batch_size)
            shortest[key] = min(shortest.get(key, (1e9, 0.0)), (jct_s, job.duration_s))
    ratios = [
        (jct_s - 30) / duration_s
        for (name, *_), (jct_s, duration_s) in shortest.items()
        if name not in ("imagenet", "yolov3")  # large or seldom: none went without waiting
    ]
    assert len(ratios) == 12
    assert 0.75 < min(ratios) < max(ratios) < 1.2


def test_slurm(tmp_path: Path) -> None:
    trace = read_trace(write_log(tmp_path, "slurm"))
    jobs = by_id(trace)
    assert trace.start == datetime(2024, 1, 2, 6)
    assert list(jobs) == ["1004", "1002_4", "1001", "1008"]
    assert jobs["1001"] == TraceJob(
        *("1001", 7200.0, 4, 90005.0, "ann", "gpu"),
        gpu_type="a100",
        state="completed",
        queue_s=600.0,
        time_limit_s=172800.0,
    )
    sweep = jobs["1002_4"]
    assert (sweep.num_gpus, sweep.gpu_type, sweep.state, sweep.time_limit_s) == (3, "a100+v100", "cancelled", None)
    assert (jobs["1004"].submit_s, jobs["1004"].duration_s) == (0.0, 600.0)  # the run that counts; the first submission
    assert (jobs["1008"].num_gpus, jobs["1008"].duration_s) == (9, 600.0)
    assert trace.report.read == 14
    assert trace.report.dropped == {
        "job step": 2,
        "never started": 1,
        "still running at the end of the log": 1,
        "unreadable elapsed": 1,
        "CPU job (0 GPUs)": 1,
        "line with other cells than the header": 1,
        "row given twice": 1,
        "earlier run of a requeued job": 1,
        "component of a heterogeneous job, merged": 1,
    }
    assert trace.report.examples["line with other cells than the header"] == "line 12"


def test_slurm_with_a_bar_at_the_end_other_columns_and_seconds_since_1970(tmp_path: Path) -> None:
    path = tmp_path / "sacct"
    path.write_text(
        "jobid|account|submit|start|end|timelimitraw|nnodes|reqgres|\n"
        "7|lab|1700000000|1700000060|1700003660|90|2|gpu:a100:4|\n"
        "7|lab|1800000000|1800000060|1800003660|90|2|gpu:4|\n"
        "8|lab|1700000000|Unknown|1700000005|90|1|gpu|\n"
    )
    trace = read_trace(path)
    assert [(j.job_id, j.num_gpus, j.duration_s, j.time_limit_s, j.vc) for j in trace.jobs] == [
        ("7", 8, 3600.0, 5400.0, "lab"),
        ("7.row1", 8, 3600.0, 5400.0, "lab"),  # the counter began again: another job
    ]
    assert trace.jobs[1].submit_s == 1e8
    assert trace.report.dropped == {"never started": 1}


@pytest.mark.parametrize("mark", ["\t", ";", "^"])
def test_slurm_with_another_delimiter(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(SLURM.replace("|", mark))
    assert read_trace(path) == read_trace(write_log(tmp_path, "slurm"))


def test_sacct_in_columns_is_told_how_to_export(tmp_path: Path) -> None:
    path = tmp_path / "sacct"
    path.write_text("JobID           User      State \n------------ --------- ------\n1 a COMPLETED\n")
    with pytest.raises(UserError, match="not separated") as caught:
        read_trace(path)
    assert "--parsable2" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "gpus", "kind"),
    [
        ("billing=8,cpu=8,gres/gpu=4,mem=64G,node=1", 4, None),
        ("gres/gpu:a100=4,gres/gpu=4", 4, "a100"),
        ("gres/gpu:a100=3,gres/gpu:v100=1", 4, "a100+v100"),
        ("gpu:4", 4, None),
        ("gpu:a100:2(S:0-1)", 2, "a100"),
        ("gpu:2(IDX:0,3)", 2, None),
        ("gres:gpu:2", 2, None),
        ("gpu", 1, None),
        ("gres/gpu=0", 0, None),
        ("cpu=8,mem=1G", None, None),
        ("gres/gpumem=80G,gres/gpuutil=50", None, None),
        ("gres/gpu=x", None, None),
        ("", None, None),
    ],
)
def test_tres(text: str, gpus: float | None, kind: str | None) -> None:
    assert parse_tres(text) == (gpus, kind)


def test_ids_that_repeat_or_cannot_be_names_are_made_unique(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    lines = HELIOS.splitlines()
    rows = [lines[1].replace("101,", name, 1) for name in ("a b/c,", "a b/c,", ",", "a-b-c.row1,", "_x,")]
    path.write_text("\n".join([lines[0], *rows]))
    ids = [job.job_id for job in read_trace(path).jobs]
    assert sorted(ids) == sorted(["a-b-c", "a-b-c.row1", "row-2", "a-b-c.row1.row3", "x"])


def test_a_log_is_the_same_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_log(tmp_path, format) for format in LOGS] + [write_pai(tmp_path)]
    whole = [read_trace(path) for path in paths]
    quoted = tmp_path / "quoted.csv"
    quoted.write_text(HELIOS.replace(",u3,", ',"u\n""3,",'))
    whole.append(read_trace(quoted))
    monkeypatch.setattr("icefrog.traces.source.BLOCK_BYTES", 90)
    again = [read_trace(path) for path in [*paths, quoted]]
    assert again == whole
    assert [t.report.examples for t in again] == [t.report.examples for t in whole]


def test_a_slurm_log_of_nothing_but_steps_has_no_jobs(tmp_path: Path) -> None:
    path = tmp_path / "sacct"
    path.write_text("\n".join(line for line in SLURM.splitlines() if line.startswith(("JobID", "1001."))))
    with pytest.raises(UserError, match=r"no jobs in it \(2 rows read, 0 kept; dropped: 2 \(job step\)\)"):
        read_trace(path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "read", "kept", "span_s"),
    [
        ("chronus/trace_job_Philly_MIX1.csv.gz", 30940, 30756, 14 * 86400),
        ("chronus/trace_job_Philly_MIX2.csv.gz", 30940, 30746, 14 * 86400),
        ("sia-workloads/newtrace-3.csv", 960, 960, 48 * 3600),
        ("pollux/workloads/workload-6.csv", 160, 160, 8 * 3600),
    ],
)
def test_public_traces(data_dir: Path, name: str, read: int, kept: int, span_s: float) -> None:
    trace = read_trace(data_dir / name)
    assert (trace.report.read, trace.report.kept) == (read, kept)
    assert 0.97 * span_s < trace.jobs[-1].submit_s < span_s


def test_times_beyond_any_log_cost_their_row_only(tmp_path: Path) -> None:
    header = (
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,"
        "expect_time_list,expect_value_list,best_effort,job_type\n"
    )
    rows = ["0,5,30,60", "1,5,1e308,60", "2,1e300,30,60", "3,5,9e9,60", f"4,5,30,{'9' * 400}", "5,9e9,30,60"]
    lines = [
        f"{i},u,1,{submit},100,resnet50,{duration},30,{due},10,0,strict\n"
        for i, submit, duration, due in (row.split(",") for row in rows)
    ]
    path = tmp_path / "chronus.csv"
    path.write_text(header + "".join(lines))
    trace = read_trace(path)
    assert [job.job_id for job in trace.jobs] == ["0"]
    assert (trace.report.read, sum(trace.report.dropped.values())) == (6, 5)
