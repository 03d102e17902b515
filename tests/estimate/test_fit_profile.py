"""Fitting sharded, pipelined and hybrid profiles: the step times come back, also of configurations that were left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from icefrog.estimate.fit_profile import StepPoint, fit_profile
from icefrog.estimate.throughput import step_s
from icefrog.profile import ComputeCurve, LayerCost, Link, Pipelined, Profile, Sharded, SyncCurve, ThroughputParams
from icefrog.testing.builders import profile

TRUTH = ThroughputParams(
    fwd=ComputeCurve(alpha_s=0.010, beta_s=0.0010),
    bwd=ComputeCurve(alpha_s=0.020, beta_s=0.0020),
    sync=SyncCurve(intra_alpha_s=0.03, intra_beta_s=0.005, inter_alpha_s=0.06, inter_beta_s=0.01),
    overlap_gamma=2.0,
    flop_alpha_s=0.008,
    flop_gamma=0.8,
    sync_alpha_s=0.004,
)
LAYERS = tuple(
    LayerCost(name=f"l{i}", flops=f, param_bytes=b, activation_bytes=2e4)
    for i, (f, b) in enumerate(((1, 1), (2, 1), (2, 2), (1, 4), (1, 2), (2, 6)))
)
KINDS = {
    "replicated": profile().parallel,
    "sharded": Sharded(
        gather=SyncCurve(intra_alpha_s=0.02, intra_beta_s=0.004, inter_alpha_s=0.05, inter_beta_s=0.01),
        gather_alpha_s=0.003,
        gather_gamma=2.5,
    ),
    "pipeline": Pipelined(micro_batches=4, link=Link(intra_alpha_s=0.002, intra_s_per_byte=2e-8, inter_alpha_s=0.01)),
    "hybrid": Pipelined(num_stages=2, link=Link(intra_alpha_s=0.002, intra_s_per_byte=2e-8)),
}
PLACEMENTS = ((2, 1), (4, 1), (4, 2), (8, 2), (8, 4))


def job(kind: str, **changes: object) -> Profile:
    return profile(**{"layers": LAYERS, "throughput": TRUTH, "parallel": KINDS[kind], **changes})


def measured(truth: Profile, noise: float = 0.0) -> list[StepPoint]:
    rng = np.random.default_rng(0)
    points = [
        StepPoint(gpus, nodes, batch, 1, depth, 1.0)
        for gpus, nodes in PLACEMENTS
        for batch in (4, 64)
        for depth in (0, 2, 4)
    ]
    times = [
        float(step_s(truth, p.num_gpus, p.num_nodes, p.batch_per_gpu, p.frozen_layers, p.accum_steps)) for p in points
    ]
    return [
        replace(p, step_s=t * float(np.exp(noise * rng.standard_normal()))) for p, t in zip(points, times, strict=True)
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_configurations_left_out_are_predicted(kind: str) -> None:
    points = measured(job(kind), noise=0.02)
    blank = ThroughputParams(fwd=ComputeCurve(alpha_s=0, beta_s=0), bwd=ComputeCurve(alpha_s=0, beta_s=0))
    forgotten = {"sharded": Sharded(), "pipeline": Pipelined(micro_batches=4), "hybrid": Pipelined(num_stages=2)}
    found = fit_profile(job(kind, throughput=blank, parallel=forgotten.get(kind, KINDS[kind])), points)
    unseen = found.unseen_errors()
    assert len(unseen) == len(points)
    assert float(np.median(unseen)) < 0.03
    assert float(unseen.max()) < 0.15
    assert float(np.median(found.fitted_errors())) < 0.02
    # Neither a batch nor a GPU count of these was measured.
    elsewhere = [step_s(p, gpus, nodes, 32, 3) for p in (found.profile, job(kind)) for gpus, nodes in ((6, 2), (16, 4))]
    np.testing.assert_allclose(elsewhere[:2], elsewhere[2:], rtol=0.12)


def test_what_no_point_tells_is_absent() -> None:
    alone = [p for p in measured(job("replicated")) if p.num_nodes == 1][:3]
    found = fit_profile(job("sharded"), alone).profile
    assert isinstance(found.parallel, Sharded)
    assert found.parallel.gather.inter_alpha_s == pytest.approx(1.1 * found.parallel.gather.intra_alpha_s)
    single = fit_profile(job("pipeline"), [replace(p, num_gpus=1) for p in alone]).profile
    assert isinstance(single.parallel, Pipelined)
    assert single.parallel.link == Link()
    assert single.throughput.sync == SyncCurve()


def test_few_points_have_no_error_on_unseen_ones() -> None:
    found = fit_profile(job("replicated"), measured(job("replicated"))[:3])
    assert found.unseen_errors().size == 0
    assert [error.unseen_error for error in found.errors] == [None] * 3
