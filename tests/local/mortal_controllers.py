"""Runs controllers of a home that die, one after the other, until one lives to see all jobs finished.

``mortal_controllers.py HOME random SEED KILLS``: each is killed (SIGKILL) after a random time; the one after the last kill
lives. ``mortal_controllers.py HOME steps``: the k-th one kills itself at its k-th step, where a step is the time before or
after something is written, started or asked for; until one has fewer steps to do than it may.

Each controller is a fork of this process, so that starting one costs nothing. Prints how many died.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from icefrog import live
from icefrog.eventlog import SqliteLog
from icefrog.executors.local import Devices, LocalExecutor
from icefrog.executors.local.attempts import Attempt
from icefrog.types import Plan, Pricing

NUM_SLOTS = 3
BEAT_S = 0.7


class Restless:
    """Changes its mind every beat: who runs, and on how many GPUs. A function of the time alone, as a policy has to be."""

    name = "restless"
    source = "a test"
    oracle = False
    pricing = Pricing()

    def decide(self, snapshot, candidates):
        beat = int(snapshot.now_s / BEAT_S)
        jobs = sorted(snapshot.jobs, key=lambda job: job.job_id)
        order = [jobs[(i + beat) % len(jobs)] for i in range(len(jobs))]
        free, choices = snapshot.cluster.num_gpus, {}
        for i, job in enumerate(order):
            wanted = 1 + (beat + i) % 2
            option = next(c for c in candidates[job.job_id] if c.config.num_gpus == wanted)
            if wanted <= free:
                free -= wanted
                choices[job.job_id] = option
        return Plan(choices=choices, reasons={job.job_id: f"beat {beat}" for job in jobs})


def run_controller(home):
    live.make_policy = lambda name, options: Restless()
    live.devices_of = lambda cluster: Devices(tuple(str(i) for i in range(NUM_SLOTS)))
    live.up(home, policy="fifo", slots=NUM_SLOTS, round_s=0.2, poll_s=0.02, until_idle=True)


def die_at_step(last):
    """Make this process kill itself at its ``last``-th step."""
    left = last

    def step():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def between(owner, name):
        original = getattr(owner, name)

        def stepping(*args, **kwargs):
            step()
            result = original(*args, **kwargs)
            step()
            return result

        setattr(owner, name, stepping)

    between(SqliteLog, "append")
    between(LocalExecutor, "submit")
    for name in ("create", "spawn", "write_grant", "ask_stop"):
        between(Attempt, name)


def fork(home, prepare=lambda: None):
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            run_controller(home)
        except BaseException as error:
            print(f"controller failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def killed(pid):
    """Wait for it; whether it was killed. Anything else but a good end ends all."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        sys.exit(1)
    return False


def main():
    home, mode = live.Home(Path(sys.argv[1])), sys.argv[2]
    deaths = 0
    if mode == "random":
        rng, kills = random.Random(int(sys.argv[3])), int(sys.argv[4])
        for _ in range(kills):
            pid = fork(home)
            time.sleep(rng.choice((0.03, 0.1, 0.3, 0.6)) * rng.uniform(0.5, 1.5))
            os.kill(pid, signal.SIGKILL)
            deaths += killed(pid)
        killed(fork(home))
    else:
        while killed(fork(home, partial(die_at_step, deaths + 1))):
            deaths += 1
    print(deaths)


main()
