"""Wrong files: one error naming file, line, key, the value given and those allowed; one hint; never a traceback."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.spec import cluster_schema, job_schema
from icefrog.specfile import load_cluster, load_job, parse_cluster

GOOD = """\
name: digits-cnn
command: [python, examples/digits_cnn.py, --epochs, "{max_epochs}"]
gpus: [1, 2, 4]
batch: {global: 256}
freeze: {max_fraction: 0.9, rule: tuner}
target: {metric: accuracy, value: 0.97, mode: max}
max_epochs: 40
share: true
weight: 1.0
checkpoint: ./runs/digits-cnn
env: {OMP_NUM_THREADS: "1"}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_the_design_s_example_is_read_and_satisfies_the_published_schema(tmp_path):
    job = load_job(write(tmp_path, GOOD))
    assert (job.job_id, job.gpus, job.batch.initial, job.target.value) == ("digits-cnn", (1, 2, 4), 256, 0.97)
    jsonschema.validate(yaml.safe_load(GOOD), job_schema())


def test_the_published_schemas_in_the_docs_are_up_to_date():
    docs = Path(__file__).resolve().parents[2] / "docs" / "schema"
    assert json.loads((docs / "job.schema.json").read_text()) == job_schema()
    assert json.loads((docs / "cluster.schema.json").read_text()) == cluster_schema()


@pytest.mark.parametrize(
    ("change", "line", "key", "given", "hint"),
    [
        (("weight: 1.0", "weigth: 3"), 9, "weigth", "3", "did you mean weight"),
        (("[1, 2, 4]", "[1, two]"), 3, "gpus.1", "'two'", "whole numbers from 1"),
        (("[1, 2, 4]", "[0]"), 3, "gpus.0", "0", "whole numbers from 1"),
        (("[1, 2, 4]", "[1, yes]"), 3, "gpus.1", "True", "whole numbers from 1"),
        (("[1, 2, 4]", "[1, 1]"), 3, "gpus", "[1, 1]", "different"),
        (("[1, 2, 4]", "4"), 3, "gpus", "4", "a list"),
        (("rule: tuner", "rule: foo"), 5, "freeze.rule", "'foo'", "tuner, none, linear"),
        (("0.9,", "1.5,"), 5, "freeze.max_fraction", "1.5", "0 to 1"),
        (("value: 0.97", "value: .nan"), 6, "target.value", "nan", "finite"),
        (("value: 0.97", "value: high"), 6, "target.value", "'high'", "finite"),
        (("mode: max", "mode: up"), 6, "target.mode", "'up'", "max or min"),
        (("max_epochs: 40", "max_epochs: 4.5"), 7, "max_epochs", "4.5", "whole number"),
        (("max_epochs: 40", "max_epochs: -1"), 7, "max_epochs", "-1", "whole number"),
        (("share: true", "share: maybe"), 8, "share", "'maybe'", "true or false"),
        (("weight: 1.0", "weight: .inf"), 9, "weight", "inf", "above 0"),
        (("weight: 1.0", "weight: true"), 9, "weight", "True", "above 0"),
        (('"1"', "1"), 11, "env.OMP_NUM_THREADS", "1", "in quotes"),
        (("{global: 256}", "{min: 4}"), 4, "batch", "{'min': 4}", "{global: N} or {min: A, max: B}"),
        (("{global: 256}", "{min: 8, max: 4}"), 4, "batch", "", "{global: N} or {min: A, max: B}"),
        (("{global: 256}", "256"), 4, "batch", "256", "{global: N} or {min: A, max: B}"),
        (("name: digits-cnn", "name: ../etc"), 1, "name", "'../etc'", "letters"),
        (("name: digits-cnn", "name: 7"), 1, "name", "7", "letters"),
        (("[1, 2, 4]", "[3]"), 1, "file", "", "needs name, gpus"),
        (("[1, 2, 4]", "[2, 4]"), 1, "file", "", "needs name, gpus"),
        (("command: [python, examples/digits_cnn.py, --epochs, \"{max_epochs}\"]\n", ""), 1, "file", "", "exactly one of"),
        (("weight: 1.0", "workload: bert"), 9, "workload", "", "allowed keys"),
        (("weight: 1.0", "share: false"), 9, "share", "", "keep one"),
        (("weight: 1.0", "weight: ["), 11, "", "", "brackets"),
        (("checkpoint: ./runs/digits-cnn", "checkpoint: 2020-13-45"), 1, "", "", "quote"),
        (("checkpoint: ./runs/digits-cnn", 'checkpoint: "a\\0"'), 10, "checkpoint", "NUL", "folder"),
        (("checkpoint: ./runs/digits-cnn", 'checkpoint: "a\\ud800"'), 10, "checkpoint", "surrogate", "folder"),
        (('{OMP_NUM_THREADS: "1"}', '{"A=B": x}'), 11, "env", "'A=B'", "mapping"),
        (('{OMP_NUM_THREADS: "1"}', '{"": x}'), 11, "env", "''", "mapping"),
        (('{OMP_NUM_THREADS: "1"}', '{A: "x\\0"}'), 11, "env.A", "NUL", "mapping"),
        (("command: [python,", "command: ['',"), 2, "command", "no name", "program"),
        (("[1, 2, 4]", "[1" + "0" * 300 + "]"), 3, "gpus.0", "", "whole numbers"),
    ],
)  # fmt: skip
def test_each_mistake_is_named_with_its_line(tmp_path, change, line, key, given, hint):
    text = GOOD.replace(*change)
    assert text != GOOD
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_job(path)
    assert error.value.message.startswith(f"{path}:{line}: {key}"), error.value.message
    assert given in error.value.message
    assert hint in error.value.hint
    assert "\n" not in error.value.message + error.value.hint


