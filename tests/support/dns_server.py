# SPDX-License-Identifier: Apache-2.0
"""A DNS server in a process of its own: ``python3 -m tests.support.dns_server ADDRESS:PORT LOG``.

It reads lines of ``NAME TTL TYPE VALUE`` until a line that is a dot, answers from them, and writes the names that it is
asked for to LOG.
"""

import sys

from tests.support.dns import Server


def main() -> None:
    address, _, port = sys.argv[1].rpartition(":")
    zone: dict[tuple[str, str], list[str]] = {}
    records: dict[str, list[tuple[str, str]]] = {}
    for line in iter(sys.stdin.readline, ".\n"):
        if words := line.split():
            name, ttl, kind, value = words
            records.setdefault(name, []).append((kind, f"{name}. {ttl} IN {kind} {value}"))
    for name, lines in records.items():
        for kind in ("A", "AAAA"):
            chain = [line for found, line in lines if found == "CNAME"]
            target = chain[0].split()[-1].removesuffix(".") if chain else name
            end = [line for found, line in records.get(target, ()) if found == kind]
            if chain or end:
                zone[name, kind] = chain + end
    with open(sys.argv[2], "a", buffering=1) as log, Server(address, int(port), zone, log=log):
        sys.stdin.read()


if __name__ == "__main__":
    main()
