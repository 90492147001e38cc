# SPDX-License-Identifier: Apache-2.0
"""``python3 -m dsecd.dns``. Here: nothing but the call of ``dsecd.dns.daemon.main``."""

import sys

from dsecd.dns.daemon import main

sys.exit(main())
