# Needs Python >= 3.10, git and make; everything else goes into .venv. Works with GNU make 3.81 (macOS) and later.
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q -c constraints.txt
# Installed first: a pip that knows dependency groups (>= 25.1; a new venv may bring 23.0), and what builds the package.
# Both are pinned too, which pip does not do for the build tools that it fetches by itself.
BUILD_TOOLS := pip hatchling editables

# The tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo screenshots test test-long test-cuda test-faults test-step-faults test-hostile soak sim fuzz check bench docs constraints clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile

install: $(VENV)/.installed  ## make .venv and install manyhands into it, with its recipe, page and plots (PYTHON=... names a Python)

demo: $(VENV)/.installed  ## train one ALBERT on several peers of this machine (ARGS='--peers 3 --steps 8')
	$(VENV)/bin/manyhands demo $(ARGS)

# Three tests at a time keep two cores busy: half of the time of a test is waiting.
test: check  ## all checks, then the tests, three at a time (ARGS='-k address' picks some, ARGS='-n 0' is one by one)
	$(PY) -m pytest -q -n 3 --dist worksteal $(ARGS)

test-long: $(VENV)/.dev  ## whole programs (tutorials, examples, torchrun, the demo), long simulations, more cases of tests
	$(PY) -m pytest -q -n 2 --dist worksteal -m 'long and not sweep' $(ARGS)

test-cuda: $(VENV)/.dev  ## the tests that need an NVIDIA GPU, which `make test` skips where there is none
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch finds no GPU here")'
	$(PY) -m pytest -q tests/cuda $(ARGS)

test-faults: $(VENV)/.dev  ## kill and stop real processes in each phase of a round (ARGS='--case half' picks some)
	$(PY) -m tests.faults $(ARGS)

test-step-faults: $(VENV)/.dev  ## freeze real trainers, set their clocks wrong, have 20 join at once (ARGS='--case clock')
	$(PY) -m tests.faults.steps $(ARGS)

test-hostile: $(VENV)/.dev  ## attack a run of real processes on addresses of their own; Linux, root (ARGS='--case state')
	$(PY) -m tests.hostile $(ARGS)

soak: $(VENV)/.dev  ## kill, stop, slow down and start up to ten real trainers for long (MINUTES=30 SEED=1)
	$(PY) -m tests.faults.soak --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1) $(ARGS)

fuzz: $(VENV)/.dev  ## feed all decoders with bad input for a minute (SECONDS=600 ARGS='--target frames')
	$(PY) -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

sim: $(VENV)/.dev  ## long simulations, then swarms under random faults (SEEDS=200 FIRST=0; only these: SCENARIO=dht, SEED=7)
	$(if $(SEED)$(SCENARIO),,$(PY) -m pytest -q -n 2 --dist worksteal -m sweep)
	@$(PY) -m tests.simulation.explore $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200) --first $(or $(FIRST),0)) \
	  $(if $(SCENARIO),--scenario $(SCENARIO)) $(ARGS)

check: $(VENV)/.dev  ## lint, format, types, import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

bench: $(VENV)/.dev  ## run every script in benchmarks/, for hours; those with emulated lines are skipped without root
	@failed=; for script in benchmarks/[!_]*.py; do \
	  echo "== $$script"; $(PY) $$script || [ $$? = 2 ] || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

screenshots: $(VENV)/.dev  ## draw the page of a made-up run into docs/img; needs Chromium
	$(PY) -m tests.screenshots $(ARGS)

docs: $(VENV)/.docs  ## build docs/ into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "docs: site/index.html"

constraints: $(VENV)/.installed  ## resolve constraints.txt anew; torch stays, change its line by hand
	@rm -rf build/constraints; mkdir -p build/constraints
	$(PY) -m venv build/constraints/venv
	build/constraints/venv/bin/python -m pip install -q uv
	@cd build/constraints; grep '^torch==' ../../constraints.txt >torch.txt; printf '%s\n' $(BUILD_TOOLS) >tools.txt
	build/constraints/venv/bin/uv pip compile -q --universal --python-version 3.10 --no-annotate --no-header \
	  --constraint build/constraints/torch.txt --extra albert --extra plot --extra web --group dev --group docs \
	  pyproject.toml build/constraints/tools.txt >build/constraints/pins.txt
	@# torch depends on the exact CUDA packages that it was built with, and CPU builds on none: not ours to pin
	@{ grep '^#' constraints.txt; grep -v -E '^(nvidia|cuda|triton)' build/constraints/pins.txt | sed 's/+cpu//'; } \
	  >build/constraints/new.txt
	mv build/constraints/new.txt constraints.txt

clean:  ## remove all that make made, .venv too
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call do nothing until what they depend on changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	@echo "installing into $(VENV); the first time takes minutes, torch is large"
	@$(PIP) $(BUILD_TOOLS)
	@$(PIP) --no-build-isolation -e '.[albert,plot,web]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the development tools"
	@$(PIP) --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@echo "installing the documentation tools"
	@$(PIP) --group docs
	@touch $@

# Missing, or a dangling link since that Python was removed. Each candidate is run: being on the PATH is not enough.
$(PY):
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10 python); do \
	  "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 || continue; \
	  "$$python" -m venv --clear $(VENV) && exit 0; rm -rf $(VENV); exit 1; \
	done; \
	echo "manyhands needs Python >= 3.10 with its venv module, but $(or $(PYTHON),python3) is" \
	  "$$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)." \
	  "Install one (Debian, Ubuntu: python3-venv), or name it: make install PYTHON=/path/to/python3.12" >&2; \
	exit 1
