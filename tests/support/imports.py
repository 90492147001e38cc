# SPDX-License-Identifier: Apache-2.0
"""Images that tests give their daemons.

Here: importing what ``rootfs.py`` builds. Not here: building it, and imports that are what a test is about.
"""

from tests.support.daemon import Daemon
from tests.support.rootfs import debian_tar


def import_python(daemon: Daemon, name: str) -> None:
    """A minimal Debian with Python, for hostile programs and for peers that run inside."""
    with daemon.client() as client:
        tar = str(debian_tar(include=("python3",)))
        client.finish(client.image_import(name=name, source=tar, kind="rootfs-tar"))
