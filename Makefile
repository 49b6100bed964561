# Each target brings what it needs up by itself. Two commands are enough: `make demo` and `make test`.
.PHONY: demo test test-unit prometheus notebooks lint format protos clean help
SHELL := /bin/bash
VENV := .venv/.installed
PROTOS_VENV := .venv-protos/.installed
ARGS ?=

help:
	@echo "make demo       train the demo model on a local cluster; leaves runs/demo/ (ARGS='--seed 1' passes flags on)"
	@echo "make test       all tests: unit, and integration on real processes and real vLLM (ARGS='-k gateway' passes flags on)"
	@echo "make test-unit  the quick ones: no processes, no engine"
	@echo "make notebooks  run the notebooks of examples/notebooks/ and write them with their outputs"
	@echo "make lint       ruff, mypy --strict (node_runtime, tool_gateway, tool_backend), buf lint and breaking, regenerated stubs compared"
	@echo "make format     ruff format and the fixes ruff knows"
	@echo "make protos     regenerate the stubs after a change of protos/"
	@echo "make clean      remove the environments and caches"

demo: $(VENV)
	.venv/bin/fermata demo $(ARGS)

test: $(VENV) prometheus
	.venv/bin/python -m pytest $(ARGS)

# The one on PATH, else Debian's package unpacked into .tools/.
prometheus:
	@scripts/prometheus.sh >/dev/null

test-unit: $(VENV)
	.venv/bin/python -m pytest -m "not integration and not vllm" $(ARGS)

notebooks: $(VENV)
	.venv/bin/python scripts/notebooks.py

lint: $(VENV) $(PROTOS_VENV)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/buf lint
	.venv/bin/buf breaking --against protos/baseline.binpb
	scripts/protos.sh --check

format: $(VENV)
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

protos: $(PROTOS_VENV)
	scripts/protos.sh

.venv/.installed: scripts/venv.sh requirements/cpu.txt requirements/dev.txt pyproject.toml
	scripts/venv.sh .venv

.venv-protos/.installed: scripts/venv.sh requirements/protos.txt
	scripts/venv.sh .venv-protos

clean:
	rm -rf .venv .venv-protos .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
