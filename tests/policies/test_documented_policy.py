"""The policy that ``docs/add-a-policy.md`` walks through passes the contract."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from icefrog.policies.base import Policy
from icefrog.testing.policies import PolicyContract


@cache
def documented() -> type[Any]:
    text = (Path(__file__).parents[2] / "docs" / "add-a-policy.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    namespace: dict[str, Any] = {"__name__": "documented"}
    exec(compile(found[1], "add-a-policy.md", "exec"), namespace)
    las: type[Any] = namespace["Las"]
    return las


def make() -> Policy:
    policy: Policy = documented()(documented().Options())
    return policy


@pytest.mark.parametrize("make", [make], ids=["las"])
class TestContract(PolicyContract):
    pass
