# SPDX-License-Identifier: Apache-2.0
"""The life of an installed dsec on one host, from apt install to apt purge: the tests run in this order."""

import json
import time
from dataclasses import dataclass

import pytest

from tests.vm import packages
from tests.vm.host import VmHost
from tests.vm.packages import IMAGE

_SANDBOX = "survivor"
#: Writes the number of its round each second; a gap or a restart would show.
_COUNTER = "n=0; while :; do n=$((n + 1)); echo $n >>/root/rounds; sleep 1; done"


@dataclass
class Installed:
    """A host with dsec on it, and what it held before."""

    vm: VmHost
    files_before: frozenset[str]
    accounts_before: str

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        shown = self.vm.run(["systemctl", "show", unit, *(f"--property={name}" for name in names)]).text
        return dict(line.split("=", 1) for line in shown.splitlines())

    def api(self, path: str) -> dict[str, object]:
        """An answer of the daemon's, without any program of ours in between."""
        answer = self.vm.run(["curl", "--silent", "--fail", "--max-time", "100", "--unix-socket",
                              "/run/dsec/dsecd.sock", f"http://d{path}"]).text  # fmt: skip
        loaded = json.loads(answer)
        assert isinstance(loaded, dict)
        return loaded

    def cgroup(self, sandbox: str) -> str:
        """The sandbox's cgroup, found by its name."""
        found = self.vm.run(["find", "/sys/fs/cgroup", "-type", "d", "-name", f"*-{sandbox}"]).text.split()
        assert len(found) == 1, found
        return found[0]

    def processes(self, sandbox: str) -> list[str]:
        """Pid and start time of each process in the sandbox, from the kernel."""
        script = (
            'for p in $(find "$0" -name cgroup.procs -exec cat {} +); do '
            'sed "s/.*) //" /proc/$p/stat | cut -d" " -f20 | sed "s/^/$p /"; done | sort -n'
        )
        return self.vm.run(["sh", "-euc", script, self.cgroup(sandbox)]).text.splitlines()

    def rounds(self) -> list[int]:
        """What the counter in the sandbox has written, read from inside."""
        text = self.vm.run(["dsecctl", "exec", _SANDBOX, "cat", "/root/rounds"]).text
        return [int(line) for line in text.splitlines()]

    def main_pid(self) -> str:
        return self.show("dsecd.service", "MainPID")["MainPID"]

    def wait_for_new_daemon(self, old: str) -> None:
        """Until systemd has another main process that says it is ready."""
        deadline = time.monotonic() + 120
        while True:
            state = self.show("dsecd.service", "MainPID", "ActiveState")
            if state["MainPID"] not in ("0", old) and state["ActiveState"] == "active":
                return
            assert time.monotonic() < deadline, state
            time.sleep(0.5)


@pytest.fixture(scope="module")
def built() -> None:
    """Fails the module where there is no package to test: before a machine is made."""
    packages.built()


@pytest.fixture(scope="module")
def installed(built: None, vm: VmHost) -> Installed:
    before = packages.files(vm)
    accounts = vm.run("getent passwd; getent group").text
    packages.install(vm)
    return Installed(vm, before, accounts)


@pytest.fixture(scope="module")
def with_sandbox(installed: Installed) -> Installed:
    packages.import_debian(installed.vm)
    installed.vm.run(["dsecctl", "create", "--name", _SANDBOX, IMAGE, "--", "sh", "-c", _COUNTER])
    return installed


def test_apt_installs_all_of_it(installed: Installed) -> None:
    states = installed.vm.run(["dpkg-query", "-W", "-f", "${Status}\n", "dsecd", "python3-libdsec"]).text
    assert states.splitlines() == ["install ok installed"] * 2
    assert installed.vm.run(["dpkg", "--audit"]).text == ""
    assert installed.vm.run(["systemctl", "--failed", "--no-legend"]).text == ""


def test_its_files_are_as_they_were_packed(installed: Installed) -> None:
    assert installed.vm.run(["dpkg", "--verify", "dsecd", "python3-libdsec"]).text == ""


def test_the_socket_is_for_the_group(installed: Installed) -> None:
    assert installed.show("dsecd.socket", "ActiveState", "UnitFileState") == {
        "ActiveState": "active", "UnitFileState": "enabled",
    }  # fmt: skip
    owner = installed.vm.run(["stat", "-c", "%U %G %a", "/run/dsec/dsecd.sock"]).text
    assert owner == "root dsec 660\n"


