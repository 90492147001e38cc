# SPDX-License-Identifier: Apache-2.0
"""What schemathesis is told about dsec: which things exist, what it must not do, and which answers are faults.

Loaded by schemathesis in its own process (SCHEMATHESIS_HOOKS). Not here: starting it (tests/host/test_openapi_fuzz.py).
"""

import json
import os
from typing import Any

import schemathesis  # type: ignore[import-not-found]  # of the tools' own environment

from libdsec.errors import BY_CODE
from libdsec.routes import PLAIN, RECORDS

#: Ids of a sandbox that stays as it is, of one to be moved about, of a running exec, and an image.
LIVE, MOVED, EXEC, IMAGE = (os.environ[f"DSEC_FUZZ_{name}"] for name in ("LIVE", "MOVED", "EXEC", "IMAGE"))
#: Routes that would take the ground from under the others.
_MOVES = {"delete", "stop", "start", "pause", "resume", "update"}
_WAIT_MOST_S = 0.05
#: What the host lacks, no room, a time that was up: said in 5xx and no fault of the daemon.
_HONEST = {"feature-missing", "no-capacity", "timed-out"}

schemathesis.serializer.alias(RECORDS, PLAIN)  # bytes as others: any will do for a body that must not be trusted


@schemathesis.hook  # type: ignore[misc]
def map_case(_context: Any, case: Any) -> Any:
    """Half of the cases meet things that are there; none waits long, reads this host or breaks what is shared."""
    name = case.operation.definition.raw["operationId"]
    real = _is_even(case)
    path = case.path_parameters
    if isinstance(path, dict) and name in _MOVES and path.get("id") == LIVE:
        path["id"] = MOVED  # schemathesis learns ids from answers
    if isinstance(path, dict) and real:
        path |= {"id": MOVED if name in _MOVES else LIVE} if "id" in path else {}
        path |= {"exec_id": EXEC} if "exec_id" in path else {}
    if isinstance(case.query, dict):
        _map_query(name, case.query, real=real)
    if isinstance(case.body, dict):
        _map_body(name, case.body, real=real)
    return case


def _is_even(case: Any) -> bool:
    """Follows from the case, so that a run can be repeated."""
    return len(repr((case.path_parameters, case.query, case.body))) % 2 == 0


def _map_query(name: str, query: dict[str, Any], *, real: bool) -> None:
    wait = query.get("wait_s")
    if isinstance(wait, int | float) and not isinstance(wait, bool):
        query["wait_s"] = min(wait, _WAIT_MOST_S)
    if name == "remove_file":
        query["path"] = "/root/fuzz"
    elif "path" in query and real:
        query["path"] = "/root/fuzz" if name.startswith("put") else "/etc/passwd"
    if "ref" in query and real:
        query["ref"] = IMAGE


def _map_body(name: str, body: dict[str, Any], *, real: bool) -> None:
    if name == "image_import" and "source" in body:
        body["source"] = "/nonexistent/archive.tar"
    if name in ("exec", "exec_start") and real:
        body["argv"] = ["true"]
        body.pop("exec_id", None)
    if name == "stop" and "grace_s" in body:
        body["grace_s"] = 0
    if name == "rename":
        body |= {"path": "/root/fuzz", "target": "/root/fuzz2"}
    if isinstance(body.get("spec"), dict) and real:
        body["spec"] = {key: value for key, value in body["spec"].items() if key not in ("workspace", "toolkits")}
        body["spec"]["image"] = IMAGE
    if name == "create_batch" and "count" in body:
        body["count"] = 1


@schemathesis.check  # type: ignore[misc]
def answers_are_honest(_context: Any, response: Any, case: Any) -> None:
    """No internal error, no lost sandbox, and each error code with the status that it stands for."""
    with open(os.environ["DSEC_FUZZ_SEEN"], "a") as seen:
        seen.write(f"{case.operation.definition.raw['operationId']} {response.status_code}\n")
    if response.status_code < 400 or not response.content:
        return
    error = json.loads(response.content)
    code = error["code"]
    assert response.status_code < 500 or code in _HONEST, f"{response.status_code} {error}"
    fitting = {BY_CODE[code].http_status, *((400, 404, 405, 415) if code == "invalid-spec" else ())}
    assert response.status_code in fitting, f"{response.status_code} for {code}"
    assert error["message"], error
