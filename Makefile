# Each command works from a bare clone: it makes .venv, installs into it, and runs.
#   PYTHON=python3.12 make test         another interpreter for .venv
#   make test ARGS=tests/test_engine.py one file; only what it needs is installed
#   make test ARGS="-k resume"          arguments for pytest, for the demo, or names of clients
#   make test ARGS=tests                the tests that `make test` leaves out, too
#   make test ARGS="--cases values"     even fewer cases: each value of each parameter once; "--cases one": one per test
#   make stress ROUNDS=2000             repetitions; under the sanitizers: make sanitize TESTS=tests/stress/threads.py ROUNDS=200
#   make test WORKERS=8                 number of test files that run in parallel; each takes about a core and 1 GB
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   make gpu PYTHON=python3             no .venv: that Python's packages as they are, without a network
#   make gpu PART=A COMMIT=$(git rev-parse HEAD) ARGS="--only build,host"   without a .git; some of the stages
#   AMP_ENGINE_BUILD=none make test     what to compile: none, cpu or cuda (docs/installing.md)
#   make dist PYTHON=python3.12         a wheel for that Python; run it once for each Python

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed$(AMP_ENGINE_BUILD:%=-%)
NATIVE := setup.py toolchain.py amp_engine/kernels/sources.py $(shell find csrc)
PLAIN_TORCH ?= torch==2.11.0
CUDA_TORCH ?= torch==2.14.1
WORKERS ?= 2
# --no-loadscope-reorder keeps the order of tests/conftest.py: xdist would start with the files of the most tests, not
# with the slowest files. A worker that a test killed ends the run: a new worker would get the same test first.
PYTEST = python -m pytest --cases pairs -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# What `make test` runs by itself: one case of each test.
QUICK = --cases one -m "not slow" --ignore=tests/tools
# OpenMP threads sleep while they wait for one another. If they spin, the default, the demo's smallest
# steps take half the time on an idle machine, and up to twenty times the time on a busy one.
export OMP_WAIT_POLICY ?= PASSIVE
# Python always writes bytecode, of the tests too: otherwise each worker compiles all of it again.
export PYTHONDONTWRITEBYTECODE :=
# Python compiles the modules that it imports; pip would take ten seconds to compile all of torch.
export PIP_COMPILE ?= 0

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.PHONY: help demo test test-all fuzz stress bench evidence clients zoo pictures site dist lint lint-format lint-mypy lint-pyright format \
	sanitize plain-venv plain cuda-venv cuda-build gpu gpu-carry clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: .venv/.extra-demo  ## train three small models at every level and in pure bfloat16; the table, build/demo/curves.png
	$(BIN)/python -m examples.demo $(ARGS)

# A test file that is named needs the extra `test` alone, but for these; else all that some file needs is installed.
DRAWING := tests/test_demo.py tests/test_docs.py tests/test_evidence.py tests/tools/telemetry/test_gradient_histogram.py
FILES = $(filter tests/%.py,$(subst ::, ,$(ARGS)))
TEST_EXTRAS = $(if $(FILES),$(if $(filter $(DRAWING),$(FILES)),demo) $(if $(filter tests/zoo/%,$(FILES)),zoo),demo zoo)

test: $(INSTALLED) $(TEST_EXTRAS:%=.venv/.extra-%)  ## run the quick tests of the core; with ARGS, such as "-k resume" or tests/tools, what it names, with each pair of values of parameters
	$(BIN)/$(PYTEST) $(or $(ARGS),$(QUICK))

test-all: .venv/.extra-demo .venv/.extra-zoo  ## run the tests in all cases, before a release
	$(BIN)/$(PYTEST) --cases all $(ARGS)

fuzz: $(INSTALLED)  ## hold random sequences of user actions against plain PyTorch; ARGS="--sequences 20000 --seed 0 --minutes 60"
	$(BIN)/python -m tests.fuzz $(ARGS)

