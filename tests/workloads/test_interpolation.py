"""One number between two of a table: what ``numpy.interp`` gives, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from icefrog.workloads.gradients import interpolated


@pytest.mark.parametrize("points", [1, 2, 3, 11, 64])
def test_it_is_what_numpy_gives(points: int) -> None:
    rng = np.random.default_rng(points)
    for _ in range(200):
        grid, values = np.unique(rng.uniform(-3.0, 3.0, points)), rng.uniform(-30.0, 30.0, points)
        places = [*rng.uniform(-4.0, 4.0, 5), *rng.choice(grid, 2)]
        for at in places:
            expected = float(np.interp(at, grid, values[: len(grid)]))
            assert interpolated(float(at), grid.tolist(), values.tolist()) == expected
