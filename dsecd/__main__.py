# SPDX-License-Identifier: Apache-2.0
import sys

from dsecd.daemon import main

sys.exit(main())