# Named here, since `make test` must not collect these files.
STRESS := tests/stress/threads.py tests/stress/forks.py tests/stress/checkpoints.py
stress: $(INSTALLED)  ## run what only luck finds, in threads and forks, ROUNDS=2000 times, in runs that are killed, KILLS=200, and in 200 steps of ranks
	$(BIN)/python -m pytest -o faulthandler_timeout=0 $(STRESS) $(ARGS)
	STEPS=200 $(BIN)/python -m pytest -o faulthandler_timeout=0 $(addprefix tests/distributed/test_one_decision,.py _of_shards.py) $(ARGS)

bench: $(INSTALLED)  ## time step, host, casts and training: step.json and others like it in build/bench
	$(BIN)/python -m tests.benchmarks.step $(ARGS)
	$(BIN)/python -m tests.benchmarks.host $(ARGS)
	$(BIN)/python -m tests.benchmarks.dispatch $(ARGS)
	$(BIN)/python -m tests.benchmarks.train $(ARGS)

evidence: .venv/.extra-evidence  ## train 4 small models from 10 seeds at each level, compare with FP32: docs/evidence.md; ARGS="--seeds 2 --tasks digits" as a try
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.evidence --workers $(WORKERS) $(ARGS)

clients: $(INSTALLED)  ## train through programs that call apex, unmodified, and amp_engine.integrations, in build/clients
	$(BIN)/python -m tests.clients.run --torch "$(TORCH)" $(ARGS)

zoo: $(INSTALLED) build/zoo/.installed  ## hold the casts against every architecture of transformers, some of diffusers and timm: docs/zoo.md; ARGS="llama t5", ARGS=--resume
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/zoo/.venv/bin/python -m tests.zoo --workers $(WORKERS) $(ARGS)

build/zoo/.installed: tests/zoo/requirements.txt
	build/zoo/.venv/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear build/zoo/.venv
	build/zoo/.venv/bin/python -m pip install --quiet $(TORCH)
	build/zoo/.venv/bin/python -m pip install --quiet --requirement tests/zoo/requirements.txt
	touch $@

