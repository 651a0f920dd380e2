# `make demo` shows the whole thing without a GPU; `make test` proves it. Both set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
RUN := source $(VENV)/bin/activate &&
# Processes that share the tests between them, longest first: tests/conftest.py.
SHARED := --numprocesses=auto --dist=loadfile --no-loadscope-reorder

.PHONY: help setup test lint types test-unit test-kubernetes test-machines test-roles test-e2e demo demo-down docs clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/ready ## Make the virtual environment with everything contributors need

$(VENV)/ready: requirements.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --requirement requirements-dev.txt
	touch $@

test: lint types test-unit test-kubernetes test-machines test-roles test-e2e ## Everything: linters, types, unit tests, Kubernetes, drives and boots, every role and the whole site on real systemd hosts

lint: setup ## ruff and ansible-lint (production profile, offline)
	$(RUN) ruff check . && ruff format --check .
	$(RUN) ansible-lint --offline

types: setup ## mypy, strict
	$(RUN) mypy

test-unit: setup ## Catalog, plugins, weights, simulator, documents
	$(RUN) pytest -m "not hosts and not kubernetes and not machines" $(SHARED) --maxprocesses=4

# Stories wait more than they compute: three processes keep two processors busy.
test-kubernetes: setup ## Manifests, operator and Pulumi program against a real control plane (skipped without Go)
	$(RUN) pytest -m kubernetes $(SHARED) --numprocesses=3

test-machines: setup ## Drives, boots and power cuts on machines in QEMU with their own kernel (skipped where QEMU cannot be had)
	$(RUN) pytest -m machines $(SHARED) --maxprocesses=2

test-roles: setup ## Every role's molecule scenario, and what else needs a systemd host
	$(RUN) pytest -m "hosts and not e2e" $(SHARED) --maxprocesses=2

test-e2e: setup ## site.yml on two hosts with different engines, from nothing to removed
	$(RUN) pytest -m e2e

demo: setup ## A served, checked, measured endpoint on a systemd host in a container; no GPU needed
	$(RUN) python -m tests.hosts.demo up

demo-down: setup ## Remove everything the demo made
	$(RUN) python -m tests.hosts.demo down

docs: setup ## Rewrite the generated documents: docs/targets.md and the roles' READMEs
	$(RUN) python -m serving_catalog targets --format markdown > docs/targets.md.new && mv docs/targets.md.new docs/targets.md
	$(RUN) python -m tests.docs.role_readmes
	$(RUN) python -m tests.docs.settings_page

clean: ## Remove build results; keep the caches
	rm -rf build results verdicts
