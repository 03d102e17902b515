"""Measures how the *signal* splits over layers and training progress: what the rule ``progress`` goes by, at small scale.

The networks of ``split_tasks.py`` train whole; every 12 steps a fresh :class:`icefrog.runtime.rules.signal.SignalMeter`
tells G . P G of every unit (P: the optimizer's preconditioner), from 11 pairs of successive gradients. Shares are averaged
over the seeds. The result is src/icefrog/workloads/signal_split.json, a *proxy* for larger networks. Each finished run is a
file in the work folder, so that a stopped measurement resumes.

The environment and the data are those of ``measure_layer_split.py`` (about 20 minutes of one core for everything):

    OMP_NUM_THREADS=1 python scripts/measure_signal_split.py --data DATA --work WORK --seeds 0 1 2
    python scripts/measure_signal_split.py --work WORK --write      # puts together what is there
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure_layer_split import train
from split_tasks import STUDIES, TASKS, Task

from icefrog.profile import FloatArray
from icefrog.runtime import LayerElastic
from icefrog.runtime.rules.base import Hands
from icefrog.runtime.rules.signal import SignalMeter

OUTPUT = Path(__file__).parents[1] / "src/icefrog/workloads/signal_split.json"
WINDOW = 12
"""Steps of one meter: as many as it measures one after the other."""
GRID = 11
AROUND = 0.2
"""Progress to either side of a point of the grid: late in a training the signal of one window is mostly noise."""
FAMILIES = ("cnn", "cnn-adam", "finetune")
PLANS = ("resnet18 1/8", "resnet18 1/2", "resnet34 1/8", "mobilenetv2 1/4")


class Windows:
    """A meter after the other, each for WINDOW steps of a training."""

    def __init__(self) -> None:
        self._meter = SignalMeter()
        self._step = 0
        self.rows: list[tuple[float, list[float]]] = []  # middle of the window, steps; G . P G by unit

    def at_step(self, step: int, elastic: LayerElastic) -> None:
        """For :func:`measure_layer_split.train`: look on between backward pass and update, from the first step on."""
        if step == 0:
            elastic.optimizer.register_step_pre_hook(lambda *_args: self._look(elastic))

    def _look(self, elastic: LayerElastic) -> None:
        self._step += 1  # from 1: a meter looks for what had been learnt before step 0 only
        self._meter.observe(Hands(self._step, elastic.model, elastic.layers, 0, elastic.optimizer))
        if self._step % WINDOW == 0:
            signal = self._meter.progress()
            if signal is not None:
                self.rows.append((self._step - WINDOW / 2, signal))
            self._meter = SignalMeter()


def measure(name: str, task: Task, seed: int, data: Path, work: Path) -> None:
    """One training; what is on disk already is not repeated."""
    path = work / f"{name.replace('/', '_')}-seed{seed}.json"
    if path.exists():
        return
    windows = Windows()
    train(task, task.data(data, seed), seed, at_step=windows.at_step)
    rows = [{"progress": middle / task.steps, "signal": signal} for middle, signal in windows.rows]
    path.write_text(json.dumps(rows))
    print(f"{name} seed {seed}: {len(rows)} windows", flush=True)


def on_grid(rows: list[dict[str, Any]]) -> FloatArray:
    """Shares by unit at GRID equal distances of progress, (GRID, U), of the mean signal of the windows around."""
    at = np.array([row["progress"] for row in rows])
    signal = np.array([row["signal"] for row in rows])
    around = np.array([signal[np.abs(at - here) <= AROUND].mean(axis=0) for here in np.linspace(0, 1, GRID)])
    return np.asarray(around / around.sum(axis=1, keepdims=True))


def family(name: str, task: Task, work: Path) -> dict[str, Any] | None:
    """Means over the seeds that are there."""
    files = sorted(work.glob(f"{name.replace('/', '_')}-seed*.json"))
    if not files:
        return None
    curves = np.array([on_grid(json.loads(file.read_text())) for file in files])
    mean = curves.mean(axis=0)
    behind_half = curves[:, :, curves.shape[2] // 2 :].sum(axis=2).mean(axis=1)
    print(f"{name}: share behind half of the units, by seed: {', '.join(f'{x:.2f}' for x in behind_half)}")
    for row in (1, 5, 9):
        behind = [mean[row, round(share * mean.shape[1]) :].sum() for share in (0.25, 0.5, 0.75)]
        print(f"  at {row / (GRID - 1):.0%}, behind 25 / 50 / 75 %: " + " / ".join(f"{x:.2f}" for x in behind))
    return {"network": task.note, "seeds": len(files), "signal_share": np.round(mean, 5).tolist()}


def write(work: Path) -> None:
    """Put together what is in the work folder."""
    known = {**TASKS, **STUDIES}
    found = {name: family(name, known[name], work) for name in (*FAMILIES, *PLANS)}
    table = {
        "schema": 1,
        "about": "written by scripts/measure_signal_split.py; rows: 11 points of progress, columns: units in forward order, "
        "shares of G . P G; marked proxy for larger networks",
        "provenance": "proxy",
        "families": {name: found[name] for name in FAMILIES if found[name]},
        "studies": {name: found[name] for name in PLANS if found[name]},
    }
    text = json.dumps(table, separators=(",", ":"))
    OUTPUT.write_text(text.replace('{"network"', '\n{"network"') + "\n")


def main() -> None:
    """Measure, or put together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--data", type=Path, help="folder of the unpacked data packages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES, *PLANS], help="measure these only")
    parser.add_argument("--write", action="store_true", help="measure nothing: write signal_split.json")
    args = parser.parse_args()
    if args.write:
        write(args.work)
        return
    if args.data is None:
        parser.error("--data is needed to measure")
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name in args.only or (*FAMILIES, *PLANS):
            measure(name, {**TASKS, **STUDIES}[name], seed, args.data, args.work)


if __name__ == "__main__":
    main()
