# Each target first makes .venv, so that one command works on a fresh machine.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# What the whole suite runs with; `make test-versions` tries the others that a user may have.
TORCH  := torch>=2.13,<2.14
HF     := transformers>=5.23,<5.24
# Not 3.9, which is for torch 2.15: it prints what it leaks when a process ends.
TRITON := triton>=3.7,<3.9; sys_platform == "linux"

# Without an NVIDIA GPU take torch's CPU build, which needs no CUDA packages. A few seconds are enough to learn
# that the extra index cannot be reached; pip then goes on with the indexes it has.
CPU_INDEX := --timeout 15 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu

.PHONY: demo test test-versions lint bench gpu-check docs clean

demo: $(STAMP)
	$(PY) -m autopar demo

# Four workers for two cores: some tests wait most of their time.
test: $(STAMP)
	$(PY) -m pytest tests -q -n 4 --dist loadfile --no-loadscope-reorder

# A part of the tests with other versions of torch and transformers, each pair in an environment of its own (some GB),
# and the counts in docs/versions.md. PAIRS="2.12,5.10 2.15,5.24" are the pairs; without it all of the page's.
test-versions: $(STAMP)
	$(PY) -m tests.versions $(PAIRS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p autopar

bench: $(STAMP)
	@for script in tests/benchmarks/bench_*.py; do echo "== $$script"; $(PY) "$$script" || exit 1; done

# What works on this machine's GPUs: a table, and gpu_check.json. Without a GPU, the same checks on the CPU.
gpu-check: $(STAMP)
	$(PY) -m tests.gpu_check

docs: $(STAMP)
	$(PY) docs/make_passes.py
	$(PY) docs/make_options.py
	$(PY) docs/make_api.py
	$(PY) -m tests.faulty.planted_page
	$(PY) -m tests.compat.habit_page
	$(PY) -m tests.support.derived_rules_file
	$(PY) docs/make_pictures.py
	$(PY) docs/run_pages.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# compat: the clone is on the path of the environment, where a script beside a clone called autopar finds the package
# in it. Through setuptools' finder it would find the clone itself, as a namespace without anything in it.
$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	if nvidia-smi >/dev/null 2>&1; then index=""; else index="$(CPU_INDEX)"; fi; \
	  $(PY) -m pip install --quiet --no-deps $$index '$(TORCH)'
	$(PY) -m pip install --quiet -e '.[hf,dev]' '$(HF)' '$(TRITON)' --config-settings editable_mode=compat
	touch $@
