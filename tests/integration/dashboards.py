"""A cluster with a dashboard, for its tests and its pictures: its settings and its address."""

import json
import re

from baton.core.tokens import digest_of
from tests.integration.cluster import eventually
from tests.ports import free_port

TOLD = re.compile(r"dashboard at (http://\S+) ")


def settings_with_dashboard(folder, people, *, own, classes):
    """Settings of a `Cluster`. `people` is {name: (scope, token)}. `own` is the owner of the token that the
    cluster's own processes show. The first of the SLO `classes` is the default one."""
    tokens, own_token = folder / "tokens.txt", folder / "own.token"
    tokens.write_text("".join(f"{n} {scope} {digest_of(token)}\n" for n, (scope, token) in people.items()))
    own_token.write_text(people[own][1])
    return {
        "engine__threads": 1,
        "slo__classes": json.dumps(classes),
        "slo__default": next(iter(classes)),
        "dashboard__enabled": True,
        "dashboard__port": free_port(),
        "cluster__router_silence_s": 60,
        "access__tokens": tokens,
        "access__token": own_token,
    }


def dashboard_url(cluster):
    """Wait until the dashboard has printed its URL; after restarts, the last one counts."""

    def told():
        return next((m.group(1) for line in reversed(cluster.log) if (m := TOLD.search(line))), None)

    return eventually("the dashboard says where it is", told, timeout_s=120)
