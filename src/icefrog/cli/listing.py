"""``icefrog policies | workloads | schema``: what there is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from icefrog.policies import make_policy, policy_class, policy_names


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def policies(as_json: bool) -> None:
    """List the scheduling policies, their sources and their options."""
    rows = []
    for name in policy_names():
        cls = policy_class(name)
        schema = cls.Options.model_json_schema().get("properties", {})
        options = {
            key: {
                "default": _finite(field.default),
                "allowed": _allowed(schema[key]),
                "description": field.description or "",
            }
            for key, field in cls.Options.model_fields.items()
        }
        freezes = make_policy(name).pricing.freezing != "none"
        rows.append({"name": name, "source": cls.source, "oracle": cls.oracle, "freezes": freezes, "options": options})
    if as_json:
        click.echo(json.dumps(rows, indent=2, allow_nan=False))
        return
    for row in rows:
        click.echo(f"{row['name']:<13} {row['source']}")
        for key, option in row["options"].items():
            default = shorten(_typed(option["default"]), 40, placeholder=" ...")
            allowed = f"[{option['allowed']}] " if option["allowed"] else ""
            click.echo(f"    --set {row['name']}.{key}={default}  {allowed}{option['description']}")


def _allowed(schema: Mapping[str, Any]) -> str:
    """What an option may be, from its JSON schema: ``0..1``, ``> 0``, ``las | gittins``; empty: its type says it all."""
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "boolean":
        return "true | false"
    if "minimum" in schema and "maximum" in schema:
        return f"{schema['minimum']:g}..{schema['maximum']:g}"
    signs = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    return ", ".join(f"{sign} {schema[key]:g}" for key, sign in signs if key in schema)


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _typed(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def workloads(as_json: bool) -> None:
    """List the models of the catalogue, with where their numbers come from."""
    from icefrog.workloads import workload_rows

    rows = workload_rows()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for key in rows[0]:
        table.add_column(key, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=None if Console().is_terminal else 200).print(table)


@click.command()
@click.argument("kind", type=click.Choice(["job", "cluster"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a job or cluster file."""
    from icefrog.spec import cluster_schema, job_schema

    click.echo(json.dumps(job_schema() if kind == "job" else cluster_schema(), indent=2))
