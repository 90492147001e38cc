# SPDX-License-Identifier: Apache-2.0
"""The README's session, typed as it stands there: a Debian from the archive, dsecctl, then Python."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.daemon import Daemon

CHECKOUT = Path(__file__).resolve().parents[2]
PATCH = textwrap.dedent(
    """\
    --- a/sums.py
    +++ b/sums.py
    @@ -1,2 +1,2 @@
     def add(a, b):
    -    return a - b
    +    return a + b
    """
)


def session() -> tuple[list[str], str]:
    """The commands of the first code block, without their remarks, and the Python text after them."""
    block = (CHECKOUT / "README.md").read_text().split("```")[1]
    commands = [re.split(r"\s{2,}", line[2:])[0] for line in re.findall(r"^# .*", block, re.MULTILINE)]
    python = "\n".join(line[4:] for line in re.findall(r"^(?:>>>|\.\.\.) .*", block, re.MULTILINE))
    return commands, python


def test_the_session_does_what_it_says(tmp_path: Path) -> None:
    commands, python = session()
    assert commands.pop() == "python3"
    assert len(commands) == 2

    with Daemon() as daemon:
        env = {**os.environ, "DSEC_SOCKET": str(daemon.socket), "PYTHONPATH": str(CHECKOUT)}

        def run(argv: list[str]) -> str:
            done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
            assert done.returncode == 0, f"{argv}: {done.stderr}"
            return done.stdout

        def dsecctl(*args: str) -> str:
            return run([sys.executable, "-m", "dsecctl", *args])

        (program, *build), (_, *first) = map(shlex.split, commands)
        assert program == "dsecctl"
        dsecctl(*build)
        assert dsecctl(*first) == "42\n"

        project, toolkit = tmp_path / "project", tmp_path / "toolkit"
        project.mkdir()
        (project / "sums.py").write_text("def add(a, b):\n    return a - b\n")
        (project / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n")
        (toolkit / "opt/harness").mkdir(parents=True)
        (toolkit / "opt/harness/version").write_text("1.4\n")
        dsecctl("image", "import", str(project), "swe/django:1234", "--prefix", "/workspace")
        dsecctl("image", "import", str(toolkit), "harness:1.4")
        (tmp_path / "session.py").write_text(f"patch = {PATCH!r}\n{python}\n")
        assert "1 passed" in run([sys.executable, "session.py"])
        assert dsecctl("ps", "--quiet") == ""
