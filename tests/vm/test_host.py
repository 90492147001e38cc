# SPDX-License-Identifier: Apache-2.0
"""The test host is what the other tests take it for: a whole Debian 13, fresh, that answers truthfully."""

import os
import time
from pathlib import Path

import pytest

from tests.vm.channel import CommandFailed
from tests.vm.host import VmHost
from tests.vm.qemu import SMP


def test_it_is_a_debian_13_with_systemd_and_all_its_services(vm: VmHost) -> None:
    assert "VERSION_CODENAME=trixie" in vm.read("/etc/os-release").decode()
    assert vm.run(["ps", "-o", "comm=", "1"]).text == "systemd\n"
    assert vm.run(["systemctl", "is-system-running"]).text == "running\n"


@pytest.mark.parametrize("controller", ["cpu", "cpuset", "io", "memory", "pids"])
def test_it_has_a_cgroup_controller(vm: VmHost, controller: str) -> None:
    assert controller in vm.read("/sys/fs/cgroup/cgroup.controllers").decode().split()


def test_it_has_apparmor_and_damon(vm: VmHost) -> None:
    assert "apparmor" in vm.read("/sys/kernel/security/lsm").decode().split(",")
    assert vm.read("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds") == b"0\n"


def test_debian_s_kernel_has_no_core_scheduling(vm: VmHost) -> None:
    # When this fails, Debian has turned it on, and the kernel of our own may go.
    assert "# CONFIG_SCHED_CORE is not set" in vm.run("cat /boot/config-$(uname -r)").text.splitlines()


def test_it_shows_siblings(vm: VmHost) -> None:
    assert "threads=2" in SMP
    assert vm.read("/sys/devices/system/cpu/smt/active") == b"1\n"
    assert vm.read("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").strip() in (b"0-1", b"0,1")


def test_its_clock_is_ours(vm: VmHost) -> None:
    before = time.time()
    theirs = float(vm.run(["date", "+%s.%N"]).text)
    # Restored machines begin at the second in which they were saved, which may be weeks ago.
    assert before - 30 < theirs < time.time() + 30


def test_a_command_has_its_own_output_and_status(vm: VmHost) -> None:
    result = vm.run("cat; echo problem >&2; exit 41", stdin=b"in\0put", check=False)
    assert (result.stdout, result.stderr, result.status, result.reason) == (b"in\0put", b"problem\n", 41, "exit")
    with pytest.raises(CommandFailed, match=r"(?s)status 41.*problem"):
        vm.run("echo problem >&2; exit 41")


def test_a_command_that_takes_too_long_is_ended_with_its_children(vm: VmHost) -> None:
    result = vm.run("sleep 7654 & sleep 7654", check=False, timeout_s=2)
    assert (result.reason, result.status) == ("timeout", -9)
    # Killed, they may take a moment to go.
    vm.run("while pgrep -f '[s]leep 7654'; do sleep 0.1; done")


def test_files_and_trees_go_in_and_come_out_whole(vm: VmHost, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    vm.write("/root/one/file", data, mode=0o750)
    assert vm.read("/root/one/file") == data
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "data").write_bytes(data)
    (tree / "link").symlink_to("data")
    (tree / "data").chmod(0o751)
    assert vm.put(tree, "/root/two") == "/root/two/tree"
    assert vm.run(["stat", "-c", "%a %U", "/root/two/tree/data"]).text == "751 root\n"
    back = vm.get("/root/two/tree", tmp_path / "back")
    assert (back / "data").read_bytes() == data
    assert (back / "link").readlink() == Path("data")