# mkdocs-material would print that a mkdocs 2 may come, which needs no action.
pictures: $(INSTALLED)  ## draw docs/pictures again, from what the code computes and prints now
	for script in docs/pictures/*.py; do PYTHONPATH=. $(BIN)/python $$script || exit; done

site: .venv/.extra-docs  ## the docs as a website, in build/site/index.html; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --config-file .ci/site/mkdocs.yml
	@echo "With the search: $(BIN)/python -m http.server -d build/site, then http://localhost:8000. Without it: build/site/index.html"

# One release of each minor version, oldest first: the wheel fits all releases of each minor version.
DIST_TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
dist: export AMP_ENGINE_BUILD := $(or $(AMP_ENGINE_BUILD),cpu)
dist:  ## for a release, half an hour: the sdist and a wheel for all of DIST_TORCHES, tried on the first and the last, in dist; AMP_ENGINE_BUILD=cuda where nvcc is
	$(PYTHON) -m tests.wheels $(DIST_TORCHES) $(ARGS)

lint: lint-format lint-mypy lint-pyright  ## check format, rules and types
lint-format lint-mypy lint-pyright: .venv/.extra-lint
lint-format:
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
lint-mypy:
	$(BIN)/python -m mypy
lint-pyright:
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: .venv/.extra-lint  ## rewrite the sources as `make lint` wants them
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

# Other builds use a copy of the tree, so that they do not replace its extension.
TREE := $(filter-out build dist %.egg-info,$(wildcard * .ci .github))
COPY = mkdir -p build/$@ && cd build/$@ && rm -rf $(TREE) && cp -a $(addprefix ../../,$(TREE)) . && rm -f amp_engine/_C.*
FLAGS := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -fno-wrapv
RUNTIMES = $(foreach library,libasan.so libubsan.so libstdc++.so,$(shell $${CXX:-c++} -print-file-name=$(library)))

# Without the cases of the kernels in Python and what starts Python anew, of which a sanitizer sees nothing.
SANITIZED := tests/kernels $(addprefix tests/casting/test_,by_dtype.py safety.py weight_copies.py) tests/test_build.py::test_what_is_forced_is_loaded
sanitize: $(INSTALLED)  ## run the tests of the C++ code with AddressSanitizer and UndefinedBehaviorSanitizer, or TESTS=tests/stress/threads.py
	$(COPY) && AMP_ENGINE_BUILD=cpu CFLAGS="$(FLAGS)" LDFLAGS="$(FLAGS)" ../../$(BIN)/python setup.py --quiet build_ext --inplace
	cd build/$@ && AMP_ENGINE_BUILD=cpu LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONMALLOC=malloc ../../$(BIN)/$(PYTEST) -k "not [plain and not -plain and not spawned_process" $(or $(TESTS),$(SANITIZED)) $(ARGS)

# The oldest torch that is supported.
plain-venv:
	.venv-plain/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv-plain
	.venv-plain/bin/python -m pip install --quiet $(PLAIN_TORCH)

plain: plain-venv  ## run the tests without compiled kernels, in .venv-plain, on the oldest torch that is supported
	$(COPY) && AMP_ENGINE_BUILD=none ../../.venv-plain/bin/python -m pip install --quiet --editable ".[plots,test]"
	cd build/$@ && AMP_ENGINE_BUILD=none ../../.venv-plain/bin/$(PYTEST) $(ARGS)

cuda-venv:
	.venv-cuda/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet $(CUDA_TORCH)

cuda-build: cuda-venv  ## where nvcc is: compile for CUDA in .venv-cuda, run the tests on that torch; needs no GPU
	$(COPY) && AMP_ENGINE_BUILD=cuda TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" ../../.venv-cuda/bin/python -m pip install --quiet --editable ".[plots,test]"
	cd build/$@ && ../../.venv-cuda/bin/python -m amp_engine info
	cd build/$@ && AMP_ENGINE_BUILD=cuda ../../.venv-cuda/bin/$(PYTEST) --ignore=tests/test_demo.py --ignore=tests/test_examples.py $(ARGS)

ifeq ($(origin PYTHON),command line)
GPU_PYTHON := $(PYTHON)
else
GPU_PYTHON := $(BIN)/python
gpu: .venv/.extra-demo .venv/.extra-zoo
endif
gpu:  ## on a machine with a GPU: test and measure, PART=A to F, each within three minutes but F; reports to OUT or build/gpu. GPU=simulator: tried out on the CPU
	$(GPU_PYTHON) -m tests.gpu_run --out $(or $(OUT),build/gpu) $(PART:%=--part %) $(if $(filter simulator,$(GPU)),--simulate) $(ARGS)

# If torch, Python, GPU or sources differ from these, `make gpu` compiles.
CARRY_PYTHON ?= python3.12
CARRY_TORCH ?= torch==2.11.0
CARRY_GPU ?= 9.0
gpu-carry:  ## where nvcc is: compile, in place, for make gpu on another machine, to which the two files that are named are taken; needs no GPU
	build/carry/bin/python -c "" 2>/dev/null || $(CARRY_PYTHON) -m venv --clear build/carry
	build/carry/bin/python -m pip install --quiet $(CARRY_TORCH) setuptools ninja
	build/carry/bin/python -m tests.gpu_run.build --carry $(CARRY_GPU)

clean:  ## remove what the commands made
	rm -rf .venv .venv-plain .venv-cuda build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache amp_engine/_C.*

# A moved or half made venv has no working python and is made again. `info` says why something was not compiled.
$(INSTALLED): pyproject.toml $(NATIVE)
	$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	rm -f .venv/.installed*
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	-$(BIN)/python -m amp_engine info
	touch $@

# An extra of pyproject.toml. It is asked of the installation, since pip would compile the clone again.
.venv/.extra-%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet "amp_engine[$*]"
	touch $@
