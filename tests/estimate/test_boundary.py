"""The guards around the Layer Tuner."""

from __future__ import annotations

import pytest

from icefrog.estimate.boundary import Guards, Standing, dwells, imposed_depth, is_worth_moving

GUARDS = Guards(warmup_share=0.1, hysteresis=0.05, dwell_steps=20, stall_patience=3)
PAPER = Guards(0, 0, 0, 0)


def standing(frozen: int = 0, least: int = 0, share_done: float = 0.5, steps: float = 100.0, **more: bool) -> Standing:
    return Standing(frozen, least, share_done, steps, **more)


@pytest.mark.parametrize(
    ("now", "imposed"),
    [
        (standing(share_done=0.05), 0),  # warm-up
        (standing(share_done=0.1), None),  # over
        (standing(share_done=0.05, frozen=3), None),  # a job that freezes already goes on
        (standing(share_done=0.05, least=2), None),  # a sharer must fit beside its partner
        (standing(frozen=3, held_open=True), 0),
        (standing(frozen=3, held_open=True, least=2), None),
    ],
)
def test_what_is_imposed(now: Standing, imposed: int | None) -> None:
    found = imposed_depth(GUARDS, now)
    assert (None if found is None else found[0]) == imposed


def test_a_move_must_gain_more_than_the_hysteresis() -> None:
    assert not is_worth_moving(GUARDS, 105.0, 100.0)
    assert is_worth_moving(GUARDS, 105.1, 100.0)
    assert is_worth_moving(PAPER, 100.1, 100.0)


@pytest.mark.parametrize(
    ("now", "depth", "waits"),
    [
        (standing(frozen=2, steps=19), 3, True),
        (standing(frozen=2, steps=20), 3, False),
        (standing(frozen=2, steps=0), 2, False),  # no move at all
        (standing(frozen=4, steps=0, least=2), 2, False),  # to what is demanded, always
    ],
)
def test_a_boundary_dwells(now: Standing, depth: int, waits: bool) -> None:
    assert dwells(GUARDS, now, depth) == waits
    assert not dwells(PAPER, now, depth)
