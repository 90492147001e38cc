# SPDX-License-Identifier: Apache-2.0
"""``python3 -m dsecctl``, and what the ``dsecctl`` program starts."""

from dsecctl.cli import main

if __name__ == "__main__":
    main()
