# SPDX-License-Identifier: Apache-2.0
"""Mechanisms: one module wraps one Linux interface.

What belongs here: syscalls, pseudo file systems and the few programs (mkfs.erofs) that are the only road to a
kernel feature, each behind typed functions that raise OSError with the path in it.  What does not: policy,
the idea of a sandbox, state that outlives a call.  Nothing here imports anything of ours outside this
package.

Functions whose docstring says "Blocks" are called from a thread, never from the event loop.
"""
