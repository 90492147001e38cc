# SPDX-License-Identifier: Apache-2.0
"""Tests on the test host: a Debian 13 with systemd in a virtual machine."""