def test_the_first_request_starts_the_daemon(installed: Installed) -> None:
    installed.vm.run(["systemctl", "stop", "dsecd.service"])
    assert installed.main_pid() == "0"
    version = installed.vm.run(["dpkg-query", "-W", "-f", "${Version}", "dsecd"]).text
    answered = installed.api("/v1/version")["version"]
    assert isinstance(answered, str) and version.startswith(answered)
    assert installed.main_pid() != "0"
    assert installed.show("dsecd.service", "ActiveState")["ActiveState"] == "active"


def test_a_member_of_the_group_may_ask_and_others_may_not(installed: Installed) -> None:
    installed.vm.run("useradd --groups dsec member; useradd stranger")
    for name, status in (("member", 0), ("stranger", 7)):
        asked = installed.vm.run(
            ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "curl", "--silent", "--fail",
             "--output", "/dev/null", "--unix-socket", "/run/dsec/dsecd.sock", "http://d/v1/version"], check=False,
        )  # fmt: skip
        assert (name, asked.status) == (name, status)
    installed.vm.run("userdel member; userdel stranger")


def test_the_host_report_is_true(installed: Installed) -> None:
    report = json.loads(installed.vm.run(["dsecctl", "--json", "host"]).text)
    assert report["hostname"] == "testhost"
    assert report["kernel"] == installed.vm.run(["uname", "-r"]).text.strip()
    assert report["cpus"] == int(installed.vm.run(["nproc"]).text)
    total_kib = int(installed.vm.run(["awk", "/^MemTotal/ { print $2 }", "/proc/meminfo"]).text)
    assert report["memory_bytes"] == total_kib * 1024
    assert {"name": "container", "works": True}.items() <= report["backends"][0].items()


def test_a_sandbox_runs_in_the_service_s_part_of_the_tree(with_sandbox: Installed) -> None:
    assert with_sandbox.vm.run(["dsecctl", "exec", _SANDBOX, "cat", "/etc/hostname"]).ok
    echoed = with_sandbox.vm.run(
        ["dsecctl", "exec", "-i", _SANDBOX, "sh", "-c", "cat; exit 42"], stdin=b"through\n", check=False
    )
    assert (echoed.text, echoed.status) == ("through\n", 42)
    part = with_sandbox.show("dsecd.service", "ControlGroup")["ControlGroup"]
    assert with_sandbox.cgroup(_SANDBOX).startswith(f"/sys/fs/cgroup{part}/")
    # Root inside is nobody that the host knows.
    pid = with_sandbox.processes(_SANDBOX)[0].split()[0]
    assert int(with_sandbox.vm.run(["stat", "-c", "%u", f"/proc/{pid}"]).text) >= 0x2800_0000


@pytest.mark.parametrize("way", ["systemctl restart dsecd.service", "systemctl stop dsecd.service", "kill -9"])
def test_a_sandbox_and_its_command_survive(with_sandbox: Installed, way: str) -> None:
    before, rounds, old = with_sandbox.processes(_SANDBOX), with_sandbox.rounds(), with_sandbox.main_pid()
    with_sandbox.vm.run(f"kill -9 {old}" if way == "kill -9" else way)
    if "stop" in way:
        with_sandbox.api("/v1/version")
    with_sandbox.wait_for_new_daemon(old)
    after = with_sandbox.rounds()
    # The counter's sleep is another one each second.
    assert set(with_sandbox.processes(_SANDBOX)[:2]) & set(before)
    assert before[0] in with_sandbox.processes(_SANDBOX)
    assert after == list(range(1, len(after) + 1)) and len(after) > len(rounds)
    assert with_sandbox.vm.run(["systemctl", "--failed", "--no-legend"]).text == ""


def test_purge_leaves_nothing_though_a_sandbox_runs(with_sandbox: Installed) -> None:
    vm = with_sandbox.vm
    assert with_sandbox.processes(_SANDBOX)
    packages.purge(vm)
    assert vm.run(["find", "/sys/fs/cgroup", "-name", f"*{_SANDBOX}*"]).text == ""
    assert vm.run("grep -h dsec /proc/[0-9]*/mountinfo || true").text == ""
    assert vm.run("ps -eo uid=,args= | awk '$1 >= 671088640'").text == ""
    assert vm.run("ps -eo args= | grep -c '[d]secd' || true").text == "0\n"
    left = sorted(packages.files(vm) - with_sandbox.files_before)
    assert not left, "\n".join(left)
    assert vm.run("getent passwd; getent group | grep -v ^dsec").text in with_sandbox.accounts_before
    assert vm.run(["systemctl", "--failed", "--no-legend"]).text == ""


def test_it_can_be_installed_again(with_sandbox: Installed) -> None:
    packages.install(with_sandbox.vm)
    assert with_sandbox.api("/v1/version")
