# SPDX-License-Identifier: Apache-2.0
"""What virtual machines of this host are run with: the monitor and its profile, the kernel and the initramfs.

What belongs here: putting these together from the settings, and saying whether they work. What does not: any one
machine (``machines.py``, ``microvm_steps.py``).
"""

from __future__ import annotations

from pathlib import Path

from dsecd.backends import confinement
from dsecd.backends.base import Site
from dsecd.vmm import guest, qemu
from dsecd.vmm.base import Driver
from dsecd.vmm.choice import Choice
from dsecd.vmm.firecracker import driver as firecracker
from dsecd.vmm.firecracker import install
from dsecd.vmm.firecracker.driver import Firecracker
from dsecd.vmm.guest import Boot
from dsecd.vmm.qemu import Qemu


class MachineHost:
    """One for all virtual machines."""

    def __init__(self, site: Site) -> None:
        settings = site.machines
        self._configured = settings.kernel
        self._agent = site.agent
        #: By profile, why no monitor is confined by it; empty when they can be.
        self._unconfined = {
            name: confinement.why_unconfined(site.apparmor, name) for name in (qemu.PROFILE, firecracker.PROFILE)
        }
        self.directory = site.state_dir / "guest"
        programs = install.find(settings.firecracker)
        self.driver: Driver = Choice(
            settings.monitor,
            Firecracker(programs, site.state_dir / "jails", site.launch_ns, self._kernel),
            Qemu(site.runtime_dir, site.launch_ns, accelerator=settings.accelerator),
        )

    def _kernel(self) -> Path:
        return guest.find_kernel(self._configured)

    def boot(self) -> Boot:
        """What guests boot from. Blocks. Runs in a thread. Raises OSError, KernelMissing among them."""
        return guest.prepare(self._kernel(), self._agent, self.directory)

    def profile(self, *, network: bool) -> str:
        """The AppArmor profile that the monitor of a machine will be confined by; nothing when empty."""
        name = self.driver.profile(network=network)
        return "" if self._unconfined[name] else name

    def check_profile(self, *, network: bool) -> list[str]:
        """Name the default that is off. Where AppArmor is required, there is no daemon without both profiles."""
        return [] if self.profile(network=network) else ["apparmor"]

    def probe(self) -> tuple[bool, str]:
        """Whether machines work here, and how or why not. Blocks. Runs in a thread."""
        try:
            kernel = self._kernel()
        except OSError as error:
            return False, f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        found = self.driver.probe()
        return found.works, f"{found.detail}, kernel {kernel}"
