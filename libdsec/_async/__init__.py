# SPDX-License-Identifier: Apache-2.0
"""The asyncio form of the SDK, from which ``tools/unasync.py`` makes the synchronous one. Import from ``libdsec``."""
