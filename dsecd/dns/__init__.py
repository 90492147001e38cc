# SPDX-License-Identifier: Apache-2.0
"""dsec-dns: the process that answers the DNS queries of sandboxes, apart from the daemon and without its rights.

Here: everything that runs in that process, and what it shares with the daemon: ``names`` (what a pattern
means), ``addresses`` (what a name may never lead to unasked) and ``frames`` (the words between the two). Not
here: opening addresses and knowing policies, which is the daemon's (``dsecd.backends``).

A query comes in by ``listeners``, is judged by ``proxy``, looked up by ``lookup`` and ``upstream``; the daemon
is asked by ``link`` to open what came back; only then is it answered.
"""
