# SPDX-License-Identifier: Apache-2.0
"""The node daemon.  Sub-packages from the client inwards: api, core, backends, vmm, linux."""

__version__ = "0.1.0"
