# All set-up happens by itself: see scripts/setup.py. Override what is chosen with PYTHON=python3.12, or HOCKET_PYTHON=path
# to use an existing Python with its own torch.

PYTHON ?= python3
ifdef HOCKET_PYTHON
PYTHON := $(HOCKET_PYTHON)
endif
export HOCKET_PYTHON

PY := .venv/python
READY := .venv/ready$(subst /,-,$(HOCKET_PYTHON))

# Run a tool where it is installed, and say so where it is not.
tool = if $(PY) -c "import $(1)" 2>/dev/null; then $(PY) -m $(1) $(2); else echo "skipped: $(1) is not installed here"; fi

# Tests in several processes, where that is installed. ARGS="-n0" runs them in one, as -s and --pdb need it.
parallel = $$($(PY) -c "import xdist" 2>/dev/null && echo "-n auto --dist worksteal")

.DEFAULT_GOAL := help
.PHONY: help setup train test lint types test-gpu parity docs-tables docs lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-11s %s\n", $$1, $$2}'

$(READY): requirements/lock.txt requirements/docs.txt requirements/torch.txt pyproject.toml scripts/setup.py
	@$(PYTHON) scripts/setup.py
	@touch $@

setup: $(READY) ## Prepare Python, torch and the tools (the other targets do it by themselves)

train: $(READY) ## Train the tiny recipe; ARGS="..." adds or overrides settings
	@$(PYTHON) scripts/setup.py --check
	@$(PY) -m hocket train tiny $(ARGS)

test: $(READY) ## Check format, style and types, and run all tests that need no GPU; ARGS="..." goes to pytest
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(MAKE) --no-print-directory types || status=1; \
	$(PY) -m pytest -m "not gpu and not full" $(parallel) $(ARGS) || status=1; \
	exit $$status

lint: $(READY) ## Check format and style
	@$(call tool,ruff,format --check --quiet .)
	@$(call tool,ruff,check --quiet .)

types: $(READY) ## Check types
	@$(call tool,pyrefly,check --python-interpreter-path "$$($(PY) -c 'import sys; print(sys.executable)')")

test-gpu: $(READY) ## Run the tests that need GPUs
	@$(PY) -m pytest -m gpu $(ARGS)

parity: $(READY) ## Run the long tests, with 2000 cases of planned against sequential steps; ARGS="--parity-cases 9000" draws more
	@$(PY) -m pytest -m full $(parallel) $(ARGS)

docs-tables: $(READY) ## Renew the tables, plan excerpts and pictures of README and docs
	@$(PY) -m benchmarks.tables

docs: $(READY) ## Build the documentation as a site, in build/site (a Python of your own needs hocket[docs])
	@$(call tool,mkdocs,build --quiet)

lock: ## Renew requirements/lock.txt and docs.txt (needs uv)
	uv pip compile --universal --no-emit-package colorama --python-version 3.11 --generate-hashes --upgrade \
		--excludes requirements/torch.txt --custom-compile-command "make lock" \
		requirements/lock.in -o requirements/lock.txt
	uv pip compile --universal --python-version 3.11 --generate-hashes --upgrade \
		--constraints requirements/lock.txt --custom-compile-command "make lock" \
		requirements/docs.in -o requirements/docs.txt

clean: ## Remove what set-up and tests left behind
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
