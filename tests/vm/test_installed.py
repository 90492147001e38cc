# SPDX-License-Identifier: Apache-2.0
"""The life of an installed dsec on one host, from apt install to apt purge: the tests run in this order."""

import json
import re
import time
from dataclasses import dataclass

import pytest

from tests.support.waiting import until
from tests.vm import packages
from tests.vm.host import VmHost
from tests.vm.image import CHECKOUT
from tests.vm.packages import IMAGE
from tests.vm.service import Service

_SANDBOX, _PAUSED = "survivor", "sleeper"
#: Writes the number of its round each second; a gap or a restart would show.
_COUNTER = "n=0; while :; do n=$((n + 1)); echo $n >>/root/rounds; sleep 1; done"
#: As `systemd-analyze security` rates the running unit, in tenths: its file says why it is not less.
_EXPOSURE = 72
#: What takes so long has not merely been slow.
_FAULT_S = 600.0
#: Some of what this host lacks, an option of its kernel and a program that is only recommended, and words said of it.
_LACKS = {"feature core-scheduling": "CONFIG_SCHED_CORE", "feature qemu": "apt install qemu-system-x86"}


@dataclass
class Installed:
    """A host with dsec on it, and what it held before."""

    vm: VmHost
    service: Service
    files_before: frozenset[str]
    traces_before: str
    accounts_before: str

    def processes(self) -> list[str]:
        """Pid and start time of each process of the sandbox with the counter."""
        return self.service.processes(self.service.cgroup(_SANDBOX))

    def rounds(self) -> list[int]:
        """What the counter in the sandbox has written, read from inside."""
        return [int(line) for line in self.service.execute(_SANDBOX, "cat", "/root/rounds")[1].splitlines()]

    def limits(self) -> list[str]:
        """What the kernel holds the counter's sandbox to."""
        # Bounds lie on what commands run in, shares on what has siblings.
        files = [f"{self.service.cgroup(_SANDBOX)}/{name}" for name in ("run/memory.max", "cpu.weight", "run/pids.max")]
        return self.vm.run(["cat", *files]).text.split()

    def check_survival(self, before: list[str], rounds: list[int]) -> None:
        """The same first processes still run, and the counter has gone on without a gap."""
        deadline = time.monotonic() + _FAULT_S
        while len(after := self.rounds()) <= len(rounds):
            assert time.monotonic() < deadline, "the counter stands still"
            time.sleep(0.3)
        # The counter's sleep is another one each second.
        assert before[:2] == self.processes()[:2]
        assert after == list(range(1, len(after) + 1))
        assert self.limits() == ["268435456", "50", "200"]
        assert self.vm.run(["systemctl", "--failed", "--no-legend"]).text == ""


@pytest.fixture(scope="module")
def built() -> None:
    """Fails the module where there is no package to test: before a machine is made."""
    packages.built()


@pytest.fixture(scope="module")
def installed(built: None, vm: VmHost) -> Installed:
    before, traces = packages.files(vm), packages.traces(vm)
    accounts = vm.run("getent passwd; getent group").text
    packages.install(vm)
    return Installed(vm, Service(vm), before, traces, accounts)


@pytest.fixture(scope="module")
def with_sandbox(installed: Installed) -> Installed:
    packages.import_debian(installed.vm)
    limits = ["--memory", "256M", "--cpu-weight", "50", "--pids", "200"]
    installed.vm.run(["dsecctl", "create", "--name", _SANDBOX, *limits, IMAGE, "--", "sh", "-c", _COUNTER])
    return installed


def test_apt_installs_all_of_it(installed: Installed) -> None:
    states = installed.vm.run(["dpkg-query", "-W", "-f", "${Status}\n", "dsecd", "python3-libdsec"]).text
    assert states.splitlines() == ["install ok installed"] * 2
    assert installed.vm.run(["dpkg", "--audit"]).text == ""
    assert installed.vm.run(["systemctl", "--failed", "--no-legend"]).text == ""


def test_its_files_are_as_they_were_packed(installed: Installed) -> None:
    assert installed.vm.run(["dpkg", "--verify", "dsecd", "python3-libdsec"]).text == ""


