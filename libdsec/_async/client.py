# SPDX-License-Identifier: Apache-2.0
"""The client: every route of the API as a method.

Here: what ties the groups of calls together, and waiting for operations. Not here: the calls (``calls.py``,
``files.py``, ``stream.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from libdsec import types as t
from libdsec._async.calls import (
    POLL_S,
    AsyncExecCalls,
    AsyncHostCalls,
    AsyncImageCalls,
    AsyncSandboxCalls,
    AsyncSnapshotCalls,
)
from libdsec._async.files import AsyncTransfers
from libdsec.errors import BackendFailed, from_wire


class AsyncClient(
    AsyncHostCalls, AsyncSandboxCalls, AsyncSnapshotCalls, AsyncExecCalls, AsyncTransfers, AsyncImageCalls
):
    """All of the daemon's API over its Unix socket: one method per route, named as the route.

    Close it, or use it in a ``with`` block. ``socket`` defaults to $DSEC_SOCKET, then /run/dsec/dsecd.sock.
    """

    async def finish(
        self, operation: t.Operation, *, progress: Callable[[t.Operation], None] | None = None
    ) -> t.Operation:
        """Wait for an operation; ``progress`` sees each change. Raises the operation's own error when it failed."""
        while operation.state is t.OperationState.RUNNING:
            if progress is not None:
                progress(operation)
            operation = await self.operation(operation.id, wait_s=POLL_S if progress is None else 1.0)
        if progress is not None:
            progress(operation)
        if operation.error is not None:
            raise from_wire(operation.error.model_dump())
        if operation.state is t.OperationState.CANCELLED:
            raise BackendFailed(f"{operation.kind} '{operation.id}': it was cancelled")
        return operation
