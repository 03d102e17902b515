"""What a machine is taken to have."""

from __future__ import annotations

import pytest

from icefrog.errors import UserError
from icefrog.executors.local import Devices, local_cluster, slots
from icefrog.executors.local.supervisor import free_port

LISTING = """\
0, GPU-aaaa, NVIDIA H200, 143771
1, GPU-bbbb, NVIDIA H200, 143771
2, GPU-cccc, NVIDIA A100-SXM4-80GB, 81920
"""
MIB = 1024.0 * 1024.0


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-bb,1", ["GPU-bb", "1"]),
        ("1,-1,2", ["1"]),  # the list ends at what is no device
        ("", []),
        ("7", []),
    ],
)
def test_usable_gpus_are_those_that_cuda_would_show(visible: str | None, names: list[str]) -> None:
    assert [name for name, _, _ in slots._parse_gpus(LISTING, visible)] == names


def test_types_and_memory_come_from_the_driver() -> None:
    assert slots._parse_gpus(LISTING, None)[2] == ("2", "nvidia-a100-sxm4-80gb", 81920 * MIB)
    assert slots._parse_gpus("No devices were found\n", None) == ()


def test_a_cluster_of_gpus_has_the_memory_of_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_gpus", lambda: slots._parse_gpus(LISTING, None))
    cluster = local_cluster()
    assert (cluster.num_gpus, cluster.gpu_mem_bytes) == (3, 81920 * MIB)
    devices = slots.devices_of(cluster)
    assert devices.env([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setattr(slots, "_gpus", lambda: ())
    with pytest.raises(UserError, match="set up for 3 GPUs, nvidia-smi lists 0"):
        slots.devices_of(cluster)


def test_cpu_slots_show_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_gpus", lambda: slots._parse_gpus(LISTING, None))
    cluster = local_cluster(5)
    assert (cluster.num_gpus, cluster.nodes[0].gpu_type) == (5, "cpu")
    assert slots.devices_of(cluster) == Devices(None)
    assert Devices(None).env([0, 1]) == {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(UserError, match="--slots is 0"):
        local_cluster(0)


def test_gangs_meet_at_ports_that_the_kernel_gives_to_nobody_by_itself() -> None:
    found = [free_port() for _ in range(20)]
    assert all(20_000 <= port < 30_000 for port in found)
    assert len(set(found)) > 10
