# Every target does its own set-up; each can be run twice.  `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
ENGINE := .venv-engine
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)

ENGINE_PYTHON ?= python3.11
SITE := lib/python3.11/site-packages
ENGINE_LOCK := roles/sglang_engine/files/requirements-cpu.txt
HOUSE_LOCKS := $(ENGINE_LOCK) roles/sweep_client/files/requirements.txt requirements/engine-test.txt
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 python -m pip install -qq --require-hashes

.PHONY: help setup demo test lint test-python test-backend test-releases molecule engine wheelhouse lock format clean benchmark models

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up -------------------------------------------------------------------------------------------------
setup: $(VENV)/.ready ## the controller's virtual environment, .venv

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@echo "setup: making $(VENV) from requirements/dev.txt"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"found Python {v.major}.{v.minor}, expected 3.11 or newer: run make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements/dev.txt
	@PIP_DISABLE_PIP_VERSION_CHECK=1 python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

wheelhouse: ## the CPU engine's wheels for hosts without a way out (CUDA: docs/deploy.md); prints where they lie
	@tools/wheelhouse.sh --python 3.11 $(HOUSE_LOCKS)

engine: $(ENGINE)/.backend ## the real SGLang on this machine's CPU, with the backend, in .venv-engine

$(ENGINE)/.ready: $(HOUSE_LOCKS) | setup
	@echo "engine: installing SGLang for the CPU into $(ENGINE)"
	@house=$$(tools/wheelhouse.sh --python 3.11 $(HOUSE_LOCKS)); \
	 $(ENGINE_PYTHON) -m venv --clear $(ENGINE); \
	 $(ENGINE)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
	   --no-index --find-links "$$house" -r $(ENGINE_LOCK) -r requirements/engine-test.txt
	@touch $@

# The wheel, not an editable install: what the tests prove is what is shipped.
$(ENGINE)/.backend: $(ENGINE)/.ready $(shell find backend/src backend/pyproject.toml backend/*.pth -type f -not -name '*.pyc')
	@rm -rf build/backend
	@python -m build --no-isolation --wheel --outdir build/backend backend >/dev/null
	@$(ENGINE)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-index --force-reinstall \
	   build/backend/*.whl
	@touch $@

# An older release: the engine's packages, and before them on the path what the release has otherwise.
.PRECIOUS: $(ENGINE)-%/.ready
$(ENGINE)-%/.ready: requirements/engine-%.txt $(ENGINE)/.ready
	@echo "engine: installing SGLang $* beside the packages of $(ENGINE)"
	@house=$$(tools/wheelhouse.sh --python 3.11 $<); \
	 $(ENGINE_PYTHON) -m venv --clear $(ENGINE)-$*; \
	 $(ENGINE)-$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
	   --no-index --find-links "$$house" -r $<
	@echo "import site; site.addsitedir('$(CURDIR)/$(ENGINE)/$(SITE)')" >$(ENGINE)-$*/$(SITE)/engine.pth
	@touch $@

# --- the main job -------------------------------------------------------------------------------------------
demo: setup ## nothing -> a measured sweep of the seed's grid on the real SGLang, in a real systemd host
	@tools/demo.sh

# --- tests --------------------------------------------------------------------------------------------------
test: lint test-python test-backend test-releases molecule ## everything CI runs
	@echo "make test: every runner passed"

lint: setup ## ruff, mypy, yamllint, ansible-lint (production profile)
	ruff check .
	ruff format --check .
	mypy
	yamllint --strict .
	ansible-lint --offline --strict

test-python: setup ## tuning, modules, filters, roles' argument specs, test hosts
	@testhosts/testhosts deps
	pytest

# In two halves side by side: a server keeps one core busy.
SECOND_HALF := tests/test_lossless.py tests/test_record.py tests/test_sampling.py tests/test_triton_server.py

test-backend: engine ## the backend on the real SGLang
	@mkdir -p build; cd backend; python=$(CURDIR)/$(ENGINE)/bin/python; rc=0; \
	 "$$python" -m pytest -p no:cacheprovider $(SECOND_HALF) >../build/second-half.log 2>&1 & half=$$!; \
	 trap 'kill "$$half" 2>/dev/null || true' EXIT; \
	 "$$python" -m pytest $(SECOND_HALF:%=--ignore=%) || rc=$$?; \
	 wait "$$half" || rc=$$?; cat ../build/second-half.log; exit "$$rc"

# Side by side as well. RELEASES=0.5.22 tests that one alone; RELEASE_TESTS= runs all tests on each.
RELEASES ?= $(patsubst requirements/engine-%.txt,%,$(wildcard requirements/engine-[0-9]*.txt))
RELEASE_TESTS ?= test_arguments or test_triton.py or test_serving and ([chain] or [16:4] or one_branch) \
  or test_features and (frequency or logprobs or seeded or refused or switch or metrics_are) \
  or test_grammar and overlap and not sampled

test-releases: engine ## the older tested releases of SGLang: what differs between them
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(RELEASES:%=test-release-%)

test-release-%: $(ENGINE)-%/.ready
	@echo "test-releases: SGLang $*"
	@cd backend; $(CURDIR)/$(ENGINE)-$*/bin/python -m pytest -q --disable-warnings -p no:cacheprovider -k "$(RELEASE_TESTS)"

molecule: setup ## the roles on real systemd hosts: deploy, then a short sweep
	@tools/molecule.sh default sweep

benchmark: engine ## speed of the parts, as ratios in one run each (Markdown; a quiet machine, about an hour)
	@$(ENGINE)/bin/python benchmarks/tree_builder.py
	@$(ENGINE)/bin/python benchmarks/host_cost.py
	@$(ENGINE)/bin/python benchmarks/switches.py adaptive
	@$(ENGINE)/bin/python benchmarks/switches.py trace
	@$(ENGINE)/bin/python benchmarks/engine.py

models: engine ## train a demo pair from nothing into build/models (two cores, half an hour; goes on where it stopped)
	@$(ENGINE)/bin/python -m models

# --- keeping house ------------------------------------------------------------------------------------------
format: setup ## put Python into the house's format
	ruff check --fix .
	ruff format .

lock: ## make the hash-locked requirements anew from requirements/*.in (needs uv)
	@tools/lock.sh

clean: ## remove what the targets made in the tree, and the test hosts; caches stay
	@[[ ! -d /sys/class/net ]] || testhosts/testhosts down --all || true
	rm -rf $(VENV) $(ENGINE) $(ENGINE)-* build dist .pytest_cache .mypy_cache .ruff_cache .ansible .hypothesis
