"""How fast job logs are read: rows a minute on one core, and the ratio to Python's own parser on the same file.

    python benchmarks/bench_traces.py [--rows 200000] [--quick]

The logs are generated (seeded, invented). Two rivals: ``split`` only splits lines into dictionaries (``csv.DictReader``;
``json.load`` for JSON) and makes nothing of them; ``plain`` is the loop one would write by hand: the same, then its times
and numbers converted, then a job made of each row. Ours checks, accounts for every row, and returns the jobs in order.
Best of three, one process, one thread, CPU time.
"""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # before polars is loaded: one core

import argparse
import csv
import json
import resource
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl

from icefrog.traces import TraceJob, read_trace, trace_formats

NEEDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "icefrog-csv": ((), ("num_gpus", "submit_s", "duration_s")),
    "philly-csv": (("timestamp",), ("num_gpus", "duration")),
    "helios": (("submit_time", "start_time", "end_time"), ("gpu_num",)),
    "pai": ((), ("inst_num", "plan_gpu", "start_time", "end_time")),
    "acme": (("submit_time", "start_time", "end_time"), ("gpu_num",)),
    "chronus": ((), ("num_gpu", "submit_time", "duration")),
    "pollux": ((), ("num_replicas", "time", "batch_size")),
    "slurm": (("Submit", "Start", "End"), ("JobID",)),
}
"""Times and numbers of each format that the plain loop converts."""
START = np.datetime64("2023-03-01T00:00:00")


def columns(rows: int) -> dict[str, np.ndarray]:
    """What every log is made of."""
    rng = np.random.default_rng(0)
    submit = np.sort(rng.integers(0, 180 * 86400, rows))
    return {
        "submit": submit,
        "start": submit + rng.integers(0, 3600, rows),
        "length": np.ceil(np.exp(rng.normal(6, 2, rows))).astype(np.int64),
        "gpus": rng.choice([0, 1, 1, 1, 2, 4, 8, 16], rows),
        "user": rng.integers(0, 300, rows),
        "vc": rng.integers(0, 20, rows),
        "failed": rng.random(rows) < 0.2,
    }


