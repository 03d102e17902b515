"""The catalogue against published figures; every entry can be used by the scheduler's own functions."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from typing import Any

import numpy as np
import pytest

from icefrog.errors import UserError
from icefrog.estimate.occupancy import mem_bytes, util_pct
from icefrog.estimate.throughput import throughput
from icefrog.testing.builders import job_spec
from icefrog.workloads import CLASSES, Catalogue, gpu_time_class, job_profile, load_catalogue, workload_rows
from icefrog.workloads.jobs import check_gpu_types


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    file = resources.files("icefrog.workloads") / "catalogue.json"
    table: dict[str, Any] = json.loads(file.read_text())
    return table


# (parameters in millions, forward multiply-adds in billions or None) as their authors or model cards publish them.
PUBLISHED = {
    "models": {
        "resnet50-imagenet": (25.56, 4.1),  # He et al. 2016: 3.8e9 with stride in 1x1; 4.1e9 in 3x3 (torchvision)
        "resnet18-cifar10": (11.17, 0.56),  # the usual CIFAR variant
        "ddpm-cifar10": (35.7, 6.1),  # Ho et al. 2020: 35.7 M; 12.1 GFLOPs as commonly counted
        "bert-squad": (108.9, None),  # BERT-base without pooler
    },
    "checks": {
        "resnet18-imagenet": (11.69, 1.82),
        "mobilenetv2-imagenet": (3.5, 0.300),  # Sandler et al. 2018: 3.4 M, 300 M multiply-adds
        "yolov3-coco": (61.95, 32.93),  # Redmon & Farhadi 2018: 65.86 BFLOPs at 416
        "openllama-3b": (3426.5, None),
        "llama-7b": (6738.4, None),
    },
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, rows in PUBLISHED.items() for name in rows])
def test_counts_match_published_figures(counted: dict[str, Any], part: str, name: str) -> None:
    parameters_m, gmacs = PUBLISHED[part][name]
    entry = counted[part][name]
    assert entry["parameters"] / 1e6 == pytest.approx(parameters_m, rel=0.005)
    if gmacs is not None:
        assert entry["forward_macs"] / 1e9 == pytest.approx(gmacs, rel=0.025)


def test_transformers_need_two_flops_a_parameter_and_token_plus_attention(counted: dict[str, Any]) -> None:
    for name, tokens, width, layers, outside in (
        ("bert-squad", 384, 768, 12, 30522 * 768 + 514 * 768),
        ("llama-3b-squad", 384, 3200, 26, 32000 * 3200),
        ("llama-7b-sst2", 128, 4096, 32, 32000 * 4096),
    ):
        entry = counted["models"][name]
        expected = tokens * (entry["parameters"] - outside) + 2 * layers * tokens**2 * width
        assert entry["forward_macs"] == pytest.approx(expected, rel=0.005)


def test_units_add_up_and_each_holds_parameters(counted: dict[str, Any], catalogue: Catalogue) -> None:
    for name, entry in counted["models"].items():
        layers = entry["layers"]
        assert sum(x["param_bytes"] for x in layers) == entry["parameters"] * entry["param_dtype_bytes"]
        assert sum(x["flops"] for x in layers) == pytest.approx(6 * entry["forward_macs"], rel=1e-4)
        assert all(x["param_bytes"] > 0 for x in layers)
        assert len({x["name"] for x in layers}) == len(layers) == catalogue[name].profile.num_layers


def test_every_task_is_usable(catalogue: Catalogue) -> None:
    assert list(catalogue) == [
        "resnet18-cifar10",
        "mobilenetv2-cifar10",
        "bert-squad",
        "yolov3-voc",
        "ddpm-cifar10",
        "llama-3b-squad",
        "resnet50-imagenet",
        "llama-7b-sst2",
    ]
    for name, workload in catalogue.items():
        profile, task = workload.profile, workload.task
        depth = np.arange(int(0.9 * profile.num_layers) + 1)
        for gpus in (task.gpus.unit, task.gpus.max):
            speed = throughput(profile, gpus, -(-gpus // 4), task.local_batch.max, depth)
            assert np.all(np.diff(speed) >= 0), name  # freezing never slows a step
            assert speed[0] > 0
        memory = mem_bytes(profile, task.local_batch.max, depth)
        assert np.all(np.diff(memory) <= 0), name
        assert memory[0] < 80e9
        assert np.all(util_pct(profile, task.local_batch.min, depth) > 0)
        assert task.batch.min >= task.local_batch.min
        assert profile.gpu_type == "a100"


def test_every_class_has_a_task_for_any_request(catalogue: Catalogue) -> None:
    for kind in CLASSES:
        units = [catalogue.tasks[name].gpus.unit for name, weight in catalogue.of_class(kind) if weight > 0]
        assert 1 in units


def test_two_small_jobs_can_share_a_gpu(catalogue: Catalogue) -> None:
    """Sharing must be possible in the catalogue's world, and freezing must widen it."""
    small = [catalogue[name] for name in catalogue if catalogue[name].task.share]
    assert len(small) >= 2
    for workload in small:
        shallow = float(util_pct(workload.profile, 128, 0))
        deep = float(util_pct(workload.profile, 128, int(0.9 * workload.profile.num_layers)))
        assert deep < 50 < 60 > shallow


