"""Job and cluster files: YAML with line numbers, checked against the models in ``spec``.

Wrong input raises :class:`icefrog.errors.UserError` naming file, line, key, the value given and the values allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from icefrog.errors import UserError
from icefrog.gpu_types import ANY_GPU, GPU_TYPES
from icefrog.profile import Profile
from icefrog.spec import ClusterSpec, JobSpec, NodeSpec, RuleName

M = TypeVar("M", bound=BaseModel)

_MAX_FILE_BYTES = 1_000_000
_CLUSTER_PATTERN = re.compile(r"^([0-9]{1,9})x([0-9]{1,9})(?::([A-Za-z0-9._-]+))?$")
_MAX_GROUPS = 1000  # of equal nodes


def load_job(path: Path) -> JobSpec:
    """Read a job file. Raises :class:`UserError`; a replay's fields (``workload``, ``submit_s`` ...) are refused."""
    return read_yaml(path, JobSpec, _JOB).model


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file: ``nodes: [{count: 12, gpus: 4, gpu_type: a800-80gb, gpu_mem_bytes: 8.0e10}, ...]``."""
    return read_yaml(path, ClusterSpec, _CLUSTER).model


def parse_cluster(text: str) -> ClusterSpec:
    """``12x4``, ``12x4:a100-80gb``, ``8x4:a100+4x4:rtx``, or the path of a cluster file."""
    groups = text.split("+")
    matches = [_CLUSTER_PATTERN.match(group) for group in groups]
    if not all(matches) or len(groups) > _MAX_GROUPS:
        if text.endswith((".yaml", ".yml")) or Path(text).exists():
            return load_cluster(Path(text))
        raise UserError(
            f"--cluster: {text!r} is neither NODESxGPUS[:TYPE] nor a YAML file",
            "for example 12x4, 12x4:a100-80gb, 8x4:a100+4x4:rtx, or cluster.yaml",
        )
    return ClusterSpec(nodes=tuple(_node_group(match, text) for match in matches if match is not None))


def _node_group(match: re.Match[str], text: str) -> NodeSpec:
    count, gpus, gpu_type = int(match[1]), int(match[2]), match[3] or ANY_GPU
    if not 1 <= count <= 100_000 or not 1 <= gpus <= 64:
        raise UserError(f"--cluster: {text!r} is not a cluster", "1 to 100000 nodes of 1 to 64 GPUs, for example 12x4")
    if gpu_type != ANY_GPU and gpu_type not in GPU_TYPES:
        raise UserError(f"--cluster: unknown GPU type {gpu_type!r}", f"known types: {', '.join(GPU_TYPES)}")
    return NodeSpec(gpus=gpus, count=count, gpu_type=gpu_type)


def load_profile(path: Path) -> Profile:
    """Read a file of ``icefrog profile``. Raises :class:`UserError`."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}", "give the path of a profile; `icefrog profile` writes one"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path} is not a profile: {where}: {first['msg']}", "`icefrog profile` writes one") from error


# -- YAML with lines ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileKind:
    """What messages say about a kind of file."""

    name: str
    example: str
    """For the hint where the file is no mapping at all."""
    forms: Mapping[str, str]
    """What is allowed under each key, in words."""
    forbidden: tuple[str, ...] = ()
    """Keys of the model that such a file must not set."""
    needs: str = ""
    """What the model as a whole needs, beyond its required keys."""


@dataclass(frozen=True, slots=True)
class YamlFile(Generic[M]):
    """A checked file, and where in it everything stands."""

    path: Path
    model: M
    root: yaml.Node

    def where(self, *loc: int | str) -> str:
        """``file:line`` of a key, for messages about what only its meaning shows to be wrong."""
        return f"{self.path}:{_line(self.root, loc)}"


def read_yaml(path: Path, model: type[M], kind: FileKind) -> YamlFile[M]:
    """Read a YAML file into a model. Raises :class:`UserError` with file, line and key."""
    text = _read_text(path, kind)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or "it cannot be read as YAML"
        raise UserError(
            f"{path}:{line}: not valid YAML: {problem}", "check indentation, quotes and brackets there"
        ) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}:1: a value cannot be read: {error}", "check dates and numbers; quote texts") from error
    if root is None or not isinstance(data, dict):
        raise UserError(f"{path}:1: a {kind.name} file is a mapping of keys to values", f"for example: {kind.example}")
    if duplicate := _duplicate_key(root):
        key, line = duplicate
        raise UserError(f"{path}:{line}: {key}: the key is given twice", "keep one of the two lines")
    for key in kind.forbidden:
        if key in data:
            raise UserError(
                f"{path}:{_line(root, (key,))}: {key}: only a replayed trace sets this key",
                f"allowed keys: {', '.join(sorted(set(_keys(model)) - set(kind.forbidden)))}",
            )
    try:
        return YamlFile(path, model.model_validate(data), root)
    except ValidationError as error:
        # One wrong item can make its container look empty, too: the most specific complaint is the true one; and a
        # misspelt key explains a missing one.
        details = min(
            error.errors(), key=lambda e: (-len(e["loc"]), e["type"] != "extra_forbidden", _line(root, e["loc"]))
        )
        raise _explain(path, root, model, details, kind) from error


