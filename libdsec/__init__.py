# SPDX-License-Identifier: Apache-2.0
"""libdsec: the Python SDK of dsec and its wire contract."""
