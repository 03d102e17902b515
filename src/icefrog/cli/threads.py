"""How many threads numerical libraries use; to be called before they are loaded, so in a command and not at import."""

from __future__ import annotations

import os


def one_blas_thread() -> None:
    """One thread in this process and in those it starts, unless the user's environment says otherwise.

    A simulation solves systems of a few equations by the thousand (SciPy's triangulation of the Pollux measurements). Waking
    the threads of OpenBLAS for each costs far more than the work, and on a busy machine they wait for each other, spinning:
    90 s of CPU time instead of 3.7 s for 20 jobs on two cores of which one was taken.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # which OpenBLAS asks first
