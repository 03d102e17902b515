"""A training job without training: standard library only, speaks the report protocol, proves that it runs alone.

``counting_job.py EPOCHS EPOCH_S [FLAG...]``. It locks a file of its own and its devices while it runs; finding one locked
is written to ``violations`` in the home.

Flags: ``silent`` no reports at all, ``stubborn`` ignores every request to stop, ``slow-start`` takes a second to come up,
``child`` keeps a child process in a session of its own, ``gated`` has a step that lasts until there is a file ``gate`` in
the home, ``obeys`` freezes as its grant says, after each step, and reports it.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

epochs, epoch_s, flags = int(sys.argv[1]), float(sys.argv[2]), set(sys.argv[3:])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
job, attempt = os.environ["ICEFROG_JOB_ID"], int(os.environ["ICEFROG_ATTEMPT"])
folder, checkpoints = Path(os.environ["ICEFROG_ATTEMPT_DIR"]), Path(os.environ["ICEFROG_CHECKPOINT_DIR"])
shared_dir = checkpoints.parent.parent  # home/jobs
SAMPLES = 100


def alone(name, how=fcntl.LOCK_EX):
    handle = os.open(shared_dir.parent / f"{name}.test-lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        with (shared_dir.parent / "violations").open("a") as file:
            file.write(f"{job} attempt {attempt} rank {rank}: {name} is taken\n")


def report(kind, **fields):
    if rank or "silent" in flags:
        return
    line = json.dumps({"kind": kind, "time_s": time.time(), **fields}) + "\n"
    handle = os.open(folder / "reports.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, line.encode())
    os.close(handle)


def save(epoch):
    if rank == 0:
        temporary = checkpoints / f"epoch.{attempt}.tmp"
        temporary.write_text(str(epoch))
        temporary.replace(checkpoints / "epoch")
        report("checkpointed", path=str(checkpoints), effective_samples=epoch * SAMPLES)


if "stubborn" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
alone(f"{job}-rank{rank}")
devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
grant = json.loads(os.environ["ICEFROG_GRANT"])
if devices and not grant["shared"]:
    alone(f"device-{devices[rank]}")
if "child" in flags:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if "slow-start" in flags:
    time.sleep(1.0)

least = grant["min_frozen_layers"]
done = int((checkpoints / "epoch").read_text()) if (checkpoints / "epoch").exists() else 0
print(f"rank {rank} of {world}: epoch {done} on", flush=True)
report(
    "started",
    layers=["a", "b"],
    samples_per_epoch=SAMPLES,
    epoch=done,
    effective_samples=done * SAMPLES,
    resumed=done > 0,
    frozen_layers=least,
    min_frozen_layers=least,
)
while done < epochs:
    time.sleep(epoch_s)
    while "gated" in flags and not (shared_dir.parent / "gate").exists():
        time.sleep(0.02)
    told = json.loads((folder / "grant.json").read_text())["min_frozen_layers"]
    if "obeys" in flags and told != least:
        least = told
        report("bounded", frozen_layers=least, min_frozen_layers=least)
    if (folder / "stop").exists() and "stubborn" not in flags:
        save(done)
        report("stopped", effective_samples=done * SAMPLES)
        sys.exit(0)
    done += 1
    save(done)
    seen = done * SAMPLES
    common = {"psi": 1.0, "throughput": 1.0, "step_s": 1.0, "effective_progress": 1.0, "mem_bytes": 1.0, "reason": ""}
    nothing = dict.fromkeys(("variance", "sqr_norm", "util_pct", "profile"))
    counts = {"epoch": done, "step": done, "samples": seen, "metric": done / epochs}
    counts |= {"frozen_layers": least, "min_frozen_layers": least}
    left = {"effective_samples": seen, "remaining_samples": epochs * SAMPLES - seen}
    report("progress", **counts, **left, **common, **nothing)
if rank == 0:
    with (checkpoints / "completions").open("a") as file:
        file.write(f"{attempt}\n")
report("finished", outcome="completed", metric=1.0, effective_samples=epochs * SAMPLES)
