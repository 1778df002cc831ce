# One command each for whoever tries, develops or checks evener. Every target installs what it needs first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# pip's own progress on a terminal, silence in a log.
QUIET := $(shell test -t 2 || echo --quiet --quiet)
PIP := $(PY) -m pip install --disable-pip-version-check $(QUIET) --constraint constraints.txt
STAMP := $(VENV)/.installed

# Every folder with a distribution in it; a new backend is found without an edit here.
PROJECTS := $(wildcard core/pyproject.toml formats/pyproject.toml generation/pyproject.toml models/pyproject.toml server/pyproject.toml \
	inspection/pyproject.toml offload/pyproject.toml deploy/pyproject.toml conformance/pyproject.toml backends/*/pyproject.toml)
DISTRIBUTIONS := $(PROJECTS:/pyproject.toml=)

LLAMACPP ?= $(HOME)/.cache/evener/llamacpp
PROMPT ?= What is the capital of France?
PORT ?= 21002
ARGS ?=
# Tests with fewer instructions than the processor has: make test ISA=avx2. The first run compiles kernels of that level.
# Torch, MKL and oneDNN choose for themselves; torch's attention fails where it is held to AVX2 and oneDNN is not.
ISA ?= auto
ifneq ($(ISA),auto)
ifeq ($(filter avx2 avx512 avx512_vnni avx512_bf16,$(ISA)),)
$(error ISA=$(ISA): there is no such level; type ISA=avx2, avx512, avx512_vnni, avx512_bf16 or auto)
endif
export EVENER_CPU_ISA := $(ISA)
export ATEN_CPU_CAPABILITY := $(if $(filter avx2,$(ISA)),avx2,avx512)
export MKL_ENABLE_INSTRUCTIONS := $(if $(filter avx2,$(ISA)),AVX2,AVX512)
export ONEDNN_MAX_CPU_ISA := $(if $(filter avx2,$(ISA)),AVX2,AVX512_CORE)
endif
# So many processes share the test files, a whole file each; threads that wait for their next product do not hold a core.
JOBS ?= 2
# Runs with the slow tests remember which files passed.
RECORDED := PYTHONPATH=scripts
# Bytecode is kept, also where the environment says otherwise: hundreds of commands would compile evener again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(PY) -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
DIST ?= dist

.PHONY: help install kernels models model llamacpp run serve test test-all test-slow mutants test-peers test-tools test-vendors test-vendors-ascend test-vendors-ascend-triton test-vendors-changed test-forks-gpu test-forks-ranks test-page page-libraries search check wheels wheelhouse triton-binaries bench docs clean

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name what; do printf '%-16s %s\n' "make $$name" "$$what"; done

install: $(STAMP)  ## make .venv with every distribution editable

# torch comes first and alone, at the version of constraints.txt: whatever follows finds it there and leaves it as it is.
# pip leaves editable sources for their first import to compile: every process of the first tests would do it again.
$(STAMP): $(PROJECTS) constraints.txt scripts/dev-requirements.txt scripts/no-deps-requirements.txt
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch: the largest download, minutes on a slow line$(if $(QUIET), (no progress is shown in a log))"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "installing what development needs"
	@$(PIP) --requirement scripts/dev-requirements.txt
	@$(PIP) --no-deps --requirement scripts/no-deps-requirements.txt
	@echo "installing $(DISTRIBUTIONS)"
	@$(PIP) --no-build-isolation $(DISTRIBUTIONS:%=--editable ./%)
	@$(PY) -m compileall -q $(DISTRIBUTIONS:%=%/src)
	@touch $(STAMP)

models: install  ## put the three real models into $EVENER_MODELS (ONLY=smollm2: that one)
	@$(PY) scripts/fetch_models.py $(ONLY:%=--only %)

model: install
	@$(PY) scripts/fetch_models.py --only smollm2

# Its binding comes as source only, so it is compiled once, for this machine. Not for AMX: gcc takes the tile configuration
# for unused and drops it, and the first product is an illegal instruction (ggml-org/llama.cpp#26954). pip's cache may
# hold a wheel that was built with it.
NO_AMX := $(if $(filter x86_64,$(shell uname -m)),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
llamacpp:  ## build llama.cpp in an environment of its own, for the tests and benchmarks that compare with it
	@test -x $(LLAMACPP)/bin/python || { echo "building llama.cpp, once: some minutes"; $(PYTHON) -m venv $(LLAMACPP); }
	@CFLAGS="$(NO_AMX)" CXXFLAGS="$(NO_AMX)" $(LLAMACPP)/bin/python -m pip install --no-cache-dir --disable-pip-version-check $(QUIET) --no-binary llama-cpp-python "llama-cpp-python[server]==0.3.36"

# MODEL=... is served in place of the small model, which is not fetched then.
SERVED := $(if $(MODEL),install,model)
run: $(SERVED)  ## ask a real model one question over HTTP (PROMPT="...", MODEL=folder)
	@$(PY) scripts/demo.py $(if $(MODEL),--model $(call quoted,$(value MODEL))) --prompt $(call quoted,$(value PROMPT)) -- $(ARGS)

serve: $(SERVED)  ## serve a real model until Ctrl-C (PORT=21002, MODEL=folder, ARGS="key=value ...")
	@exec $(PY) scripts/demo.py $(if $(MODEL),--model $(call quoted,$(value MODEL))) --serve --port $(PORT) -- $(ARGS)

# Otherwise each process of the tests would compile them, all at the same time.
kernels: install  ## compile what the tests share, the CPU backend's kernels and the simulated device: a minute or two (ISA=...: of that level)
	@$(PY) scripts/compile_kernels.py

# One more than two cores: tests also wait, for processes and for time to pass.
test test-slow: JOBS = 3
test: model kernels  ## the tests, about eight minutes on two cores (ISA=avx2: as on a processor without AVX-512)
	@$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: install kernels  ## the slow tests that a change since their record can reach (docs/results/slow-tests.json)
	@files="$$($(PY) scripts/slow_tests.py select)"; \
	echo "slow test files to run: $$(wc -w <<< "$$files") of $$($(PY) scripts/slow_tests.py list | wc -l)"; \
	[ -z "$$files" ] && exit; \
	$(MAKE) models $$(grep -q llamacpp $$files && echo llamacpp) && \
	$(RECORDED) $(PYTEST) -p slow_tests -m "slow and not gpu" $$files $(ARGS)

test-all: models llamacpp kernels  ## every test, the slow ones too; the record of slow tests says which files passed
	@$(RECORDED) $(PYTEST) -p slow_tests -m "not gpu" $(ARGS)

test-peers: model  ## vLLM's tests of the HTTP API and other clients against the server (ARGS="clients", "deploy", "operators", "vllm --only TEXT")
	@$(PY) scripts/run_peers.py $(ARGS)

test-tools: install  ## checkpoints by gptqmodel, autoawq, llm-compressor, modelopt, bitsandbytes and torchao, read again; five minutes (ARGS="TOOL CASE")
	@$(PY) scripts/run_tools.py $(ARGS)

# torch_npu's wheel over a fake runtime, in a folder of the cache whose name is a hash of both; once for each chip.
ASCEND_TESTS := backends/ascend/vendor_tests
ASCEND_CHIPS := Ascend910B2 Ascend910_9391 Ascend310P3 Ascend950PR_9589
test-vendors-ascend: install
	@made="$$($(PY) $(ASCEND_TESTS)/environment.py)"; site="$$(sed -n 's/^PYTHONPATH=//p' <<< "$$made")"; \
	export LD_LIBRARY_PATH="$$(sed -n 's/^LD_LIBRARY_PATH=//p' <<< "$$made")"; \
	export ASCEND_OLDER_LIBRARY="$$(sed -n 's/^ASCEND_OLDER_LIBRARY=//p' <<< "$$made")"; \
	export PYTHONPATH="$$site:$(CURDIR)/backends/ascend/tests:$(CURDIR)/$(ASCEND_TESTS)$${PYTHONPATH:+:$$PYTHONPATH}"; \
	for chip in $(ASCEND_CHIPS); do \
	    echo "$$chip"; FAKE_ACL_CHIP=$$chip EVENER_VENDOR=torch_npu TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
	        OMP_WAIT_POLICY=passive $(PY) -m pytest -q -W default $(ASCEND_TESTS) $(ARGS); \
	done

# Huawei's builds of Triton and its compiler, in a folder of the cache too; nothing of them is in .venv.
test-vendors-ascend-triton: install
	@$(PY) -m pytest -q backends/ascend/triton_tests $(ARGS)

test-vendors: test-vendors-ascend test-vendors-ascend-triton  ## vendors' backends without their hardware, slow tests too: calls, the engine on simulated devices, compiled kernels
	@$(PYTEST) backends/parts/tests backends/hygon/tests backends/muxi/tests backends/gcu/tests tests/test_probe_matrix.py tests/test_containers.py $(ARGS)
	@$(if $(ARGS),,$(PY) scripts/vendor_tests.py record)

# What of it CI has time for: torch_npu's wheel on one chip. Slow tests of the other vendors run with all slow tests, and
# only `make test-vendors` as a whole says in its record that a package was tested.
test-vendors-changed: install
	@! $(PY) scripts/vendor_tests.py changed || $(MAKE) test-vendors-ascend ASCEND_CHIPS=Ascend910B2

# Shows that nothing in the packages for builds of torch that share a namespace needs their vendor's card.
test-forks-gpu: install  ## the kit over the hygon and muxi backends on any GPU of torch's namespace cuda
	@$(VENV)/bin/evener conformance --backend hygon --pretend hygon.arch=gfx936 $(ARGS)
	@$(VENV)/bin/evener conformance --backend muxi --pretend muxi.chip=C550 $(ARGS)

test-forks-ranks: install  ## two ranks over nccl with the hygon and muxi backends, on any two GPUs of torch's namespace cuda
	@$(PY) benchmarks/rank_check.py tokens --layouts 2x1 --families Llama Qwen3Moe --pretend hygon hygon.arch=gfx936
	@$(PY) benchmarks/rank_check.py tokens --layouts 2x1 --families Llama Qwen3Moe --pretend muxi muxi.chip=C550

search: model  ## the tests of properties, with examples that no run had before (ARGS="--hypothesis-seed=1": those of a seed)
	@$(PYTEST) -m "hypothesis and not gpu" --hypothesis-profile=search $(ARGS)

# Playwright drives Debian's Chromium; axe-core judges accessibility. Pictures of the page go to outputs/page.
PAGE_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/evener/page-tests
test-page: model  ## the page of the server in headless Chromium (apt-get install chromium, npm)
	@$(PIP) --requirement scripts/page-requirements.txt
	@$(PY) scripts/fetch_page_libraries.py --axe $(PAGE_CACHE)
	@AXE=$(PAGE_CACHE)/axe/axe.min.js $(PY) -m pytest -q server/page_tests $(ARGS)

page-libraries: install  ## fetch the page's JavaScript libraries at their pinned versions, by npm
	@$(PY) scripts/fetch_page_libraries.py

mutants: install  ## faults in our kernels, judged by the conformance kit; an hour or two (ARGS="--target cpu-native")
	@$(PY) scripts/mutants.py $(ARGS)

check: install  ## ruff and its format, mypy, the architecture tests, and whether generated pages are fresh
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m mypy
	@$(PY) -m pytest tests/test_architecture.py
	@$(PY) scripts/generate_docs.py --check

# The CPU backend's wheel carries its kernels for five levels of x86-64 (a minute or two); EVENER_CPU_LEVELS= leaves them out.
EVENER_CPU_LEVELS ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),all)
wheels wheelhouse: export EVENER_CPU_LEVELS := $(EVENER_CPU_LEVELS)

wheels: install  ## a wheel of every distribution in dist/
	@$(PY) scripts/build_wheels.py --out $(DIST) $(DISTRIBUTIONS)

wheelhouse: install  ## the same and their dependencies' wheels in wheelhouse/, without torch
	@$(PY) scripts/build_wheels.py --out wheelhouse --with-dependencies $(DISTRIBUTIONS)

# Triton's own version is part of a kernel's key, so they are compiled with the one that torch for CUDA brings, whatever is in .venv.
TRITON ?= 3.6.0
TRITON_HEADERS ?= $(wildcard $(HOME)/.pyenv/versions/3.1[0-3].*/include/python3.1?)
BINARIES := outputs/triton-binaries
triton-binaries: install  ## a wheel in dist/ with the Triton kernels of known models, compiled for known GPUs (none is needed; half an hour)
	@test -d $(BINARIES)/triton-$(TRITON) || $(PY) -m pip install --disable-pip-version-check $(QUIET) --no-deps --target $(BINARIES)/triton-$(TRITON) triton==$(TRITON)
	@PYTHONPATH=$(BINARIES)/triton-$(TRITON) $(PY) scripts/triton_binaries.py --out $(BINARIES) --headers $(TRITON_HEADERS) $(ARGS)
	@EVENER_TRITON_BINARIES=$(CURDIR)/$(BINARIES)/store $(PY) -m pip wheel --quiet --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) backends/triton-binaries

bench: model  ## the CPU tables of docs/performance.md in outputs/bench, in about ten minutes of a quiet machine
	@models="$${EVENER_MODELS:-$${XDG_CACHE_HOME:-$$HOME/.cache}/evener/models}"; \
	$(PY) benchmarks/tables.py "$$models/SmolLM2-135M-Instruct" --gguf "$$models/gguf/SmolLM2-135M-Instruct.Q4_1.gguf" $(ARGS)

docs: install  ## write the pages that are made from the source
	@$(PY) scripts/generate_docs.py

clean:  ## remove everything that was made here (models stay in the cache)
	rm -rf $(VENV) dist wheelhouse build outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One shell word, whatever is in it: a prompt may hold quotes.
quoted = '$(subst ','\'',$(1))'
