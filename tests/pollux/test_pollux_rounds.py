"""What a round sees: jobs as the steps before it have left them. By hand, on an invented application."""

from __future__ import annotations

from pathlib import Path
from shutil import copy

from invented import trace, write

from icefrog import events as ev
from icefrog.executors.sim.pollux.scenario import pollux_scenario, pollux_settings
from icefrog.simulate import RunResult, simulate
from icefrog.testing.builders import cluster
from icefrog.traces.trace import ReadReport, Trace, TraceJob


def run(folder: Path, jobs: Trace, policy: str, **options: object) -> RunResult:
    settings = pollux_settings(restart_s=31.0)
    scenario, _ = pollux_scenario(jobs, cluster(2, 4), folder, settings)
    return simulate(scenario, policy, options, settings)


def starts(result: RunResult, job_id: str) -> list[tuple[float, int]]:
    return [(r.time_s, len(r.gpus)) for r in result.records if isinstance(r, ev.Start) and r.job_id == job_id]


# 24 samples on one GPU are 12 twice, 0.24 s a step; the scale is 3, the gains 2 / (4/3) and 3 / (5/3). Seen at 60 s, the job
# restarts until 91 s; the first epoch takes 16 s, the second 13.33 s. At 120 s 1/3 s is missing, which rounds to nothing.
ENDS_AT_120_S = (0.0, 1, 24)
WHOLE_CLUSTER = (100.0, 8, 32)


def test_a_job_that_ends_as_a_step_begins_is_still_there_in_that_round(tmp_path: Path) -> None:
    result = run(write(tmp_path), trace(ENDS_AT_120_S, WHOLE_CLUSTER), "tiresias")
    assert result.state.jobs["bert-0"].finish_s == 120.0
    assert starts(result, "bert-1") == [(180.0, 8)]


def test_that_round_may_take_its_gpus(tmp_path: Path) -> None:
    """Demoted at 120 s (60 GPU-seconds), it makes way; later it restarts only to find that nothing is left to do."""
    jobs = trace(ENDS_AT_120_S, WHOLE_CLUSTER)
    result = run(write(tmp_path), jobs, "tiresias", thresholds_gpu_h=(60 / 3600,))
    (first, _), (again, _) = starts(result, "bert-0")
    assert first == 60.0
    assert starts(result, "bert-1")[0] == (120.0, 8)
    assert again > 120.0
    assert result.state.jobs["bert-0"].finish_s == again + 31.0


def test_optimus_gives_ncf_one_gpu_whatever_was_requested(tmp_path: Path) -> None:
    data = write(tmp_path, "ncf")
    for epoch_file in (data / "pollux" / "ncf").glob("validation-*.csv"):
        epoch_file.write_text(
            epoch_file.read_text() + "".join(f"{100 * epoch}.5,{100 * epoch},0.5,1.0,2.0\n" for epoch in range(3, 11))
        )
    copy(data / "pollux" / "ncf" / "validation-32.csv", data / "pollux" / "ncf" / "validation-32768.csv")
    jobs = Trace((TraceJob("ncf-0", 0.0, 2, 1.0, application="ncf", batch_size=32),), ReadReport(1, 1), "invented")
    assert [gpus for _, gpus in starts(run(data, jobs, "optimus"), "ncf-0")] == [1]
    for rigid in ("tiresias", "fifo", "lucid", "lucid+"):
        assert [gpus for _, gpus in starts(run(data, jobs, rigid), "ncf-0")] == [2], rigid
