# The whole developer interface: make train, make test, make checkstyle.
# A virtual environment is made in .venv on first use. To use the Python you are in instead, with torch and DeepSpeed
# already there: python3 -m pip install -e '.[dev]', then make train PYTHON=python3
VENV    ?= .venv
# Any torch from 2.11 to 2.14.
TORCH   ?= torch==2.13.0
ifdef PYTHON
  SETUP := is-installed
else
  PYTHON := $(VENV)/bin/python
  SETUP  := $(VENV)/.installed
endif
BIN := $(dir $(shell command -v $(PYTHON) 2>/dev/null || echo $(PYTHON)))
# All GPUs (or those in CUDA_VISIBLE_DEVICES); else two CPU processes of one thread each: more threads than cores make
# them many times slower.
GPUS   = $(shell $(PYTHON) -c "import torch; print(torch.cuda.device_count())")
LAUNCH = $(if $(filter-out 0,$(GPUS)),,DS_ACCELERATOR=cpu OMP_NUM_THREADS=1) \
         $(PYTHON) -m deepspeed.launcher.runner -q $(if $(filter-out 0,$(GPUS)),,--num_gpus 2)
CUDA_FILES := $(wildcard ops/csrc/*.cuh ops/csrc/*.cu ops/csrc/*.cpp ops/csrc/*.h)

# Small tests that between them launch every kernel. Each tensor is an allocation of its own, so that an access beside
# one is seen; initcheck must watch torch's kernels too, which write what ours read. They run without a sanitizer first,
# so that kernels are compiled before: a sanitizer follows compilers as well, since python3 may start another process.
SANITIZE_TESTS = tests/gpu/test_conversion_sweep.py tests/gpu/test_fused_kernels.py tests/gpu/test_routing.py
SANITIZE_SELECT = test_fp4_row or test_fp8_row or test_bf16_to or test_weight_to_fp8 or test_split_weight \
                  or test_swiglu_forward_into_records or (test_swiglu_backward_sizes and 3x256) \
                  or (test_combine_rows and True-True) or test_combine_rows_any_width \
                  or (test_gather_rows and (48-64 or 36-40 or 7-9)) \
                  or (test_exchange and (4-8-8-uniform or 2-4-1-dropped))
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 DS_FP4_SWEEP=2 compute-sanitizer --error-exitcode 1
SANITIZED = $(PYTHON) -m pytest $(SANITIZE_TESTS) -q -x -k "$(SANITIZE_SELECT)"

.PHONY: train test test-gpu test-sanitize checkstyle format clean is-installed

train: $(SETUP)  ## train bf16 and mxfp4 on the same text, end with a table and a picture
	$(LAUNCH) launch/pretrain.py --compare bf16 mxfp4

test: $(SETUP)  ## everything that runs here; GPU tests skip themselves without a GPU
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests -q

test-gpu: $(SETUP)
	$(PYTHON) -m pytest tests/gpu -q

test-sanitize: $(SETUP)  ## memcheck, racecheck and initcheck over every kernel: a minute or two on one GPU
	DS_FP4_SWEEP=1 $(SANITIZED)
	$(SANITIZE) --tool memcheck --kernel-name kns=ds_fp4 $(SANITIZED)
	$(SANITIZE) --tool racecheck --kernel-name kns=ds_fp4 $(SANITIZED)
	$(SANITIZE) --tool initcheck $(SANITIZED)

checkstyle: $(SETUP)
	$(PYTHON) -m ruff check .
	$(BIN)clang-format --dry-run --Werror $(CUDA_FILES)

format: $(SETUP)
	$(PYTHON) -m ruff check --fix .
	$(BIN)clang-format -i $(CUDA_FILES)

$(VENV)/.installed: pyproject.toml setup.py
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip setuptools wheel
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)" numpy
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

is-installed:
	@$(PYTHON) -c "import importlib.util as u; u.find_spec('ds_fp4.ops') or exit(1)" >/dev/null 2>&1 || { echo \
	  "ds_fp4 is not installed in $(PYTHON): $(PYTHON) -m pip install -e '.[dev]'" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist *.egg-info
