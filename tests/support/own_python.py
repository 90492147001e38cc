# SPDX-License-Identifier: Apache-2.0
"""The smallest root file system in which tests' programs run: the Python of the machine that the tests run on.

Here: collecting its files, for a machine on which unpacking a whole Debian would take minutes. Not here: importing it.
"""

import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

#: What the programs of tests/support import, and what that loads later.
_IMPORTS = (
    "collections.abc contextlib encodings.idna errno fcntl json os re socket stringprep struct subprocess sys "
    "threading time typing unicodedata"
)
_LIST = (
    f"import sys, {_IMPORTS.replace(' ', ', ')}\n"
    "print(*sorted({m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)}), sep='\\n')"
)


def tar(path: Path, *programs: str) -> Path:
    """Write a tar of /usr/bin/python3 with the modules named above, other programs, and the libraries of all."""
    listed = [sys.executable, "-I", "-S", "-X", "frozen_modules=off", "-c", _LIST]
    modules = [Path(line) for line in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()]
    program = Path(sys.executable).resolve()
    needing = [program, *map(Path, programs), *(module for module in modules if module.suffix == ".so")]
    linked = subprocess.run(["ldd", *needing], capture_output=True, text=True, check=True).stdout
    libraries = {Path(found) for found in re.findall(r"(?:=> )?(/\S+) \(0x", linked)}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, dereference=True) as archive:
        for folder in ("etc", "proc", "root", "sys", "dev", "tmp", "run"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(member)
        users = b"root:x:0:0:root:/root:/bin/sh\n"
        member = tarfile.TarInfo("etc/passwd")
        member.size = len(users)
        archive.addfile(member, io.BytesIO(users))
        for source in sorted({*modules, *libraries, *map(Path, programs)}):
            archive.add(source, str(source).removeprefix("/"))
        archive.add(program, "usr/bin/python3")
    return path
