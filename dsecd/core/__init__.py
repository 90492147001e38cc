# SPDX-License-Identifier: Apache-2.0
"""What the daemon decides and remembers: sandboxes, images, operations, events, principals.

Here: policy and state, spoken in libdsec's types and errors. Not here: HTTP (``dsecd.api``), how one kind of
sandbox is made (``dsecd.backends``), kernel interfaces (``dsecd.linux``).
"""
