# SPDX-License-Identifier: Apache-2.0
"""The synchronous form of the SDK, made by ``tools/unasync.py`` but for ``primitives.py``. Import from ``libdsec``."""