@pytest.mark.parametrize("text", ["", "- a", "7", "a: &x [*x]", "? [a]\n: b", "\x00", "a: !!python/object:os.system x"])
def test_things_that_are_no_job_file(tmp_path, text):
    with pytest.raises(UserError):
        load_job(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", ".", "binary"):
        with pytest.raises(UserError):
            load_job(tmp_path / name)


@given(st.data())
def test_mutilated_files_never_raise_anything_else(tmp_path_factory, data):
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        junk = data.draw(
            st.sampled_from([":", "{", "}", "[", "]", "\n", "  ", "'", '"', "&a", "*a", "!", "-", "é", "\t", "9" * 30])
        )
        text = text[:at] + junk + text[at + data.draw(st.integers(0, 3)) :]
    path = tmp_path_factory.mktemp("m") / "job.yaml"
    path.write_text(text)
    with contextlib.suppress(UserError):
        load_job(path)


def test_clusters(tmp_path):
    cluster = parse_cluster("12x4:a100-80gb")
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.label()) == (48, (4,) * 12, "12x4")
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes:\n- {count: 2, gpus: 8}\n- {gpus: 4, gpu_mem_bytes: 1.6e+10}\n")
    assert parse_cluster(str(path)).gpus_per_node == (8, 8, 4)
    assert load_cluster(path).gpu_mem_bytes == 1.6e10
    path.write_text("nodes:\n- {count: 2, gpu: 8}\n")
    with pytest.raises(UserError, match=r"cluster.yaml:2: nodes\.0\.gpu: unknown key") as error:
        load_cluster(path)
    assert "did you mean gpus" in error.value.hint


def test_a_cluster_file_has_bounds(tmp_path):
    path = tmp_path / "cluster.yaml"
    for wrong in ("{count: 1" + "0" * 300 + ", gpus: 4}", "{count: 2, gpus: 100000}"):
        path.write_text(f"nodes:\n- {wrong}\n")
        with pytest.raises(UserError, match=r"cluster.yaml:2: nodes\.0\."):
            load_cluster(path)


@pytest.mark.parametrize(
    "text", ["١x٢", "", "12", "0x4", "12x0", "12x4:warp9", "12x4x4", "-1x4", "999999999x4", "no.yaml"]
)
def test_wrong_cluster_texts(text):
    with pytest.raises(UserError):
        parse_cluster(text)


@pytest.mark.parametrize(
    "name",
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "ICEFROG_GRANT"],
)
def test_variables_that_the_scheduler_sets_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=rf":11: env: the scheduler sets {name}") as error:
        load_job(write(tmp_path, GOOD.replace("OMP_NUM_THREADS", name)))
    assert "ICEFROG_*" in error.value.hint


def test_clusters_of_several_gpu_types(tmp_path):
    cluster = parse_cluster("4x4:rtx+8x4:a100+1x2:rtx")
    assert cluster.label() == "4x4:rtx+8x4:a100+1x2:rtx"
    assert cluster.node_types == ("rtx",) * 4 + ("a100",) * 8 + ("rtx",)
    assert list(cluster.parts) == ["a100", "rtx"]  # the most GPUs first
    assert [part.num_gpus for part in cluster.parts.values()] == [32, 18]
    assert cluster.gpu_mem_bytes == 11e9
    plain = parse_cluster("2x8+4x4")
    assert plain.label() == "2x8+4x4"
    assert plain.parts == {"any": plain}
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes:\n- {count: 2, gpus: 8, gpu_type: t4}\n- {gpus: 4, gpu_type: ours}\n")
    mixed = load_cluster(path)
    assert [node.gpu_mem_bytes for node in mixed.nodes] == [16e9, 80e9]  # a type's own, where it is known
    for wrong in ("4x4:rtx+", "+4x4", "4x4:rtx+4x4:warp9", "4x4+0x4"):
        with pytest.raises(UserError):
            parse_cluster(wrong)