def _read_text(path: Path, kind: FileKind) -> str:
    try:
        if path.is_dir():
            raise UserError(
                f"{path}: is a folder, not the {kind.name} file",
                f"give the path of a YAML file; for example: {kind.example}",
            )
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes", f"is this the {kind.name} file?")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file", f"give the path of the {kind.name} file") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not text (byte {error.start} is not UTF-8)", f"is this the {kind.name} file?"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read: {reason}", "check the path and its permissions") from error


def _duplicate_key(root: yaml.Node) -> tuple[str, int] | None:
    """The first key that is given twice in one mapping, and its line. An alias may make the tree a cycle."""
    seen_nodes: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen_nodes:
            continue
        seen_nodes.add(id(node))
        if isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                name = str(getattr(key, "value", key))
                if name in names:
                    return name, key.start_mark.line + 1
                names.add(name)
                stack.append(value)
        elif isinstance(node, yaml.SequenceNode):
            stack += node.value
    return None


def _line(node: yaml.Node, loc: tuple[int | str, ...]) -> int:
    """The line of the innermost node of ``loc`` that exists in the file (1-based)."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            match = next(((k, v) for k, v in node.value if getattr(k, "value", None) == str(part)), None)
            if match is None:
                break
            line, node = match[0].start_mark.line + 1, match[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


# -- messages -------------------------------------------------------------------------------------------------------------


def _explain(path: Path, root: yaml.Node, model: type[BaseModel], error: ErrorDetails, kind: FileKind) -> UserError:
    loc = tuple(part for part in error["loc"])
    key = ".".join(str(part) for part in loc)
    where = f"{path}:{_line(root, loc)}"
    owner = _model_at(model, loc[:-1])
    needs = kind.needs if owner is model else ""
    if error["type"] == "extra_forbidden":
        allowed = sorted(set(_keys(owner)) - set(kind.forbidden))
        close = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        return UserError(
            f"{where}: {key}: unknown key (given: {_short(error['input'])})", f"{meant}allowed: {', '.join(allowed)}"
        )
    if error["type"] == "missing":
        return UserError(f"{where}: {key}: is missing", f"{key} is {_describe(owner, loc, kind.forms, needs)}")
    message = error["msg"].removeprefix("Value error, ")
    return UserError(
        f"{where}: {key or 'file'}: {message[:1].lower() + message[1:]} (given: {_short(error['input'])})",
        f"{key or 'the file'}: {_describe(owner, loc, kind.forms, needs)}",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _unwrapped(annotation: object) -> list[Any]:
    """The members of a union, tuple elements included: the models that may sit below a key."""
    if get_origin(annotation) in (Union, UnionType, tuple):
        return [leaf for arg in get_args(annotation) for leaf in _unwrapped(arg)]
    return [annotation]


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that holds the last key of ``loc``."""
    for part in loc:
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        inner = _unwrapped(field.annotation) if field is not None else []
        model = next((m for m in inner if isinstance(m, type) and issubclass(m, BaseModel)), model)
    return model


_FORMS = {
    "name": "letters, digits, '.', '_' and '-', at most 120, starting with a letter or digit",
    "command": "a list of texts: the program and its arguments, e.g. [python, train.py]",
    "entry": "package.module:function",
    "gpus": "a list of different whole numbers from 1, e.g. [1, 2, 4]",
    "batch": "{global: N} or {min: A, max: B}, whole numbers from 1",
    "global": "a whole number from 1",
    "min": "a whole number from 1",
    "max": "a whole number from 1",
    "freeze": f"{{max_fraction: 0..1, rule: {' | '.join(get_args(RuleName))}}}",
    "max_fraction": "a number from 0 to 1",
    "rule": f"one of {', '.join(get_args(RuleName))}",
    "target": "{metric: NAME, value: NUMBER, mode: max | min}",
    "metric": "the name of the metric, e.g. accuracy",
    "value": "a finite number",
    "mode": "max or min",
    "max_epochs": "a whole number from 1",
    "weight": "a number above 0",
    "share": "true or false",
    "checkpoint": "the path of a folder",
    "profile": "the path of a file that `icefrog profile` wrote",
    "env": 'a mapping of names to texts, e.g. {OMP_NUM_THREADS: "1"} (numbers in quotes); '
    "not RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, CUDA_VISIBLE_DEVICES, nor ICEFROG_*",
    "labels": "a mapping of names to texts",
    "cwd": "the path of a folder",
    "stop_grace_s": "a number of seconds from 0",
    "nodes": "a list of {count: N, gpus: G}, whole numbers from 1",
    "count": "a whole number from 1",
    "gpu_type": "a text",
    "gpu_mem_bytes": "a number above 0, bytes",
}


def _describe(owner: type[BaseModel], loc: tuple[int | str, ...], forms: Mapping[str, str], needs: str) -> str:
    """What is allowed under the key (its own form, or the nearest one around it)."""
    for part in reversed(loc):
        if str(part) in forms:
            return forms[str(part)]
    required = [f.alias or n for n, f in owner.model_fields.items() if f.is_required()]
    return f"needs {', '.join(required)}{needs}"


_JOB = FileKind(
    name="job",
    example="name: a / command: [python, train.py] / gpus: [1, 2] / batch: {global: 64} / max_epochs: 10",
    forms=_FORMS,
    forbidden=("workload", "submit_s", "num_gpus", "duration_s"),
    needs=", and exactly one of command, entry",
)
_CLUSTER = FileKind(name="cluster", example="nodes: [{count: 12, gpus: 4}]", forms=_FORMS)
