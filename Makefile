# `make demo` and `make test` set up .venv on a fresh machine, then do the job.
# Where the Python at hand has torch, NumPy and pytest (a GPU machine, perhaps without a network),
# it is used as it is and nothing is installed. PYTHON=python3.12 takes another interpreter.

PYTHON ?= python3
VENV := .venv
ARGS ?=

has = $(shell $(PYTHON) -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, '$(1)'.split())))" && echo yes)
COMPLETE := $(call has,torch numpy pytest)
HAS_TORCH := $(call has,torch)

ifeq ($(COMPLETE),yes)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q

.PHONY: help demo test bench cubins lint setup dev clean

help:
	@echo "make demo     ops on the GPU against their references; without a GPU, on the CPU"
	@echo "make test     all tests this machine can run      (ARGS='-k rope' picks some)"
	@echo "make bench    benchmarks on the GPU               (writes benchmarks/results and RESULTS.md)"
	@echo "make cubins   build csrc/ into cubins/ with nvcc  (ARGS='--only rope')"
	@echo "make lint     format, lint and type checks"

demo: setup
	@$(PY) -m kernel_hub demo $(ARGS)

# A process a core where pytest-xdist is at hand; on a GPU one (tests/conftest.py).
test: setup
	@$(PY) -m pytest $(shell $(PY) -c "import xdist" 2>/dev/null && echo "-n auto --dist worksteal") $(ARGS)

# Every one, then the table of results; those that did not go well are named at the end.
bench: setup
	@failed=; for file in benchmarks/bench_*.py; do \
	  echo "== $$file"; $(PY) $$file $(ARGS) || failed="$$failed $$file"; done; \
	$(PY) benchmarks/make_results.py || exit 1; \
	[ -z "$$failed" ] || { echo "FAILED:$$failed"; exit 1; }

cubins:
	@PYTHON=$(PYTHON) ./build_cubins.sh $(ARGS)

lint: dev
	@echo "== format"
	@$(VENV)/bin/ruff format --check .
	@find csrc examples native -name '*.cu' -o -name '*.cuh' -o -name '*.c' -o -name '*.h' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror
	@echo "== lint"
	@$(VENV)/bin/ruff check .
	@echo "== types"
	@$(VENV)/bin/mypy

setup: $(READY)
	@:
ifeq ($(COMPLETE),yes)
	@echo "== using $$($(PYTHON) -c 'import sys; print(sys.executable)'): it has torch, NumPy and pytest"
endif

dev: $(VENV)/.dev

# torch never comes from an index that might send gigabytes of CUDA: a wheel at hand (pip's own
# find-links), else PyTorch's CPU index; with neither the tests that need it skip and say so.
$(VENV)/.ready: setup.py Makefile
	@echo "== $(VENV): a virtual environment of $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)
	@echo "== kernel_hub, editable, with NumPy and the test tools"
	@$(PIP) install -e '.[test]'
ifneq ($(HAS_TORCH),yes)
	@echo "== torch for the CPU, if a build of it is at hand"
	@if $(PIP) install --no-index --no-deps torch==2.13.0 2>/dev/null \
	  || $(PIP) --retries 0 --timeout 15 install --no-deps \
	       --index-url https://download.pytorch.org/whl/cpu torch 2>/dev/null; \
	then $(PIP) install torch; \
	else echo "   none for $$($(PYTHON) --version): going on without torch (pip install torch in $(VENV) changes that)"; fi
endif
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@echo "== format, lint and type tools"
	@$(PIP) install -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .ci-venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
