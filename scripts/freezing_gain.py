"""What freezing gains one job of each task by the measured worth, and what the two penalties would choose: a table.

    python scripts/freezing_gain.py [--spread]

E / E(0) with E = worth x throughput, for a prefix that freezes at a progress of 0.12, 0.4 and 0.75: the best depth by the
measured worth (``workloads/frozen_worth.json``), and what the depth that Eq. 3 or the signal's share thinks best is worth by
that table. On the fewest GPUs at the largest local batch, where freezing pays most; ``--spread``: on four times as many,
each with a quarter of it.
"""

from __future__ import annotations

import argparse

import numpy as np

from icefrog.estimate.penalty import frozen_penalty
from icefrog.estimate.progress import offered_worth
from icefrog.estimate.throughput import throughput
from icefrog.profile import FloatArray
from icefrog.workloads import load_catalogue
from icefrog.workloads.catalogue import Workload

STARTS = (0.12, 0.4, 0.75)
GPUS_PER_NODE = 4


def gain(workload: Workload, start: float, spread: int) -> str:
    """Best; Eq. 3's; the signal's: depth and E / E(0) by the measured worth."""
    profile, task = workload.profile, workload.task
    num_gpus = task.gpus.unit * spread
    batch = max(task.local_batch.max // spread, 1)
    nodes = -(-num_gpus // GPUS_PER_NODE)
    depths = range(profile.num_layers)
    speed = np.array([float(throughput(profile, num_gpus, nodes, batch, depth)) for depth in depths])
    curves = workload.curves.bind(profile.num_layers, max(task.batch.min, batch * num_gpus))
    worth = np.array([curves.worth(depth / profile.num_layers, start) for depth in depths])
    believed: tuple[FloatArray, ...] = (
        worth,
        frozen_penalty(curves.variance(start))[:-1],
        offered_worth(curves.signal(start))[:-1],
    )
    chosen = [int(np.argmax(np.nan_to_num(psi) * speed)) for psi in believed]
    return "; ".join(f"{depth}: {worth[depth] * speed[depth] / speed[0]:.2f}" for depth in chosen)


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spread", action="store_true", help="on four times as many GPUs")
    spread = 4 if parser.parse_args().spread else 1
    print("| task | layers | " + " | ".join(f"at {start:.0%}: best; Eq. 3's; the signal's" for start in STARTS) + " |")
    print("|---|---|" + "---|" * len(STARTS))
    for name, workload in load_catalogue().items():
        cells = " | ".join(gain(workload, start, spread) for start in STARTS)
        print(f"| {name} | {workload.profile.num_layers} | {cells} |")


if __name__ == "__main__":
    main()
