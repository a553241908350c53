# Two commands for a newcomer: `make simulate` and `make test`. Needs Python 3.11 and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip --disable-pip-version-check --no-input
ENVIRONMENT := FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
	RAY_USAGE_STATS_ENABLED=0 HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_OFFLINE=1
ARGS ?=
TORCH_INDEX ?=  # where torch comes from, if not from the default index

.PHONY: setup simulate test test-all lint proto lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-cache-dir -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install --no-cache-dir -q -c constraints.txt -e '.[cpu,dev]'
	$(PIP) install --no-cache-dir -q -c constraints.txt --no-deps trinity-rft  # only its HTTP client is used, in a test
	touch $(STAMP)

simulate: setup
	$(ENVIRONMENT) $(BIN)/headwater simulate $(ARGS)

test: setup lint
	$(ENVIRONMENT) $(BIN)/python -m pytest -m 'not slow' -n 2 --dist worksteal $(ARGS)

test-all: setup lint
	$(ENVIRONMENT) $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: setup
	$(BIN)/python -m grpc_tools.protoc -I edge_node/collecting --python_out=edge_node/collecting \
		--pyi_out=edge_node/collecting edge_node/collecting/trajectory.proto

lock: setup
	echo '# Exact versions of everything an installation brings; `make setup` uses it. Made by `make lock`.' > constraints.txt
	$(PIP) freeze --exclude-editable | sed 's/+cpu$$//' >> constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info
