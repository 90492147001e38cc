# SPDX-License-Identifier: Apache-2.0
"""Kernel configurations: what is read out of them, what is wanted of them, and that the fragments ask for it."""

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest

from dsecd import kernelcheck
from dsecd.linux import kconfig
from dsecd.linux.feature import Feature, no
from dsecd.linux.mechanisms import MECHANISMS
from tests.support.source import ROOT

HEAD = "#\n# Automatically generated file; DO NOT EDIT.\n# Linux/x86 {} Kernel Configuration\n#\n"
FRAGMENTS = sorted((ROOT / "kernel/fragments").glob("*.config"))


def asked() -> dict[str, set[str]]:
    """What the fragments say about each option."""
    found: dict[str, set[str]] = {}
    for path in FRAGMENTS:
        for line in path.read_text().splitlines():
            if line.startswith("CONFIG_"):
                name, _, value = line.removeprefix("CONFIG_").partition("=")
                found.setdefault(name, set()).add(value)
    return found


def everything(version: str = "6.12.118") -> str:
    """A configuration that lacks nothing."""
    options = {option for table in kernelcheck.ROLES.values() for need in table for option in need.options}
    return HEAD.format(version) + "".join(f"CONFIG_{option}=y\n" for option in sorted(options))


def test_options_are_what_is_built_in_or_a_module() -> None:
    config = kconfig.parse(
        HEAD.format("6.12.118") + 'CONFIG_A=y\nCONFIG_B_2=m\n# CONFIG_C is not set\nCONFIG_E="y"\nXCONFIG_F=y\n'
    )
    assert config == kconfig.Config("6.12.118", frozenset(("A", "B_2")))
    assert config.lacks(("A", "C", "E")) == ["C", "E"]


def test_a_file_is_read_plain_and_compressed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "config", tmp_path / "config.gz"
    plain.write_text(everything())
    packed.write_bytes(gzip.compress(everything().encode()))
    assert kconfig.read(plain) == kconfig.read(packed)
    assert kconfig.read(plain).version == "6.12.118"


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x7fELF\x02\x01", gzip.compress(b"\0" * (9 << 20))])
def test_what_is_no_configuration_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no option|larger"):
        kconfig.read(path)
    assert kernelcheck.main([str(path)]) == 2


def test_a_kernel_with_everything_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config").write_text(everything())
    assert kernelcheck.main(["--role", "host", "--role", "guest", str(tmp_path / "config")]) == 0
    assert "MISSING" not in capsys.readouterr().out


@pytest.mark.parametrize(("role", "option"), [("host", "SCHED_CORE"), ("guest", "VIRTIO_PMEM")])
def test_what_a_kernel_lacks_is_named_with_its_purpose(
    role: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    path.write_text(everything().replace(f"CONFIG_{option}=y", f"# CONFIG_{option} is not set"))
    assert kernelcheck.main(["--role", role, str(path)]) == 1
    missing = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("ok")]
    need = next(need for need in kernelcheck.ROLES[role] if option in need.options)
    assert len(missing) == 1
    assert all(text in missing[0] for text in (f"CONFIG_{option}", f"Linux {need.since}", need.why))
    kernelcheck.main(["--json", "--role", role, str(path)])
    document = json.loads(capsys.readouterr().out)
    assert [row["option"] for row in document["options"] if not row["found"]] == [f"CONFIG_{option}"]


def test_a_kernel_that_is_too_old_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config").write_text(everything("6.1.0"))
    assert kernelcheck.main([str(tmp_path / "config")]) == 1
    assert "erofs-file: needs Linux 6.12, this is 6.1.0" in capsys.readouterr().out


def test_an_absence_names_the_option_that_this_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's own sentence: the table is one."""
    monkeypatch.setattr(kconfig, "running", lambda: kconfig.Config("6.12.1", frozenset(("A",))))
    thing = Feature("thing", "", "testing", lambda: no("absent"), "Install it.", options=("A", "B"))
    assert thing.status().reason == "absent (this kernel is built without CONFIG_B)"
    monkeypatch.setattr(kconfig, "running", lambda: None)
    assert thing.status().reason == "absent"


def test_the_table_of_hosts_is_that_of_the_doctor() -> None:
    assert {(item.name, item.options) for item in MECHANISMS if item.options} == {
        (need.name, need.options) for need in kernelcheck.HOST
    }
    assert len(kernelcheck.HOST) > 12


def test_the_fragments_ask_for_all_that_is_wanted_and_agree() -> None:
    found = asked()
    assert [name for name, values in found.items() if len(values) > 1] == []
    wanted = {option for table in kernelcheck.ROLES.values() for need in table for option in need.options}
    assert sorted(option for option in wanted if found.get(option) != {"y"}) == []


def test_fragments_are_settings_and_comments_alone() -> None:
    assert len(FRAGMENTS) == 3
    for path in FRAGMENTS:
        lines = path.read_text().splitlines()
        assert [line for line in lines if line and not re.match(r'# |CONFIG_\w+=(y|n|-?\d+|"[^"]*")$', line)] == []


@pytest.mark.parametrize("name", ["kernel/build", "kernel/check"])
def test_scripts_parse_and_refuse_what_they_do_not_know(name: str) -> None:
    shell = "bash" if name == "kernel/build" else "sh"
    assert subprocess.run([shell, "-n", ROOT / name], check=False).returncode == 0
    done = subprocess.run([ROOT / name, "--nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--nonsense" in done.stderr
