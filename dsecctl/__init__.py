# SPDX-License-Identifier: Apache-2.0
"""dsecctl: the command line. It knows libdsec only; whatever it can do, a program can do through libdsec."""
