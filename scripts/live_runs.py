"""Run small training jobs live on this machine, under several policies in turn; each run's event log is its home folder's.

    python scripts/live_runs.py --out runs/live --policies fifo,srtf,icefrog [--demo] [--repeats 2]

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

# name, example, width, seed, accuracy wanted, largest number of epochs, GPU counts, GPUs asked for
_MIX = (
    ("cnn-a", "digits_cnn", 24, 0, 0.95, 30, (1,), 1),
    ("cnn-b", "digits_cnn", 16, 1, 0.95, 40, (1, 2), 2),
    ("former-c", "digits_transformer", None, 2, 0.93, 20, (1,), 1),
    ("cnn-d", "digits_cnn", 24, 3, 0.96, 30, (1, 2), 2),
    ("cnn-e", "digits_cnn", 16, 4, 0.94, 40, (1, 2), 1),
    ("former-f", "digits_transformer", None, 5, 0.95, 25, (1, 2), 1),
    ("cnn-g", "digits_cnn", 32, 6, 0.95, 25, (1,), 1),
)


def mix() -> list[JobSpec]:
    """Seven jobs of half a minute to a minute."""
    specs = []
    for name, example, width, seed, target, epochs, gpus, asked in _MIX:
        size = [] if width is None else ["--width", str(width)]
        fields: dict[str, Any] = {
            "name": name,
            "command": ["python", f"examples/{example}.py", "--epochs", "{max_epochs}", "--seed", str(seed), *size],
            "gpus": gpus,
            "num_gpus": asked,
            "batch": {"global": 64},
            "target": {"value": target},
            "max_epochs": epochs,
        }
        specs.append(JobSpec.model_validate(fields))
    return specs


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; each run gets a home in it")
    parser.add_argument("--policies", default="fifo,srtf,icefrog")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each policy")
    parser.add_argument("--slots", type=int, default=2, help="CPU slots")
    parser.add_argument("--demo", action="store_true", help="the demo's three jobs, all at once, instead of the mix")
    args = parser.parse_args()
    demo = [load_job(path) for path in sorted((ROOT / "examples" / "demo").glob("*.yaml"))]
    specs, gap_s, kind = (demo, 0.0, "demo") if args.demo else (mix(), GAP_S, "mix")
    for repeat in range(1, args.repeats + 1):
        for policy in args.policies.split(","):
            home = Home(args.out.absolute() / f"{kind}-{policy}-{repeat}")
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
    up(home, policy=policy, slots=slots, until_idle=True)
    rest.join()


def _submit_later(home: Home, specs: list[JobSpec], gap_s: float) -> None:
    for spec in specs:
        time.sleep(gap_s)
        submit(home, spec, cwd=ROOT)


if __name__ == "__main__":
    main()
