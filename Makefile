# `make demo` and `make test` find or make a Python that can do the job (tools/environment.py), then
# do it. PYTHON=python3.12 names another to begin with; TORCH=cuda fetches torch for the GPU here.

ARGS ?=
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
  $$p -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null && { echo $$p; exit; }; \
  done; echo python3)
endif

# Sets $$py to the Python for $(1), which imports kernel_hub from here.
with_python = py=$$($(PYTHON) tools/environment.py $(1) $(if $(TORCH),--torch '$(TORCH)')) || exit 1; \
  PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"; export PYTHONPATH

.PHONY: help demo test bench cubins lint docs dev release python clean

help:
	@echo "make demo     ops on the GPU against their references; without a GPU, on the CPU"
	@echo "              (TORCH=cuda fetches torch for this GPU: gigabytes, the size is said first)"
	@echo "make test     the tests this machine can run      (ARGS='-k rope' picks some;"
	@echo "              of costly ones it draws some by lot, ARGS=--every-case runs all)"
	@echo "make bench    benchmarks on the GPU               (writes benchmarks/results and RESULTS.md;"
	@echo "              ARGS=--quick: fewer cases)"
	@echo "make cubins   build csrc/ into cubins/ with nvcc  (ARGS='--only rope')"
	@echo "make lint     format, lint and type checks"
	@echo "make docs     the documentation as a site, in build/site"
	@echo "make release  sdist, wheel, SHA256SUMS and SBOM of the last commit in dist/"

demo: python
	@$(call with_python,demo); "$$py" -m kernel_hub demo $(ARGS)

# A process a core where pytest-xdist is at hand; on a GPU one (tests/conftest.py). Python keeps what
# it compiled, or each of the hundreds of processes that tests start compiles kernel_hub again.
test: python
	@unset PYTHONDONTWRITEBYTECODE; $(call with_python,test); \
	if "$$py" -c "import xdist" 2>/dev/null; then set -- -n auto --dist worksteal; fi; \
	"$$py" -m pytest "$$@" $(ARGS)

# Every one, then the table of results; those that did not go well are named at the end.
bench: python
	@$(call with_python,bench); failed=; for file in benchmarks/bench_*.py; do \
	  echo "== $$file"; "$$py" $$file $(ARGS) || failed="$$failed $$file"; done; \
	"$$py" benchmarks/make_results.py || exit 1; \
	[ -z "$$failed" ] || { echo "FAILED:$$failed"; exit 1; }

cubins: python
	@PYTHON=$(PYTHON) ./build_cubins.sh $(ARGS)

lint: python
	@set -e; $(call with_python,dev); bin=$$(dirname "$$py"); \
	echo "== format"; \
	"$$bin/ruff" format --check .; \
	find csrc examples native -name '*.cu' -o -name '*.cuh' -o -name '*.c' -o -name '*.h' | xargs -r "$$bin/clang-format" --dry-run -Werror; \
	echo "== lint"; \
	"$$bin/ruff" check .; \
	echo "== types"; \
	"$$bin/mypy"; \
	"$$bin/mypy" tools; \
	"$$bin/mypy" benchmarks

# Links that lead nowhere fail it (mkdocs.yml), unless it is --quiet, which hides them from itself.
docs: python
	@$(call with_python,docs); NO_MKDOCS_2_WARNING=1 "$$py" -m mkdocs build $(ARGS) && \
	  echo "open build/site/index.html"

dev: python
	@$(call with_python,dev)

release: python
	@$(PYTHON) tools/release.py $(ARGS)

python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null || { \
	  echo "kernel_hub needs Python 3.10 or later; $(PYTHON): $$($(PYTHON) --version 2>&1 || true)"; \
	  echo "  make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; } >&2

clean:
	rm -rf .venv .venv-over build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
