"""Plain arithmetic gives what the arrays give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.candidates import candidates
from icefrog.estimate.full_layers import full_step_s
from icefrog.estimate.throughput import step_s
from icefrog.profile import ComputeCurve, SyncCurve, ThroughputParams, altered
from icefrog.testing import builders as b
from icefrog.types import Config, JobView, Pricing

seconds = st.floats(0.0, 10.0)
exponents = st.sampled_from([1.0, 1.5, 4.0])
params = st.builds(
    ThroughputParams,
    fwd=st.builds(ComputeCurve, alpha_s=seconds, beta_s=seconds, smooth=exponents),
    bwd=st.builds(ComputeCurve, alpha_s=seconds, beta_s=seconds, smooth=exponents),
    sync=st.builds(
        SyncCurve,
        intra_alpha_s=seconds,
        intra_beta_s=seconds,
        inter_alpha_s=seconds,
        inter_beta_s=seconds,
        pair_beta_s=seconds,
    ),
    overlap_gamma=exponents,
    flop_alpha_s=seconds,
    straggler=st.floats(0.0, 1.0),
    sync_alpha_s=seconds,
)


@given(params=params, gpus=st.integers(1, 64), nodes=st.integers(1, 4), m=st.integers(1, 512), k=st.integers(1, 4))
def test_one_number_is_the_number_in_the_array(params, gpus, nodes, m, k):
    profile = b.profile(3, throughput=params)
    expected = float(step_s(profile, gpus, nodes, m, 0, k))
    assert full_step_s(profile, gpus, nodes, m, k) == pytest.approx(expected, rel=1e-12)


def view(spec, profile, config=None):
    return JobView(
        spec=spec, profile=profile, submit_s=0.0, gpus=b.gpus(config.num_gpus) if config else (), shared=False,
        running=config is not None, config=config, effective_samples=0.0, remaining_samples=5000.0, frozen_layers=0,
        stats=None, attained_gpu_s=0.0, holding_since_s=None, waiting_since_s=0.0, restart_s=60.0, num_restarts=0,
    )  # fmt: skip


@given(
    request=st.sampled_from([1, 2, 4, 8]),
    batch=st.sampled_from([16, 64, 256, 1024]),
    largest=st.sampled_from([8, 32, 256]),
    share=st.booleans(),
    running=st.booleans(),
)
def test_rigid_pricing_is_the_part_of_all_pricing_that_rigid_policies_read(request, batch, largest, share, running):
    counts = (1, 2, 4, 8)
    spec = b.job_spec("a", gpus=counts, num_gpus=request, batch={"global": batch}, share=share)
    profile = b.profile(4, max_local_batch=largest)
    cluster = b.cluster(2, 4)
    first = candidates(view(spec, profile), cluster, 50.0, Pricing())
    now = next((c.config for c in first if c.config.num_gpus == request and not c.config.shared), None)
    job = view(spec, profile, now if running else None)
    every = candidates(job, cluster, 50.0, Pricing())
    wanted = [c for c in every if c.config.shared or c.config.num_gpus == request]
    rigid = candidates(job, cluster, 50.0, Pricing(counts="requested"))
    assert [c.config for c in rigid] == [c.config for c in wanted]
    for mine, other in zip(rigid, wanted, strict=True):
        for name in ("step_s", "throughput", "effective_progress", "mem_bytes", "util_pct", "tta_s", "psi"):
            assert getattr(mine.estimate, name) == pytest.approx(getattr(other.estimate, name), rel=1e-9)
    alone = candidates(job, cluster, 50.0, Pricing(counts="requested", shares=False))
    assert not any(c.config.shared for c in alone)


def test_what_runs_stays_among_equals():
    """Two splits of a batch that take the same time: no restart for nothing."""
    spec = b.job_spec("a", gpus=(1,), batch={"global": 64})
    flat = ThroughputParams(fwd=ComputeCurve(alpha_s=0, beta_s=0.1), bwd=ComputeCurve(alpha_s=0, beta_s=0.1))
    profile = b.profile(2, throughput=flat, max_local_batch=64)
    held = Config(num_gpus=1, batch_per_gpu=32, accum_steps=2)
    (option,) = candidates(view(spec, profile, held), b.cluster(1, 4), 0.0, Pricing(counts="requested"))
    assert option.config == held


def test_altered_is_model_copy():
    profile = b.profile(4)
    tables = profile.theta, profile.memo
    changed = altered(profile, samples_per_epoch=7)
    assert changed == profile.model_copy(update={"samples_per_epoch": 7})
    assert changed.model_dump() == profile.model_copy(update={"samples_per_epoch": 7}).model_dump()
    assert changed.theta is tables[0]
    assert changed.memo is not tables[1]
    fewer = altered(profile, layers=profile.layers[:2])
    assert len(fewer.theta) == 3
    assert profile.samples_per_epoch != 7
