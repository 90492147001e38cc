# SPDX-License-Identifier: Apache-2.0
"""Tests against the real kernel of the machine they run on, as root."""
