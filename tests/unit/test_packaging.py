# SPDX-License-Identifier: Apache-2.0
"""The Debian packaging agrees with the code: versions, files, groups, paths; its units and its conffile are read."""

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsecd
import libdsec
from dsecd.config import Config, load
from dsecd.daemon import EX_CONFIG
from tests.support.source import ROOT, declared_packages, setup_cfg, tracked_files

DEBIAN = ROOT / "packaging" / "debian"
UNITS = ROOT / "systemd"

#: What `systemd-analyze security` may find at most, in tenths: the unit's comments say why it is not less.
EXPOSURE = {"dsecd.service": 70, "dsec-dns.service": 14}
#: Settings that give a unit a mount namespace of its own, or filter devices for all sandboxes: systemd.exec(5).
VOID = re.compile(
    r"^(Protect(System|Home|Proc|Clock|Hostname|Kernel\w+|ControlGroups)|Private\w+|ProcSubset|RootDirectory|RootImage"
    r"|(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec)Paths|Bind(ReadOnly)?Paths|TemporaryFileSystem|Mount\w+"
    r"|DynamicUser|Device(Allow|Policy)|RestrictNamespaces|NoNewPrivileges)$"
)


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """A unit's sections; a key may come several times."""
    sections: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            current.setdefault(key, []).append(value)
    return sections


def lists(*suffixes: str) -> Iterator[tuple[str, str]]:
    """Each line of debhelper's lists: the list's name and the line."""
    for path in sorted(DEBIAN.iterdir()):
        if path.suffix in suffixes:
            yield from ((path.name, line) for line in path.read_text().splitlines() if line)


# --- versions and files ------------------------------------------------------------------------------------------


def test_one_version_everywhere() -> None:
    found = re.match(r"dsec \(([^)]+)\) ", (DEBIAN / "changelog").read_text())
    assert found
    assert {found[1], setup_cfg()["metadata"]["version"], libdsec.__version__, dsecd.__version__} == {found[1]}


def test_what_is_installed_is_in_the_repository_or_made_by_the_rules() -> None:
    rules = (DEBIAN / "rules").read_text()
    tracked = tracked_files()
    entries = list(lists(".install", ".manpages", ".docs"))
    assert len(entries) > 15
    for name, line in entries:
        source = line.split()[0]
        made = source.removeprefix("build/packaging/")
        if made != source:
            assert f">$(MADE)/{made}" in rules, (name, source)
        elif source.startswith("guest-kernel/"):  # made by kernel/build, fetched by build-deb
            assert f"mkdir \"$source/{source.partition('/')[0]}\"" in (DEBIAN.parent / "build-deb").read_text()
        elif source not in ("build/agent/dsec-agent", "build/ebpf/egress.bpf.o"):  # their own Makefiles make them
            assert any(path == source or path.startswith(f"{source}/") for path in tracked), (name, source)


def test_each_step_of_the_build_is_told_once() -> None:
    # Of two recipes for a target make only warns, and forgets the first.
    targets = re.findall(r"^(\w+):", (DEBIAN / "rules").read_text(), re.MULTILINE)
    assert len(targets) > 8 and len(targets) == len(set(targets))


def test_all_of_what_there_is_to_install_is_installed() -> None:
    sources = {line.split()[0] for _, line in lists(".install", ".manpages", ".docs")}
    assert {name.partition(".")[0] for name in declared_packages()} <= sources
    assert {f"docs/man/{path.name}" for path in (ROOT / "docs/man").iterdir()} <= sources
    units = {f"systemd/{path.name}" for path in UNITS.iterdir() if path.suffix != ".md"}
    assert units <= sources


def test_the_agent_lies_where_the_daemon_looks() -> None:
    targets = {Path(line.split()[0]).name: line.split()[1] for _, line in lists(".install")}
    assert Path("/", targets["dsec-agent"], "dsec-agent") == Path("/usr/lib/dsec/dsec-agent")
    assert targets["egress.bpf.o"] == targets["dsec-agent"]
    assert f'"/{targets["dsec-agent"]}"' in (ROOT / "dsecd/config.py").read_text()


@pytest.mark.parametrize(
    "path", [DEBIAN / "dsecd.prerm", DEBIAN / "dsecd.postrm", DEBIAN / "tests/smoke", UNITS / "dsec-stop-all"]
)
def test_scripts_parse(path: Path) -> None:
    assert subprocess.run(["dash", "-n", path], check=False).returncode == 0


