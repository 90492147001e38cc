# SPDX-License-Identifier: Apache-2.0
"""Scopes by uid and group, and what a principal may touch."""

import pytest

from dsecd.core.principal import Principal, from_peer
from libdsec.errors import Denied
from libdsec.routes import Scope

USER = {Scope.READ, Scope.SANDBOX}


def peer(uid: int, *groups: int, gid: int = 1000, admin_gid: int | None = 50) -> Principal:
    return from_peer(uid, gid, 1, frozenset(groups), admin_gid=admin_gid)


@pytest.mark.parametrize(
    ("principal", "scopes"),
    [
        (peer(0), set(Scope)),
        (peer(0, admin_gid=None), set(Scope)),
        (peer(1000), USER),
        (peer(1000, 49, 51), USER),
        (peer(1000, 50), set(Scope)),
        (peer(1000, gid=50), set(Scope)),
        (peer(1000, 50, admin_gid=None), USER),
    ],
)
def test_scopes_follow_uid_and_group(principal: Principal, scopes: set[Scope]):
    assert principal.scopes == scopes


def test_a_missing_scope_is_denied_by_name():
    peer(1000).require(Scope.SANDBOX)
    with pytest.raises(
        Denied, match=r"import 'x': needs scope 'image', uid 1000 has read, sandbox"
    ) as caught:
        peer(1000).require(Scope.IMAGE, "import 'x'")
    assert caught.value.details == {"scope": "image"}


def test_only_owner_and_administrators_may_touch():
    peer(1000).may_touch(1000)
    peer(1001, 50).may_touch(1000)
    peer(0).may_touch(1000)
    with pytest.raises(Denied, match=r"stop 'web': it belongs to uid 1001, you are uid 1000"):
        peer(1000).may_touch(1001, "stop 'web'")
