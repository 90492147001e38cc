# SPDX-License-Identifier: Apache-2.0
"""Pure tests: no root rights, no kernel state, no clock."""
