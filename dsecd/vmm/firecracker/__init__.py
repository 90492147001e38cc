# SPDX-License-Identifier: Apache-2.0
"""Firecracker as a driver: its API, its jail, its vsock.

What belongs here: everything that only Firecracker needs.  What does not: what a machine is made of (backends).
"""
