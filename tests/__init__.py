# SPDX-License-Identifier: Apache-2.0
"""Tests; see the README beside this file for which kind goes where."""
