# Everything runs from here: `make run` and `make test` work on a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := cache compile dispatch runtime tools torch_compat

.PHONY: run test test-fast lint gpu gpu-wheels clean

run: $(VENV)/.run
	$(BIN)/piecegraph run

test: lint
	$(BIN)/pytest -m "not gpu"

test-fast: $(VENV)/.dev
	$(BIN)/pytest -m "not compile and not slow and not gpu"

# mypy sees the package through a link, since the repository root is the package.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	mkdir -p .typing && ln -sfn .. .typing/piecegraph
	MYPYPATH=.typing $(BIN)/mypy --strict $(PACKAGES:%=-p piecegraph.%)

# Elsewhere, where there is a network: what a machine with a GPU, torch and the usual tools lacks.
gpu-wheels:
	$(PYTHON) -m pip download --only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 -d .wheels pydantic platformdirs

# On a machine with a GPU: its own python and torch, and no network.
gpu:
	$(PYTHON) -m pip install --no-index --find-links .wheels pydantic platformdirs
	$(PYTHON) -m pip install --no-deps --no-build-isolation -e .
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m piecegraph bench step --quick

clean:
	rm -rf $(VENV) .typing .wheels build *.egg-info

# A change of the dependencies makes the environment anew.
$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