def frame(format: str, c: dict[str, np.ndarray]) -> pl.DataFrame:
    """The log as a table of one format."""
    rows = len(c["submit"])
    index, end = np.arange(rows), c["start"] + c["length"]
    stamp = {name: _stamps(values) for name, values in (("submit", c["submit"]), ("start", c["start"]), ("end", end))}
    user, vc = np.char.add("u", c["user"].astype(str)), np.char.add("vc", c["vc"].astype(str))
    state = np.where(c["failed"], "FAILED", "COMPLETED")
    helios = {
        **{"job_id": index, "user": user, "vc": vc, "gpu_num": c["gpus"], "cpu_num": c["gpus"] * 4, "node_num": 1},
        **{"state": state, "submit_time": stamp["submit"], "start_time": stamp["start"], "end_time": stamp["end"]},
        **{"duration": c["length"], "queue": c["start"] - c["submit"]},
    }
    if format == "helios":
        return pl.DataFrame(helios)
    if format == "acme":
        zoned = {f"{name}_time": np.char.add(text, "+08:00") for name, text in stamp.items()}
        kind = np.where(c["failed"], "Debug", "Eval")
        return pl.DataFrame({**{k: v for k, v in helios.items() if k != "vc"}, "type": kind, **zoned, "gpu_time": 0})
    if format == "philly-csv":
        gpu_time = c["length"] * c["gpus"]
        return pl.DataFrame(
            {
                "timestamp": stamp["submit"],
                "duration": c["length"],
                "num_gpus": c["gpus"],
                "gpu_time": gpu_time,
                "cluster": vc,
            }
        )
    if format == "icefrog-csv":
        gpus = np.maximum(c["gpus"], 1)
        return pl.DataFrame(
            {
                "job_id": index,
                "submit_s": c["submit"],
                "num_gpus": gpus,
                "duration_s": c["length"],
                "user": user,
                "vc": vc,
            }
        )
    if format == "pai":
        return pl.DataFrame(
            {
                **{"job_name": np.char.add("job", (index // 2).astype(str)), "task_name": "worker", "inst_num": 2.0},
                **{"status": np.where(c["failed"], "Failed", "Terminated"), "start_time": c["start"] + 1.0},
                **{"end_time": end + 1.0, "plan_cpu": 600.0, "plan_mem": 29.3, "plan_gpu": c["gpus"] * 50.0},
                "gpu_type": "T4",
            }
        )
    if format == "chronus":
        return pl.DataFrame(
            {
                **{
                    "job_id": index,
                    "user": vc,
                    "num_gpu": c["gpus"],
                    "submit_time": c["submit"] // 60,
                    "iterations": 9,
                },
                **{"model_name": "vgg16", "duration": c["length"], "interval": 5, "best_effort": 0, "job_type": "soft"},
                **{"expect_time_list": _lists(c["length"]), "expect_value_list": "10-8-5"},
            }
        )
    if format == "pollux":
        return pl.DataFrame(
            {
                **{"name": np.char.add("bert-", index.astype(str)), "time": c["submit"], "application": "bert"},
                **{"num_replicas": np.maximum(c["gpus"], 1), "batch_size": 384},
            }
        )
    assert format == "slurm"
    tres = np.char.add("billing=8,cpu=8,gres/gpu=", c["gpus"].astype(str))
    clock = np.char.add((c["length"] // 3600).astype(str), ":10:05")
    iso = {name: np.char.replace(text, " ", "T") for name, text in stamp.items()}
    return pl.DataFrame(
        {
            **{"JobID": index, "JobName": "train", "User": user, "Partition": vc, "Submit": iso["submit"]},
            **{"Start": iso["start"], "End": iso["end"], "Elapsed": clock, "State": state, "AllocTRES": tres},
        }
    )


def philly_json(c: dict[str, np.ndarray]) -> str:
    """Philly's JSON log."""
    end = _stamps(c["start"] + c["length"])
    submit, start = _stamps(c["submit"]), _stamps(c["start"])
    jobs = [
        {
            **{"status": "Pass", "vc": f"vc{c['vc'][i]}", "jobid": f"application_{i}", "user": f"u{c['user'][i]}"},
            "attempts": [
                {
                    **{"start_time": str(start[i]), "end_time": str(end[i])},
                    "detail": [{"ip": "m1", "gpus": [f"gpu{g}" for g in range(int(c["gpus"][i]))]}],
                }
            ],
            "submitted_time": str(submit[i]),
        }
        for i in range(len(submit))
    ]
    return json.dumps(jobs, indent=1)


def write(folder: Path, format: str, rows: int) -> Path:
    """Generate the log of one format."""
    path = folder / ("pai_task_table.csv" if format == "pai" else f"{format}.log")
    if format == "philly-json":
        path.write_text(philly_json(columns(rows)))
    else:
        frame(format, columns(rows)).write_csv(path, separator="|" if format == "slurm" else ",")
    return path


def split(path: Path, format: str) -> int:
    """Python's own parser of the same file."""
    with path.open(newline="") as file:
        if format == "philly-json":
            return len(json.load(file))
        return sum(1 for _ in csv.DictReader(file, delimiter="|" if format == "slurm" else ","))


def plain(path: Path, format: str) -> list[TraceJob]:
    """The loop one would write by hand; without any check."""
    times, numbers = NEEDED[format]
    jobs = []
    with path.open(newline="") as file:
        for index, row in enumerate(csv.DictReader(file, delimiter="|" if format == "slurm" else ",")):
            at = [datetime.fromisoformat(row[name]).timestamp() for name in times]
            values = [float(row[name]) for name in numbers]
            jobs.append(
                TraceJob(str(index), (at or values)[0], int(values[0]), (at or values)[-1], row.get("user", ""))
            )
    return jobs


def best_s(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest run (others may use the machine)."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def _stamps(seconds: np.ndarray) -> np.ndarray:
    return np.char.replace((START + seconds.astype("timedelta64[s]")).astype(str), "T", " ")


def _lists(length: np.ndarray) -> np.ndarray:
    first = length * 2
    return np.char.add(
        np.char.add(first.astype(str), "-"),
        np.char.add((first + 30).astype(str), np.char.add("-", (first + 90).astype(str))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="20,000 rows, one repeat")
    args = parser.parse_args()
    rows, repeats = (20_000, 1) if args.quick else (args.rows, 3)
    print(f"{rows:,} rows, {os.environ['POLARS_MAX_THREADS']} thread")
    print(f"{'format':12} {'MB':>6} {'jobs':>9} {'read s':>8} {'M rows/min':>11} {'split/ours':>10} {'plain/ours':>10}")
    with tempfile.TemporaryDirectory() as name:
        for format in (f.name for f in trace_formats()):
            path = write(Path(name), format, rows)
            trace = read_trace(path, format)
            assert trace.report.read == rows
            read_s = best_s(lambda path=path, format=format: read_trace(path, format), repeats)
            split_s = best_s(lambda path=path, format=format: split(path, format), repeats)
            line = f"{format:12} {path.stat().st_size / 1e6:6.1f} {len(trace):9,} {read_s:8.2f}"
            line += f" {rows / read_s * 60 / 1e6:11.2f} {split_s / read_s:9.2f}x"
            if format in NEEDED:
                plain_s = best_s(lambda path=path, format=format: plain(path, format), repeats)
                line += f" {plain_s / read_s:9.2f}x"
            print(line)
            path.unlink()
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
