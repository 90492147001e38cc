# SPDX-License-Identifier: Apache-2.0
"""What holds for unit tests: examples that Hypothesis makes may take as long as a busy machine needs for them.

They are the same in each run, so that a run tells of what was changed; ``DSEC_TEST_LONG=1`` makes others each time.
"""

import os

from hypothesis import HealthCheck, settings

# Its own limits, of 200 ms for an example among them, are of the clock on the wall: beside load they fail tests.
settings.register_profile(
    "dsec", deadline=None, suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("DSEC_TEST_LONG"),
)  # fmt: skip
settings.load_profile("dsec")
