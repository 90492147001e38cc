# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: the programs they start meet the signals as a user's shell would leave them."""

import signal

# Whoever runs the tests in the background, or under a tool that ignores it, hands an ignored SIGINT down to every
# program that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
