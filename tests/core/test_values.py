"""Values and copies that are made fast are what the slow ones are."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from icefrog.copying import copied
from icefrog.estimate.full_layers import full_step_s, full_steps_s
from icefrog.testing.builders import job_spec, profile
from icefrog.types import Config


def test_a_value_is_compared_hashed_replaced_and_pickled_by_its_fields() -> None:
    one = Config(num_gpus=2, batch_per_gpu=8)
    assert one == Config(2, 8)
    assert one != replace(one, accum_steps=2)
    assert len({one, Config(2, 8)}) == 1
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.other = 1  # type: ignore[attr-defined]


def test_a_copy_is_what_pydantic_makes_and_as_frozen() -> None:
    spec = job_spec("a")
    fast = copied(spec, spec.__dict__ | {"weight": 2.0})
    assert fast == spec.model_copy(update={"weight": 2.0})
    assert fast.model_dump_json() == spec.model_copy(update={"weight": 2.0}).model_dump_json()
    assert copy.deepcopy(fast) == pickle.loads(pickle.dumps(fast)) == fast
    assert spec.weight == 1.0
    with pytest.raises(ValueError, match="frozen"):
        fast.weight = 3.0  # type: ignore[misc]


def test_several_splits_of_a_batch_take_what_each_takes() -> None:
    job, splits = profile(), ((64, 1), (32, 2), (16, 4))
    assert full_steps_s(job, 4, 2, splits) == [full_step_s(job, 4, 2, m, k) for m, k in splits]
