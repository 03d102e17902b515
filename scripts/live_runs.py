"""Run small training jobs live on this machine, under several policies in turn; each run's event log is its home folder's.

    python scripts/live_runs.py --out runs/live --policies fifo,srtf,icefrog [--jobs mix|stretched|demo] [--repeats 2]

``scripts/live_against_simulated.py`` compares such runs with their simulations. Jobs arrive while others run, at the same
gaps in every run. A home that exists is passed over: a broken-off series goes on with the same command (remove its last
home).
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

from icefrog.live import Home, submit, up
from icefrog.spec import JobSpec
from icefrog.specfile import load_job

ROOT = Path(__file__).resolve().parent.parent
GAP_S = 8.0
"""Between two submissions: less than a job takes, so that the cluster is never idle."""

# name, script, options, accuracy wanted, largest number of epochs, GPU counts, GPUs asked for
_CNN, _FORMER, _STRETCHED = "examples/digits_cnn.py", "examples/digits_transformer.py", "scripts/stretched_digits.py"
_MIX = (
    ("cnn-a", _CNN, "--seed 0", 0.95, 30, (1,), 1),
    ("cnn-b", _CNN, "--seed 1 --width 16", 0.95, 40, (1, 2), 2),
    ("former-c", _FORMER, "--seed 2", 0.93, 20, (1,), 1),
    ("cnn-d", _CNN, "--seed 3", 0.96, 30, (1, 2), 2),
    ("cnn-e", _CNN, "--seed 4 --width 16", 0.94, 40, (1, 2), 1),
    ("former-f", _FORMER, "--seed 5", 0.95, 25, (1, 2), 1),
    ("cnn-g", _CNN, "--seed 6 --width 32", 0.95, 25, (1,), 1),
)
_STRETCHED_MIX = (
    ("wide-a", _STRETCHED, "--seed 0 --width 16", 0.95, 15, (1,), 1),
    ("two-b", _STRETCHED, "--seed 1", 0.93, 20, (1, 2), 2),
    ("one-c", _STRETCHED, "--seed 2", 0.90, 10, (1,), 1),
    ("two-d", _STRETCHED, "--seed 3 --width 16", 0.95, 15, (1, 2), 2),
    ("one-e", _STRETCHED, "--seed 4", 0.93, 12, (1, 2), 1),
    ("one-f", _STRETCHED, "--seed 5", 0.95, 20, (1, 2), 1),
    ("wide-g", _STRETCHED, "--seed 6 --width 16", 0.93, 10, (1,), 1),
)


def job(row: tuple[str, str, str, float, int, tuple[int, ...], int]) -> JobSpec:
    """One job of a table above."""
    name, script, options, target, epochs, gpus, asked = row
    fields: dict[str, Any] = {
        "name": name,
        "command": ["python", script, "--epochs", "{max_epochs}", *options.split()],
        "gpus": gpus,
        "num_gpus": asked,
        "batch": {"global": 64},
        "target": {"value": target},
        "max_epochs": epochs,
    }
    return JobSpec.model_validate(fields)


def jobs(kind: str) -> tuple[list[JobSpec], float]:
    """The jobs, and seconds between their submissions."""
    if kind == "demo":
        return [load_job(path) for path in sorted((ROOT / "examples" / "demo").glob("*.yaml"))], 0.0
    return [job(row) for row in (_MIX if kind == "mix" else _STRETCHED_MIX)], GAP_S


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; each run gets a home in it")
    parser.add_argument("--policies", default="fifo,srtf,icefrog")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each policy")
    parser.add_argument("--slots", type=int, default=2, help="CPU slots")
    parser.add_argument(
        "--jobs",
        choices=["mix", "stretched", "demo"],
        default="mix",
        help="seven small jobs; seven that notice a busy machine less; the demo's three, all at once",
    )
    args = parser.parse_args()
    specs, gap_s = jobs(args.jobs)
    for repeat in range(1, args.repeats + 1):
        for policy in args.policies.split(","):
            home = Home(args.out.absolute() / f"{args.jobs}-{policy}-{repeat}")
            if home.db.exists():
                print(f"{home.path.name}: there already", flush=True)
                continue
            begin = time.perf_counter()
            run(home, specs, policy, args.slots, gap_s)
            print(f"{home.path.name}: {time.perf_counter() - begin:.0f} s", flush=True)


def run(home: Home, specs: list[JobSpec], policy: str, slots: int, gap_s: float) -> None:
    """One live run to its end; the first job is there when the controller starts."""
    submit(home, specs[0], cwd=ROOT)
    rest = threading.Thread(target=_submit_later, args=(home, specs[1:], gap_s))
    rest.start()
    result = up(home, policy=policy, slots=slots, until_idle=True)
    rest.join()
    if result.why == "signal":
        raise SystemExit(130)


def _submit_later(home: Home, specs: list[JobSpec], gap_s: float) -> None:
    for spec in specs:
        time.sleep(gap_s)
        submit(home, spec, cwd=ROOT)


if __name__ == "__main__":
    main()
