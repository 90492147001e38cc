# SPDX-License-Identifier: Apache-2.0
"""``python3 -m dsecd``. Here: nothing but the call of ``dsecd.daemon.main``."""

import sys

from dsecd.daemon import main

sys.exit(main())