def test_what_was_not_measured_says_so(catalogue: Catalogue) -> None:
    for name in ("mobilenetv2-cifar10", "ddpm-cifar10", "llama-3b-squad", "llama-7b-sst2"):
        assert catalogue[name].provenance.throughput.startswith("modelled")
    for name in ("resnet18-cifar10", "resnet50-imagenet", "bert-squad", "yolov3-voc"):
        assert catalogue[name].provenance.throughput.startswith("fitted to Pollux/Sia")
    for workload in catalogue.values():
        assert "proxy" in workload.provenance.gradients
        assert "modelled" in workload.provenance.occupancy
        assert workload.provenance.text() == workload.profile.provenance


@pytest.mark.data
def test_modelled_step_times_are_near_what_others_measured_on_another_gpu(catalogue: Catalogue, data_dir: Any) -> None:
    """A plausibility check only: Lucid's figures are for one RTX 3090, the catalogue's for an A100."""
    rows = [line.split(",") for line in (data_dir / "lucid/single_data.csv").read_text().splitlines()[1:]]
    speeds = {(row[0], row[1], int(row[2])): float(row[4]) for row in rows if row[3] == "0"}
    for model, name in (("MobileNetV2", "mobilenetv2-cifar10"), ("ResNet18", "resnet18-cifar10")):
        for batch in (64, 128):
            ours = float(throughput(catalogue[name].profile, 1, 1, batch))
            assert 0.25 < ours / speeds[model, "CIFAR-10", batch] < 4


def test_classes_by_gpu_time() -> None:
    hour = 3600.0
    assert [gpu_time_class(h * hour) for h in (0, 0.99, 1, 9.9, 10, 99, 100, 5000)] == [
        "small",
        "small",
        "medium",
        "medium",
        "large",
        "large",
        "extra-large",
        "extra-large",
    ]


def test_listing_has_a_row_for_each_and_names_its_sources() -> None:
    rows = workload_rows()
    assert [row["name"] for row in rows] == list(load_catalogue())
    assert len({tuple(row) for row in rows}) == 1
    json.dumps(rows)


def test_unknown_workload(catalogue: Catalogue) -> None:
    with pytest.raises(UserError, match="unknown workload 'vgg', allowed: resnet18-cifar10, "):
        catalogue.require("vgg")
    with pytest.raises(KeyError):
        catalogue["vgg"]


def test_importing_reads_no_file_and_no_torch() -> None:
    code = (
        "import sys, importlib.resources as r; r.files = None; import icefrog.workloads, icefrog.traces;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_fitted_workloads_cost_on_each_type_what_was_fitted_there(catalogue: Catalogue) -> None:
    profile = catalogue.typed_profile("resnet50-imagenet")
    assert set(profile.by_gpu_type) == {"rtx2080ti", "t4"}
    files = json.loads((resources.files("icefrog.workloads") / "fitted_pollux.json").read_text())
    for gpu_type in ("rtx2080ti", "t4"):
        fit = files["applications"]["imagenet"][gpu_type]["throughput"]
        assert profile.on(gpu_type).throughput.fwd.beta_s == fit["fwd"]["beta_s"]
        assert profile.on(gpu_type).occupancy.mem_bytes == profile.occupancy.mem_bytes
    assert profile.on("rtx") is profile.on("rtx2080ti")
    assert catalogue.typed_profile("resnet50-imagenet") is profile


@pytest.mark.parametrize(
    "name", ["resnet18-cifar10", "bert-squad", "llama-3b-squad", "ddpm-cifar10", "mobilenetv2-cifar10"]
)
def test_older_gpus_are_slower_and_busier(catalogue: Catalogue, name: str) -> None:
    """At the largest local batch that was measured or modelled, where compute and not the host decides."""
    profile = catalogue.typed_profile(name)
    batch = profile.max_local_batch
    speed = {t: float(throughput(profile.on(t), 1, 1, batch)) for t in ("a100", "rtx", "t4")}
    assert speed["a100"] > speed["rtx"] > speed["t4"] > 0.05 * speed["a100"]
    assert profile.on("t4").occupancy.util_pct != profile.occupancy.util_pct


def test_a_job_profile_holds_other_types_only_where_the_cluster_has_them(catalogue: Catalogue) -> None:
    spec = job_spec(
        "a", command=None, workload="bert-squad", gpus=(1,), num_gpus=1, batch={"global": 16}, duration_s=3600.0
    )
    for types in ((), ("any",), ("a100-80gb", "a800-80gb"), ("h100-80gb",)):
        assert not job_profile(spec, catalogue, gpu_types=types).by_gpu_type or types == ("h100-80gb",)
    mixed = job_profile(spec, catalogue, gpu_types=("a100", "t4"))
    assert set(mixed.by_gpu_type) == {"rtx2080ti", "t4"}
    assert mixed.samples_per_epoch == job_profile(spec, catalogue).samples_per_epoch


def test_types_of_which_nothing_is_known_cannot_be_mixed(catalogue: Catalogue) -> None:
    check_gpu_types(("h100-80gb",), catalogue)
    check_gpu_types(("any", "t4", "a100-40gb"), catalogue)
    with pytest.raises(UserError, match="nothing is known of the speed of 'h100-80gb'") as error:
        check_gpu_types(("t4", "h100-80gb"), catalogue)
    assert "rtx" in error.value.hint
