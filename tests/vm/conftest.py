# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests on the test host: a fresh machine for each module, one at a time, and evidence when one fails."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vm import evidence, host, image, kernels, packages
from tests.vm.host import Saved, VmHost
from tests.vm.kernels import Kernel

#: An emulated machine, and perhaps an image to build first.
_TIMEOUT_S = 3000
#: They run in the guest.
collect_ignore = ["inside"]
_FAILED = pytest.StashKey[bool]()
_MACHINE = pytest.StashKey[VmHost]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    module = item.getparent(pytest.Module)
    if report.failed and module is not None:
        module.stash[_FAILED] = True
        if machine := module.stash.get(_MACHINE, None):
            report.sections += [(f"the guest's {name}", text) for name, text in evidence.last_words(machine).items()]
    return report


@pytest.fixture(scope="module")
def vm(request: pytest.FixtureRequest) -> Iterator[VmHost]:
    """A freshly booted Debian 13 with Debian's kernel, for the tests of one module."""
    with host.only_machine(functools.partial(_say, request)):
        base = image.get()
        kernel = kernels.debian(base)
        with _machine(request, kernel, lambda: host.booted(kernel, base)) as machine:
            yield machine


@pytest.fixture(scope="module")
def sched_core_vm(request: pytest.FixtureRequest) -> Iterator[VmHost]:
    """The same with a kernel that has core scheduling; the tests are skipped where there is none."""
    kernel = _sched_core_kernel()
    with host.only_machine(functools.partial(_say, request)):
        base = image.get()
        with _machine(request, kernel, lambda: host.booted(kernel, base)) as machine:
            yield machine


@pytest.fixture(scope="module")
def dsec_vm(request: pytest.FixtureRequest) -> Iterator[VmHost]:
    """A host on which the built package is installed, with an image to make sandboxes of (``packages.IMAGE``)."""
    with host.only_machine(functools.partial(_say, request)):
        base = image.get()
        kernel = kernels.debian(base)
        with _machine(request, kernel, lambda: packages.installed(kernel, base)) as machine:
            yield machine


@pytest.fixture(scope="module")
def dsec_sched_core_vm(request: pytest.FixtureRequest) -> Iterator[VmHost]:
    """The same with a kernel that has core scheduling."""
    kernel = _sched_core_kernel()
    with host.only_machine(functools.partial(_say, request)):
        base = image.get()
        with _machine(request, kernel, lambda: packages.installed(kernel, base)) as machine:
            yield machine


def _sched_core_kernel() -> Kernel:
    try:
        return kernels.sched_core()
    except kernels.KernelMissing as missing:
        pytest.skip(str(missing))


@contextmanager
def _machine(request: pytest.FixtureRequest, kernel: Kernel, saved: Callable[[], Saved]) -> Iterator[VmHost]:
    name = request.node.path.stem
    began = time.monotonic()
    with VmHost(kernel, saved()) as machine:
        _say(request, f"{name}: {kernel.name} kernel, ready after {time.monotonic() - began:.1f} s")
        request.node.stash[_MACHINE] = machine
        try:
            yield machine
        finally:
            del request.node.stash[_MACHINE]
            if request.node.stash.get(_FAILED, False):
                folder = Path(os.environ.get("DSEC_DEV_CACHES", "/var/tmp")) / "vm" / f"{name}-{kernel.name}"
                evidence.keep(machine, folder)
                _say(request, f"{name}: console and journal of the machine are in {folder}")
            took = time.monotonic() - began
            _say(request, f"{name}: {took:.0f} s, of which the machine took {machine.cpu_s:.0f} s of processor time")


def _say(request: pytest.FixtureRequest, text: str) -> None:
    """A line for whoever watches, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nvm: {text}", file=sys.stderr)
