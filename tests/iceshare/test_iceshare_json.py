"""The JSON of ``icefrog solve``: to the letter, and nothing but UserError for anything else."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.policies.iceshare import parse_problem, solve

GOOD: dict[str, Any] = {
    "gpus": 4,
    "gpu_mem_bytes": 8e10,
    "jobs": [
        {
            "id": "A",
            "weight": 1.0,
            "current": 2,
            "restart_s": 60,
            "options": [{"gpus": 1, "tta_s": 6000}, {"gpus": 2, "tta_s": 3600}],
            "share": [{"tta_s": 6600, "mem_bytes": 3e10, "util_pct": 42}],
            "must_run": False,
        },
        {
            "id": "B",
            "options": [{"gpus": 1, "tta_s": 6000}],
            "share": [{"tta_s": 6600, "mem_bytes": 3e10, "util_pct": 42}],
        },
    ],
}


def test_round_trip() -> None:
    problem = parse_problem(GOOD)
    assert problem.opt_tta_s.tolist() == [6060.0, 3600.0, 6000.0]  # A holds two GPUs: one GPU costs a restart
    assert problem.shr_tta_s.tolist() == [6660.0, 6600.0]
    answer = json.loads(json.dumps(solve(problem).to_json()))
    assert answer["assignment"] == {"A": {"gpus": 2, "share": 1.0}, "B": {"gpus": 1, "share": 1.0}}
    expected = {
        "min_share",
        "sum_share",
        "bound",
        "gap",
        "gpus_used",
        "assignment",
        "pairs",
        "waiting",
        "method",
        "solve_s",
    }
    assert expected <= answer.keys()
    assert (answer["pairs"], answer["waiting"], answer["method"]) == ([], [], "exact")
    tight = json.loads(json.dumps(solve(parse_problem(GOOD | {"gpus": 1})).to_json()))
    assert tight["pairs"] == [["A", "B"]]
    assert tight["assignment"]["A"]["gpus"] == 0.5
    assert tight["gpus_used"] == 1


def test_memory_may_be_left_out_where_nobody_shares() -> None:
    assert parse_problem({"gpus": 1, "jobs": [{"id": "A", "options": [{"gpus": 1, "tta_s": 1}]}]}).num_jobs == 1


def at(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one key replaced; ``del`` removes it."""
    data = copy.deepcopy(GOOD)
    target: Any = data
    *front, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    for part in front:
        target = target[part]
    if value is REMOVED:
        del target[last]
    else:
        target[last] = value
    return data


REMOVED = object()
BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1, "1", None, True, [], {}, 10**400]
POSITIVE = [
    "gpus",
    "gpu_mem_bytes",
    "jobs/0/weight",
    "jobs/0/options/0/gpus",
    "jobs/0/options/0/tta_s",
    "jobs/0/share/0/tta_s",
]
AMOUNTS = ["jobs/0/restart_s", "jobs/0/share/0/mem_bytes", "jobs/0/share/0/util_pct"]
CASES = [
    *[(path, value) for path in POSITIVE for value in [*BAD_NUMBERS, 0]],
    *[(path, value) for path in AMOUNTS for value in BAD_NUMBERS],
    *[(path, 2.0) for path in ("gpus", "jobs/0/options/0/gpus")],
    *[
        (path, REMOVED)
        for path in ("gpus", "gpu_mem_bytes", "jobs", "jobs/0/id", "jobs/0/options", "jobs/0/options/0/gpus")
    ],
    *[(path, REMOVED) for path in ("jobs/0/options/0/tta_s", "jobs/0/share/0/tta_s", "jobs/0/share/0/mem_bytes")],
    *[(path, 1) for path in ("extra", "jobs/0/extra", "jobs/0/options/0/extra", "jobs/0/share/0/extra")],
    *[("jobs/0/current", value) for value in (3, 0, True, "2", -2, math.nan, 0.25)],
    *[("jobs", value) for value in (None, {}, 3, "x", [1], [None], [[]])],
    *[("jobs/0/options", value) for value in (None, [], {}, [1], "x")],
    *[("jobs/0/share", value) for value in ({}, [1], "x", 3)],
    *[("jobs/0/id", value) for value in ("", 3, None, "B")],
    *[("jobs/0/must_run", value) for value in (0, 1, "yes", None)],
    *[("literal_weights", value) for value in (0, "no", None)],
    ("jobs/0/options/1/gpus", 1),
    ("jobs/0/partner", "B"),
    ("jobs/1/current", 2),
]


@pytest.mark.parametrize(("path", "value"), CASES, ids=lambda x: "removed" if x is REMOVED else repr(x)[:30])
def test_broken_input(path: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        parse_problem(at(path, value))
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert len(caught.value.message) < 200
    if value is not REMOVED and "extra" not in path:
        name = path.split("/")[-1]
        assert (name if not name.isdigit() else "[") in caught.value.message


def test_the_message_names_path_value_and_what_is_allowed() -> None:
    with pytest.raises(UserError) as caught:
        parse_problem(at("jobs/1/options/0/tta_s", -5))
    assert "jobs[1].options[0].tta_s" in caught.value.message
    assert "-5" in caught.value.message
    assert "> 0" in caught.value.hint


def test_values_that_cannot_be_printed() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (10**5000, [10**5000], nested):
        with pytest.raises(UserError) as caught:
            parse_problem(
                at("jobs", REMOVED) | {"jobs": value} if value is not nested else {"gpus": nested, "jobs": []}
            )
        assert len(caught.value.message) < 200


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
PATHS = st.sampled_from(
    [
        "gpus",
        "gpu_mem_bytes",
        "jobs",
        "jobs/0",
        "jobs/1/id",
        "jobs/0/options",
        "jobs/0/options/1",
        "jobs/0/options/0/gpus",
        "jobs/0/options/0/tta_s",
        "jobs/0/share",
        "jobs/0/share/0",
        "jobs/0/share/0/util_pct",
        "jobs/0/current",
        "jobs/0/weight",
        "jobs/0/restart_s",
        "jobs/0/must_run",
        "jobs/1/current",
        "jobs/1/weight",
    ]
)


@settings(max_examples=400)
@given(PATHS, JUNK)
def test_never_anything_but_a_user_error(path: str, junk: Any) -> None:
    try:
        problem = parse_problem(at(path, junk))
    except UserError:
        return
    solve(problem)  # whatever is accepted can be decided


@settings(max_examples=150)
@given(JUNK)
def test_any_json_value_at_all(junk: Any) -> None:
    with pytest.raises(UserError):
        parse_problem(junk)


def test_importing_the_package_is_cheap() -> None:
    """scipy and rustworkx are loaded when a problem needs them, not before."""
    code = (
        "import sys, icefrog.policies.iceshare; print([m for m in ('scipy', 'rustworkx', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