def test_it_passes_the_package_s_own_tests(installed: Installed) -> None:
    """As autopkgtest runs them: from the source's folder, as root, with a folder to work in."""
    vm, folder = installed.vm, CHECKOUT / "packaging/debian/tests"
    control = dict(re.findall(r"^([A-Za-z-]+): (.*)$", (folder / "control").read_text(), re.MULTILINE))
    assert control["Tests"] and "needs-root" in control["Restrictions"] and "allow-stderr" in control["Restrictions"]
    for name in re.split(r",\s*", control["Depends"].replace("@", "dsecd, python3-libdsec")):
        assert vm.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", name]).text.strip() == "ii"
    vm.put(folder, "/srv/source/debian")
    vm.run("mkdir /tmp/autopkgtest")
    for name in control["Tests"].split():
        vm.run(f"cd /srv/source && debian/tests/{name}", env={"AUTOPKGTEST_TMP": "/tmp/autopkgtest"}, timeout_s=900)
    vm.run("rm -r /srv/source /tmp/autopkgtest")


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
    report = installed.service.api("/v1/host")
    assert report["hostname"] == "testhost"
    assert report["kernel"] == installed.vm.run(["uname", "-r"]).text.strip()
    assert report["cpus"] == int(installed.vm.run(["nproc"]).text)
    total_kib = int(installed.vm.run(["awk", "/^MemTotal/ { print $2 }", "/proc/meminfo"]).text)
    assert report["memory_bytes"] == total_kib * 1024


def test_the_doctor_says_what_is_missing_and_needs_nothing_of_it(installed: Installed) -> None:
    done = installed.vm.run(["dsecctl", "--json", "doctor"], check=False)
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.ok and len(findings) > 20
    for check, finding in findings.items():
        # Whatever the package promises works once it is installed.
        assert finding["ok"] or not finding["needed"], finding
        assert finding["ok"] or (finding["detail"] and (finding["hint"] or check.startswith("backend "))), finding
    for check, word in _LACKS.items():
        assert not findings[check]["ok"] and word in findings[check]["detail"] + findings[check]["hint"]


def test_its_exposure_is_what_is_published(installed: Installed) -> None:
    rated = installed.vm.run(["systemd-analyze", "security", "--no-pager", "dsecd.service"]).text.splitlines()[-1]
    assert f" {_EXPOSURE / 10} " in rated


def test_a_sandbox_runs_in_the_service_s_part_of_the_tree(with_sandbox: Installed) -> None:
    echoed = with_sandbox.vm.run(
        ["dsecctl", "exec", "-i", _SANDBOX, "sh", "-c", "cat; exit 42"], stdin=b"through\n", check=False
    )
    assert (echoed.text, echoed.status) == ("through\n", 42)
    assert with_sandbox.service.cgroup(_SANDBOX).startswith(f"{with_sandbox.service.part()}/")
    # Root inside is nobody that the host knows.
    pid = with_sandbox.processes()[0].split()[0]
    assert int(with_sandbox.vm.run(["stat", "-c", "%u", f"/proc/{pid}"]).text) >= 0x2800_0000
    assert with_sandbox.vm.run(["ps", "-o", "comm=", "-p", pid]).text == "dsec-agent\n"


def test_the_journal_finds_a_sandbox_by_its_name(with_sandbox: Installed) -> None:
    # What was told last may not have been read yet.
    with_sandbox.vm.run(["journalctl", "--sync"])
    found = with_sandbox.vm.run(["journalctl", "--output=json", "--no-pager", f"DSEC_SANDBOX={_SANDBOX}"]).text
    entries = [json.loads(line) for line in found.splitlines()]
    (running,) = [entry for entry in entries if entry.get("DSEC_EVENT") == "sandbox.running"]
    assert (running["_SYSTEMD_UNIT"], running["SYSLOG_IDENTIFIER"]) == ("dsecd.service", "dsecd")
    # One kind of event, whichever sandbox: the package's own test has run some.
    kind = f"MESSAGE_ID={running['MESSAGE_ID']}"
    alike = with_sandbox.vm.run(["journalctl", "--output=cat", "--no-pager", kind]).text.splitlines()
    assert len(alike) > 1 and all("event=sandbox.running" in line for line in alike)


