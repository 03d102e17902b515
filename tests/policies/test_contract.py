"""Every policy passes the published contract."""

from functools import partial

import pytest

from icefrog.policies import make_policy, policy_names
from icefrog.testing.policies import PolicyContract


@pytest.mark.parametrize("make", [partial(make_policy, name) for name in policy_names()], ids=policy_names())
class TestContract(PolicyContract):
    pass
