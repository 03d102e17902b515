"""Nodes that leave service, in the numbers and in the plots."""

from __future__ import annotations

import pytest
from report_logs import CLUSTER, Log

from icefrog import events as ev
from icefrog.report.metrics import integral, summarise
from icefrog.report.plots import gpus_in_use
from icefrog.report.record import fold
from icefrog.state import IllegalTransitionError


def log_with_outages() -> Log:
    """Two nodes of two GPUs, one job on two of them for 100 s; the other node is out from 20 to 60 s and from 90 s on."""
    log = Log()
    log.submit(0, "a")
    log.start(0, "a", [(0, 0), (0, 1)])
    log.records += [
        ev.NodeDown(time_s=20, node=1, reason="node failure"),
        ev.NodeUp(time_s=60, node=1),
        ev.NodeDown(time_s=90, node=1, reason="node failure"),
    ]
    log.finish(100, "a")
    log.records.append(ev.NodeDown(time_s=150, node=0))  # nobody's business any more
    return log


def test_utilisation_is_told_with_and_without_the_nodes_that_were_out() -> None:
    run = fold(log_with_outages().records, CLUSTER, live=False)
    assert run.capacity == ((0, 4.0), (20, 2.0), (60, 4.0), (90, 2.0))
    assert integral(run.capacity, run.end_s) == 20 * 4 + 40 * 2 + 30 * 4 + 10 * 2
    row = summarise(run)
    assert row["gpu_utilization"] == pytest.approx(200 / 400)  # as ever: of all GPUs
    assert row["gpu_utilization_in_service"] == pytest.approx(200 / 300)
    assert row["node_outages"] == 2


def test_without_outages_both_are_the_same() -> None:
    log = Log()
    log.submit(0, "a")
    log.start(0, "a", [(0, 0)])
    log.finish(100, "a")
    run = fold(log.records, CLUSTER, live=False)
    assert run.capacity == ((0, 4.0),)
    row = summarise(run)
    assert row["gpu_utilization_in_service"] == row["gpu_utilization"] == pytest.approx(0.25)
    assert row["node_outages"] == 0


def test_what_was_out_before_the_start_is_out_at_the_start() -> None:
    log = Log()
    log.records.append(ev.NodeDown(time_s=5, node=1))
    log.submit(10, "a")
    log.start(10, "a", [(0, 0)])
    log.finish(20, "a")
    assert fold(log.records, CLUSTER, live=False).capacity == ((10, 2.0),)


def test_the_plot_shows_what_was_in_service() -> None:
    run = fold(log_with_outages().records, CLUSTER, live=False)
    shown = gpus_in_use({"fifo": run})
    line = next(line for line in shown["data"] if line["name"] == "in service")
    assert line["y"] == [4.0, 2.0, 4.0, 2.0, 2.0]
    assert not shown["layout"].get("shapes")
    log = Log()
    log.submit(0, "a")
    log.start(0, "a", [(0, 0)])
    log.finish(100, "a")
    assert gpus_in_use({"fifo": fold(log.records, CLUSTER, live=False)})["layout"]["shapes"]


def test_a_node_that_the_cluster_lacks_is_no_log_of_it() -> None:
    log = Log()
    log.submit(0, "a")
    log.records.append(ev.NodeDown(time_s=5, node=7))
    with pytest.raises(IllegalTransitionError, match="node 7"):
        fold(log.records, CLUSTER, live=False)
