# SPDX-License-Identifier: Apache-2.0
"""Virtual machine monitors behind one small interface (``base.py``), for the microvm and fullvm backends.

Not here: what a sandbox is.
"""
