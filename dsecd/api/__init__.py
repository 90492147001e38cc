# SPDX-License-Identifier: Apache-2.0
"""HTTP over a Unix socket: peer credentials, limits, one handler per route of ``libdsec.routes``.

Here: turning requests into calls of ``dsecd.core`` and values and errors into responses. Not here: any
policy.
"""
