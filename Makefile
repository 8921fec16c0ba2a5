# Every target is documented by the text after its `##`; `make help` prints it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv lint test test-model test-sim test-vm test-vm-qemu cluster-programs test-cluster test-engines kind-cluster demo \
	bench docs clean

# Where this is set, as in many images, each of the hundreds of processes that tests start would compile its libraries anew.
unexport PYTHONDONTWRITEBYTECODE

PY := .venv/bin/python
PYTEST := $(PY) -m pytest

help: ## List every target with one line
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## Build .venv: the project installed editable, with all that development needs
	@scripts/venv.sh .venv dev

lint: venv ## Check style, types, layers and that generated docs are fresh
	@scripts/lint.sh

test: lint ## Lint, then the unit, tidy, contract, local, model and sim suites (those two without what is deep)
	@scripts/databases.sh
	@scripts/suites.sh $(ARGS)

test-model: venv ## Search small worlds of the manager's core and of the operator's plans exhaustively, larger ones at random
	@scripts/model_suites.sh $(ARGS)

test-sim: venv ## Simulate whole traces: hit rates to the block, the article's clusters, the running system
	$(PYTEST) tests/sim $(ARGS)

test-vm: venv ## Test RDMA and arrays in a User-Mode Linux kernel, built once
	$(PY) -m tests.vm.support test $(ARGS)

test-vm-qemu: venv ## The same in Debian's own kernel under qemu, emulated: a second opinion, slowly
	POLARKV_VM_MACHINE=qemu $(PY) -m tests.vm.support test --timeout 14400 $(ARGS)

cluster-programs: venv ## Build what the test cluster consists of, and keep it in the user's cache directory
	$(PY) -m tests.cluster.support build

test-cluster: SUITES ?= tests/operator tests/cluster
test-cluster: cluster-programs ## Build Kubernetes once, bring it up on this machine and test on it (on KUBECONFIG's, when that is set)
	@SUITES="$(SUITES)" scripts/cluster_suites.sh $(ARGS)

test-engines: venv ## Run the connectors inside real vLLM, SGLang and LMCache on the CPU; builds their environments once
	$(PY) -m tests.engines.support build
	@scripts/engine_suites.sh $(ARGS)

kind-cluster: ## Prepare a Kubernetes in Docker, with kind, for test-cluster or for a try
	@scripts/kind.sh

demo: ## Show prefix reuse on a real model and a trace replay, on this machine
	@scripts/venv.sh .venv-demo demo
	.venv-demo/bin/python demo/main.py $(ARGS)

bench: venv ## Measure this machine's limits, this system and its peers in one run
	$(PY) bench/main.py $(ARGS)

docs: venv ## Write the docs that are generated from code
	$(PY) docs/generate.py

clean: ## Remove environments and caches of this clone (the user's cache directory stays)
	rm -rf .venv .venv-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
