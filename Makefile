# make book | test | runs | lab | refresh | bench | lint | mutants | clean
# Options: PYTHON (3.11 or newer) makes the environment, VENV says where it lies, WORKERS is the
# number of test processes, PRESETS names what `make runs` runs, BENCHMARKS and OPTIONS what `make bench` does.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

SHELL := bash
STAMP := $(VENV)/.stamp
BIN := $(abspath $(VENV))/bin

CHAPTERS := $(wildcard book/*.ipynb)
RUNS := $(wildcard book/runs/*.ipynb)
BENCHMARKS := $(wildcard benchmarks/bench_*.py)
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=300 -n $(WORKERS) --dist loadfile

# Nothing is fetched, and no progress bar is drawn, while a page is built or a test runs.
export HF_HUB_OFFLINE = 1
export HF_DATASETS_DISABLE_PROGRESS_BARS = 1
export TQDM_DISABLE = 1
# A kernel profile that keeps ipykernel's start-up warning out of the log.
export IPYTHONDIR = $(abspath $(VENV))/ipython
# Checks must raise here; only the equation gate records them instead.
unexport LEADING_TERMS_CHECKS

.PHONY: setup book test runs lab refresh bench lint mutants clean

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed: name one, as in make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) has no venv module: install it (on Debian the package python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --disable-pip-version-check -r requirements.txt
	@mkdir -p "$(VENV)/ipython/profile_default"
	@echo 'c = get_config(); c.IPKernelApp.log_level = 40' \
	  > "$(VENV)/ipython/profile_default/ipython_kernel_config.py"
	@touch "$@"

# Clean, every chapter executed, warnings as errors; all of them are collected before it fails.
book: $(STAMP)
	rm -rf _build
	"$(BIN)/jupyter-book" build --all -W --keep-going -n .
	"$(BIN)/python" tests/offline.py _build/html
	@echo "The book: $(CURDIR)/_build/html/index.html"

# Unit tests, then every chapter and run notebook. What run notebooks write goes to a temporary folder.
test: export OMP_NUM_THREADS ?= 1
test: $(STAMP)
	"$(BIN)/pytest" -n $(WORKERS) --dist loadgroup tests
ifneq ($(CHAPTERS),)
	"$(BIN)/pytest" $(NBVAL) $(CHAPTERS)
endif
ifneq ($(RUNS),)
	results=$$(mktemp -d); trap 'rm -rf "$$results"' EXIT; \
	LEADING_TERMS_RESULTS="$$results" LEADING_TERMS_CACHE="$$results/cache" \
	  "$(BIN)/pytest" $(NBVAL) $(RUNS)
endif

# Heavy runs: make runs PRESETS="sample article". They may fetch a corpus and show how far they are.
runs: $(STAMP)
	env -u HF_HUB_OFFLINE -u HF_DATASETS_DISABLE_PROGRESS_BARS -u TQDM_DISABLE \
	  "$(BIN)/python" -m lib.presets $(or $(PRESETS),--list)

lab: $(STAMP)
	"$(BIN)/jupyter" lab book

# Executes every chapter and run notebook anew and stores the outputs, without time stamps.
refresh: export OMP_NUM_THREADS ?= 1
refresh: $(STAMP)
	set -e; results=$$(mktemp -d); trap 'rm -rf "$$results"' EXIT; \
	execute=("$(BIN)/jupyter" nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.timeout=300); \
	for notebook in $(CHAPTERS); do "$${execute[@]}" "$$notebook"; done; \
	for notebook in $(RUNS); do LEADING_TERMS_RESULTS="$$results" \
	  LEADING_TERMS_CACHE="$$results/cache" "$${execute[@]}" "$$notebook"; done; \
	"$(BIN)/nbstripout" --keep-output --keep-count $(CHAPTERS) $(RUNS)

bench: $(STAMP)
	@test -n "$(BENCHMARKS)" || { echo "There is no benchmarks/bench_*.py to run." >&2; exit 1; }
	set -e; time for script in $(BENCHMARKS); do "$(BIN)/python" "$$script" $(OPTIONS); done

lint: $(STAMP)
	"$(BIN)/ruff" check .

# Flips every sign of every function that carries an equation label; prints which check noticed.
mutants: export OMP_NUM_THREADS ?= 1
mutants: $(STAMP)
	"$(BIN)/python" tests/equations.py

clean:
	rm -rf _build .ruff_cache *.egg-info