# --- the conffile ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conffile() -> str:
    command = [sys.executable, str(ROOT / "tools/manpages.py"), "--conffile"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_conffile_changes_nothing(conffile: str, tmp_path: Path) -> None:
    file = tmp_path / "dsecd.toml"
    file.write_text(conffile)
    assert load(file) == Config()


def test_the_conffile_shows_every_setting_with_its_default(conffile: str, tmp_path: Path) -> None:
    file = tmp_path / "dsecd.toml"
    file.write_text(re.sub(r"^#(?! |$)", "", conffile, flags=re.MULTILINE))
    shown = load(file)
    assert shown.model_dump(exclude={"agent"}) == Config().model_dump(exclude={"agent"})
    assert str(shown.agent) == "/usr/lib/dsec/dsec-agent"
    assert shown.model_fields_set == set(Config.model_fields)


# --- units and groups --------------------------------------------------------------------------------------------


def test_the_socket_is_the_one_that_clients_look_for() -> None:
    socket, config = unit("dsecd.socket")["Socket"], Config()
    assert socket["ListenStream"] == [str(config.socket)]
    assert socket["SocketGroup"] == [config.socket_group]
    assert int(socket["SocketMode"][0], 8) == config.socket_mode


def test_groups_are_made() -> None:
    groups = [line.split()[1] for _, line in lists(".sysusers") if line.startswith("g ")]
    assert groups == [Config().socket_group, Config().admin_group]


def test_dns_runs_as_a_user_that_is_made_and_may_bind_its_port_and_no_more() -> None:
    users = [line.split()[1] for _, line in lists(".sysusers") if line.startswith("u ")]
    service = unit("dsec-dns.service")["Service"]
    assert users == service["User"] == service["Group"]
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == ["CAP_NET_BIND_SERVICE"]


def test_directories_are_the_daemons() -> None:
    service, config = unit("dsecd.service")["Service"], Config()
    assert f"/run/{service['RuntimeDirectory'][0]}" == str(config.runtime_dir)
    assert f"/var/lib/{service['StateDirectory'][0]}" == str(config.state_dir)
    assert f"/var/cache/{service['CacheDirectory'][0]}" == str(config.cache_dir)
    modes = {line.split()[1]: line.split()[2] for _, line in lists(".tmpfiles") if line.startswith("d ")}
    assert modes == {
        str(config.runtime_dir): service["RuntimeDirectoryMode"][0],
        str(config.state_dir): service["StateDirectoryMode"][0],
        str(config.cache_dir): service["CacheDirectoryMode"][0],
    }


def test_sandboxes_outlive_the_unit() -> None:
    service = unit("dsecd.service")["Service"]
    wanted = {"KillMode": "process", "Delegate": "yes", "RuntimeDirectoryPreserve": "yes", "OOMPolicy": "continue"}
    assert {key: service[key][0] for key in wanted} == wanted
    assert service["DelegateSubgroup"] == ["supervisor"]
    assert service["RestartPreventExitStatus"] == [str(EX_CONFIG)]


def test_no_setting_that_looks_like_protection_and_is_none() -> None:
    assert [key for key in unit("dsecd.service")["Service"] if VOID.match(key)] == []
    assert VOID.match("ProtectSystem") and VOID.match("PrivateTmp") and not VOID.match("ProtectNothing")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    text = (UNITS / "dsecd.service").read_text()
    # The program that verify looks for, and the pages, come with the package.
    (tmp_path / "dsecd.service").write_text(text.replace("ExecStart=/usr/sbin/dsecd", "ExecStart=/bin/true"))
    shutil.copy(UNITS / "dsecd.socket", tmp_path)
    for name, program in (("dsec-dns.service", "/usr/sbin/dsec-dns"), ("dsec-zram.service", "/usr/lib/dsec/dsec-zram")):
        (tmp_path / name).write_text((UNITS / name).read_text().replace(f"={program}", "=/bin/true"))

    def verify() -> tuple[int, str]:
        names = ("dsecd.service", "dsecd.socket", "dsec-dns.service", "dsec-zram.service")
        units = [str(tmp_path / name) for name in names]
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert verify() == (0, "")
    with (tmp_path / "dsecd.service").open("a") as file:
        file.write("NoSuchSetting=1\n")
    assert "NoSuchSetting" in verify()[1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("name", "most"), EXPOSURE.items())
def test_exposure_does_not_grow(name: str, most: int) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={most}"]
    done = subprocess.run([*command, UNITS / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.splitlines()[-1]
    assert f"{most / 10} " in done.stdout.splitlines()[-1]


def test_autopkgtests_exist() -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[test]\n" + (DEBIAN / "tests/control").read_text())
    for name in parser["test"]["Tests"].split():
        assert (DEBIAN / "tests" / name).stat().st_mode & 0o111
