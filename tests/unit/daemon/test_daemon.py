# SPDX-License-Identifier: Apache-2.0
"""The command line of the daemon, and what it says of itself."""

import configparser
from pathlib import Path

import pytest

from dsecd import __version__, daemon

ROOT = Path(__file__).resolve().parents[3]


def test_the_version_is_the_one_that_is_packaged(capsys: pytest.CaptureFixture[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == __version__
    with pytest.raises(SystemExit) as caught:
        daemon.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"dsecd {__version__}\n"


def test_check_config_tells_every_fault_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dsecd.toml"
    file.write_text(f'state_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\n')
    assert daemon.main(["--config", str(file), "--check-config"]) == 0
    file.write_text('state_dir = "x"\nbogus = 1\n')
    assert daemon.main(["--config", str(file), "--check-config"]) == daemon.EX_CONFIG
    assert capsys.readouterr().err.splitlines() == [
        f"dsecd: {file}: state_dir: must be an absolute path without '..', got 'x'",
        f"dsecd: {file}: bogus: unknown key",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["dsecd.toml"]


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [("3000000", None, 1.0), ("3000000", "1", None), ("0", None, None), ("", None, None), (None, None, None)],
)
def test_the_watchdog_is_fed_three_times_in_its_time(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, expected: float | None
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert daemon._watchdog_s() == expected
