# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what SPECIFICATION.md promises in figures, measured beside its peers."""
