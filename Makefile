# `make demo` and `make test` need nothing but Python >= 3.10: each first makes the environment in .venv.
.DEFAULT_GOAL := help
.PHONY: help demo test slow packages lint format types layers ci bench readme
python := .venv/bin/python
stamp := .venv/.complete

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(stamp) ## see the method at work
	@.venv/bin/linlap demo

test: lint layers types ## every check, then the tests; ARGS="-k name" selects
	@OMP_NUM_THREADS=1 $(python) -m pytest -n 2 -m "not slow" $(ARGS)

slow: $(stamp) ## the tests that take long
	@$(python) -m pytest -m slow $(ARGS)

packages: .venv-packages/.complete ## the tests on networks of transformers, timm and torchvision, which are large to install
	@OMP_NUM_THREADS=1 .venv-packages/bin/python -m pytest -n 2 tests/test_packages.py $(ARGS)

lint: $(stamp) ## style and format
	@$(python) -m ruff check --quiet . && $(python) -m ruff format --quiet --check .

format: $(stamp) ## mend style and format where a machine can
	@$(python) -m ruff check --quiet --fix . ; $(python) -m ruff format --quiet .

types: $(stamp) ## type hints
	@$(python) -m pyright --pythonpath $(python)

layers: $(stamp) ## direction of the imports
	@$(python) -c 'from importlinter.cli import lint_imports_command as check; check(["--no-logo"])'

ci: ## what runs on every change
	@.ci/run

bench: $(stamp) ## the experiments of the paper; ARGS="--help" lists them
	@$(python) -m experiments $(ARGS)

readme: $(stamp) ## put the demo's output and figure into the README
	@$(python) tools/readme.py

$(stamp): pyproject.toml tools/environment.sh
	@tools/environment.sh
	@touch $@

.venv-packages/.complete: pyproject.toml
	@$(or $(PYTHON),python3) -m venv .venv-packages
	@.venv-packages/bin/python -m pip install -qq --editable '.[demo,dev,packages]'
	@touch $@
