# SPDX-License-Identifier: Apache-2.0
"""The commands: where each is, and under which heading the help lists it.

Here: the one list. A new command is a function in a module of its group and a line here.
"""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "Run": {
        "run": "run:run",
        "exec": "execs:exec_",
        "attach": "execs:attach",
        "logs": "execs:logs",
        "kill": "execs:kill",
        "execs": "execs:execs",
        "cp": "files:cp",
    },
    "Sandboxes": {
        "create": "create:create",
        "ps": "sandboxes:ps",
        "inspect": "sandboxes:inspect",
        "stats": "sandboxes:stats",
        "net": "network:net",
        "forward": "network:forward",
        "trace": "trace:trace",
        "update": "sandboxes:update",
        "fork": "sandboxes:fork",
        "pause": "sandboxes:pause",
        "resume": "sandboxes:resume",
        "stop": "sandboxes:stop",
        "start": "sandboxes:start",
        "wait": "sandboxes:wait",
        "rm": "sandboxes:rm",
    },
    "Images": {"image": "images:image", "snapshot": "snapshots:snapshot"},
    "Host": {
        "host": "host:host",
        "doctor": "host:doctor",
        "mem": "memory:mem",
        "events": "host:events",
        "ops": "host:ops",
        "api": "raw:api",
        "completion": "raw:completion",
    },
}
COMMANDS: dict[str, str] = {name: where for group in GROUPS.values() for name, where in group.items()}
