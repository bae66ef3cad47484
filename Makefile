# Needs Python 3.10 or newer, make and a C++ compiler. Everything else goes into $(VENV).
#
# TORCH=2.15.* takes that torch, with the Triton that it asks for, in a venv of its own; all else stays at the versions of
# $(CONSTRAINTS).
PYTHON ?= python3
CONSTRAINTS ?= constraints/py311-torch213.txt
TORCH ?= $(patsubst torch==%,%,$(shell grep '^torch==' $(CONSTRAINTS)))
ifeq ($(origin TORCH),file)
VENV ?= .venv
OTHERS := cat
else
VENV ?= .venv-torch$(subst .*,,$(TORCH))
OTHERS := grep -Ev '^(torch|triton)=='
endif
GPU_PYTHON ?= $(PY)

PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help venv lint test zoo gpu demo bench clean

help:
	@echo "make venv    an environment in $(VENV), at the versions of $(CONSTRAINTS)"
	@echo "make lint    ruff and mypy"
	@echo "make test    every test, with some models of the zoo; TORCH=2.15.* takes another torch"
	@echo "make zoo     every model of the zoo (tests/zoo), and a table of what became of each"
	@echo "make gpu     everything that needs a GPU: tests, bytes, sanitizers, a step; OUT=DIR keeps what they say"
	@echo "make demo    train a small GPT in bf16 and in NVFP4, write the comparison to demo/"
	@echo "make bench   every benchmark, JSON under benchmarks/results/"
	@echo "make clean   remove what the other targets made"

venv: $(STAMP)

# torch goes first and alone: mirrors that carry a CPU build carry it for the exact version only, and an install
# that also resolves the other requirements may look at other versions.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet 'torch==$(TORCH)'
	$(OTHERS) $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(PY) -m pip install --quiet -c $(VENV)/constraints.txt -e '.[test,examples,zoo]'
	@touch $@

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# One thread in each of the two workers: two OpenMP teams on the same cores wait for each other.
test: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m 'not zoo'

zoo: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 tests/zoo

# GPU_PYTHON: another interpreter with torch, Triton and pytest, in which nothing needs to be installed.
gpu: $(if $(filter $(PY),$(GPU_PYTHON)),venv)
	$(GPU_PYTHON) benchmarks/gpu_check.py $(if $(OUT),--out $(OUT)) $(if $(PARTS),--parts $(PARTS))

# Waiting threads sleep: where the cores have other work too, spinning ones make a step many times slower.
demo: venv
	OMP_WAIT_POLICY=passive $(PY) examples/train_gpt.py --out demo

bench: venv
	set -e; for script in benchmarks/*.py; do case $$script in \
	  */common.py|*/gpu_cases.py|*/gpu_check.py|*/llama.py|*/render_*.py) ;; \
	  *) echo "== $$script"; $(PY) $$script;; esac; done
	$(PY) benchmarks/render_docs.py

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
