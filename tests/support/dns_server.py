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
    for name in records:
        chain, end = _chain(name, records)
        for kind in ("A", "AAAA"):
            found = [line for one, line in records.get(end, ()) if one == kind]
            if chain or found:
                zone[name, kind] = chain + found
    with open(sys.argv[2], "a", buffering=1) as log, Server(address, int(port), zone, log=log):
        sys.stdin.read()


def _chain(name: str, records: dict[str, list[tuple[str, str]]]) -> tuple[list[str], str]:
    """The CNAMEs that begin at a name, as lines, and where they end."""
    chain: list[str] = []
    while links := [line for kind, line in records.get(name, ()) if kind == "CNAME" and line not in chain]:
        chain.append(links[0])
        name = links[0].split()[-1].removesuffix(".")
    return chain, name


if __name__ == "__main__":
    main()
