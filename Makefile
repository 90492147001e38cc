# SPDX-License-Identifier: Apache-2.0
# Every target enters the private root by itself; inside it, ./dev only runs its command.

DEV = ./dev
# What runs inside: one make for all of a target, so that the root is entered once.
INSIDE = $(DEV) $(MAKE) --no-print-directory
PYTEST = python3 -m pytest --junit-xml="$$DSEC_DEV_CACHES/junit.xml"

# The kernels that lie beside a checkout, where there are some, are to be seen inside, too.
SHOW_KERNELS = DSEC_DEV_BIND="$${DSEC_DEV_BIND:-$(wildcard $(abspath $(CURDIR)/../shared/kernels))}"

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-host test-vm lint bench bench-cpu bench-many bench-memory bench-microvm bench-soak bench-trees test-trace agent agent-check deb kernel guest-kernel-deb clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## from nothing to commands in a sandbox, with a daemon killed in between
	@$(INSIDE) agent
	@$(DEV) demo/run

test: ## everything: agent, linters, packages, unit and host tests, and the package in a virtual machine
	@$(SHOW_KERNELS) tests/run

test-unit: ## tests that need no root rights
	@$(DEV) sh -c '$(PYTEST) tests/unit'

test-host: ## tests against this machine's kernel
	@$(INSIDE) agent
	@$(DEV) sh -c '$(PYTEST) tests/host'

test-vm: ## tests of the package on a Debian 13 with systemd, in a virtual machine
	@$(INSIDE) deb
	@$(SHOW_KERNELS) $(DEV) sh -c '$(PYTEST) tests/vm'

test-trace: ## dsecctl trace with Debian's bcc on Debian's kernel; in a virtual machine, about a minute
	@$(INSIDE) deb
	@$(DEV) sh -c '$(PYTEST) -s tests/vm/check_trace.py'

lint: ## ruff and mypy
	@$(DEV) sh -c 'status=0; ruff check --quiet || status=1; \
		env -u PYTHONPATH mypy --no-error-summary || status=1; exit $$status'

bench: ## the figures of SPECIFICATION.md, beside their peers
	@$(INSIDE) agent
	@$(DEV) python3 -m tests.perf

bench-many: ## creation beside 2,000 live sandboxes with a network; some minutes, and 4 GiB of memory
	@$(INSIDE) agent
	@$(DEV) python3 -m tests.perf --only many --many 2000

bench-memory: ## what reclaim saves of idle sandboxes' memory, and what a neighbour feels; in a virtual machine
	@$(INSIDE) deb
	@$(DEV) python3 -m tests.vm.bench_memory

bench-microvm: ## what microVMs cost: memory, start, clones, commands and files; QEMU's guests beside plain ones
	@$(INSIDE) agent
	@$(DEV) python3 -m tests.perf.microvm

bench-cpu: ## how much load of class batch slows a sandbox of class latency; on bare metal with core scheduling
	@$(INSIDE) agent
	@$(DEV) python3 -m tests.perf.cpu

bench-soak: ## the SDK used for an hour while its daemon is killed now and then: descriptors, memory, what is left
	@$(INSIDE) agent
	@$(DEV) python3 -m tests.perf.soak --minutes 60

bench-trees: ## copying 10,000 small files in and out, beside tar and podman; minutes
	@$(INSIDE) agent
	@$(DEV) python3 -m tests.perf.trees

agent: ## build the agent, and the programs for egress rules
	@$(DEV) sh -c '$(MAKE) --no-print-directory -C agent && $(MAKE) --no-print-directory -C ebpf'

agent-check: ## the agent's tests, on the real program and on one with sanitizers
	@$(DEV) sh -c '$(MAKE) --no-print-directory -C agent all asan && $(PYTEST) tests/host/test_agent.py'

deb: ## build the Debian packages into build/deb, and have lintian judge them
	@$(DEV) packaging/build-deb

kernel: ## build the kernel of the test host and of microVMs, once: 20 to 30 minutes of processor time
	@$(DEV) kernel/build

guest-kernel-deb: ## the same, packaged for hosts of microVMs, into build/guest-kernel-deb
	@$(DEV) packaging/build-deb --guest-kernel

clean: ## remove what was built in the checkout; the cache of ./dev stays
	rm -rf build dist *.egg-info
