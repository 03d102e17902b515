"""What a live profile makes of synchronisation times, which are what is left of a step beside compute."""

from __future__ import annotations

import pytest

from icefrog.runtime.profiling import _fit_sync


@pytest.mark.parametrize("seconds", [{(2, False): [-0.004, -0.006]}, {(2, False): [-0.004], (4, False): [0.002]}])
def test_less_than_nothing_is_nothing(seconds: dict[tuple[int, bool], list[float]]) -> None:
    found = _fit_sync(seconds, prior_s=0.5)
    assert found.intra_alpha_s == found.inter_alpha_s == pytest.approx(0.0)
    assert found.intra_beta_s >= 0.0


def test_what_was_measured_is_kept() -> None:
    found = _fit_sync({(2, False): [0.01, 0.03]}, prior_s=0.5)
    assert found.intra_alpha_s == pytest.approx(0.02)