@pytest.mark.parametrize("way", ["restart", "stop", "reload", "kill", "watchdog"])
def test_a_sandbox_and_its_command_survive(with_sandbox: Installed, way: str) -> None:
    vm, service = with_sandbox.vm, with_sandbox.service
    before, rounds, old = with_sandbox.processes(), with_sandbox.rounds(), service.main_pid()
    match way:
        case "restart":
            vm.run("systemctl restart dsecd.service")
        case "stop":
            vm.run("systemctl stop dsecd.service")
            assert service.main_pid() == "0"
            # The first request starts it.
            assert service.api("/v1/version")
        case "reload":
            # With a changed unit, so that systemd does not just take up where it was.
            vm.write("/run/systemd/system/dsecd.service.d/test.conf", b"[Service]\nCPUWeight=90\n")
            vm.run("systemctl daemon-reload; systemctl set-property --runtime dsecd.service IOWeight=90")
            # systemd answers before it writes.
            until(lambda: vm.read(f"{service.part()}/cpu.weight") == b"90\n", _FAULT_S)
            assert service.main_pid() == old
        case "kill":
            vm.run(f"kill -9 {old}")
        case "watchdog":
            # The process lives and its other threads run, so nothing but the watchdog can tell.
            assert service.hold_event_loop() == "6"  # SIGABRT
    if way != "reload":
        service.wait_for_new_daemon(old)
    with_sandbox.check_survival(before, rounds)


def test_the_watchdog_is_what_found_the_stuck_loop(with_sandbox: Installed) -> None:
    with_sandbox.vm.run(["journalctl", "--sync"])
    journal = with_sandbox.vm.run(["journalctl", "--unit=dsecd.service", "--output=cat", "--no-pager"]).text
    assert "Watchdog timeout (limit 30s)!" in journal
    assert "Failed with result 'watchdog'" in journal


def test_after_a_reboot_sandboxes_are_stopped_and_whole(with_sandbox: Installed) -> None:
    vm, service = with_sandbox.vm, with_sandbox.service
    service.create(_PAUSED, network=["tcp:203.0.113.0/24:443"])
    service.api(f"/v1/sandboxes/{_PAUSED}/pause", method="POST")
    rounds = with_sandbox.rounds()
    vm.reboot()
    listed = service.api("/v1/sandboxes")["sandboxes"]
    assert isinstance(listed, list)
    # In good order, and not by whatever ends all processes of a host.
    assert {(box["id"], box["state"]) for box in listed} == {(_SANDBOX, "stopped"), (_PAUSED, "stopped")}
    # Nothing but the files that they wrote.
    assert service.residue() == [f"file /var/lib/dsec/sandboxes/{name}" for name in sorted((_SANDBOX, _PAUSED))]
    for name in (_SANDBOX, _PAUSED):
        service.api(f"/v1/sandboxes/{name}/start", method="POST")
    # Started again, the counter appends.
    assert with_sandbox.rounds()[: len(rounds)] == rounds
    assert with_sandbox.limits() == ["268435456", "50", "200"]


def test_purge_leaves_nothing_though_sandboxes_run(with_sandbox: Installed) -> None:
    vm = with_sandbox.vm
    # One of them with a network: devices, programs in the kernel, packet rules.
    assert with_sandbox.processes() and packages.traces(vm) != with_sandbox.traces_before
    packages.purge(vm)
    # The kernel ends namespaces and systemd its cgroups in the background.
    until(lambda: packages.traces(vm) == with_sandbox.traces_before, _FAULT_S, lambda: packages.traces(vm))
    assert vm.run("ps -eo uid=,args= | awk '$1 >= 671088640'").text == ""
    assert vm.run("ps -eo args= | grep -c '[d]secd' || true").text == "0\n"
    left = sorted(packages.files(vm) - with_sandbox.files_before)
    assert not left, "\n".join(left)
    # Accounts stay, as Debian's policy wants: files elsewhere may belong to them.
    assert vm.run("{ getent passwd; getent group; } | grep -v ^dsec").text == with_sandbox.accounts_before
    assert vm.run(["systemctl", "--failed", "--no-legend"]).text == ""


def test_it_can_be_installed_again(with_sandbox: Installed) -> None:
    packages.install(with_sandbox.vm)
    assert with_sandbox.service.api("/v1/version")
