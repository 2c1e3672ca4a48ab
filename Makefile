# Two commands do everything on a machine with Python 3.11 and pip: `make demo` and `make test`.

PYTHON ?= python3
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# One process of pip would compile everything; this takes all cores, and leaves out what nobody here
# imports or what is for a later Python. Without bytecode each process of the tests would compile.
# With one framework the first process compiles what it imports, which is a tenth of the disk less.
COMPILE := -W ignore -m compileall -qq -j 0 -x '/tests?/|/transformers/models/|/py312'
DEMO := .venv-demo
# One framework, of torch, jax, tensorflow and tf_keras, in an environment of its own; all by default.
FRAMEWORK ?=
TEST := .venv-test$(FRAMEWORK:%=-%)
EXTRA := $(patsubst jax,optax,$(FRAMEWORK:tf_keras=tf-keras))
ALL := --group test --editable ".[bench,diagnosis,docs,hosts]" --editable ./lossscale-migration
PACKAGES := $(if $(FRAMEWORK),--group $(FRAMEWORK) --editable ".[$(EXTRA)]",$(ALL))
DOCS := .venv-docs
XLA_GPU := .venv-xla-gpu
# One more than the cores of a small machine: some tests wait for processes that they start.
JOBS ?= 3

.PHONY: demo test test-quick test-migration lint types docs bench clean

demo: $(DEMO)/installed
	@echo "[3/3] Training handwritten digits six ways: half a minute at most"
	$(DEMO)/bin/python examples/torch/digits.py

# All backends in one queue of processes (tests/run.py); `make test-quick` is the core and one backend.
test: lint $(if $(FRAMEWORK),,types $(XLA_GPU)/installed)
	$(TEST)/bin/python tests/run.py --jobs $(JOBS) $(FRAMEWORK:%=--framework %)

lint: $(TEST)/installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/python -m pytest -q tests/core/test_words.py

# mypy reads the types of every framework. It keeps them in .mypy_cache, for tests/core/test_types.py.
types: $(TEST)/installed
	$(if $(FRAMEWORK),@echo "Types need every framework: make types",$(TEST)/bin/mypy)

test-quick: $(TEST)/installed
	$(TEST)/bin/python tests/run.py --quick --jobs $(JOBS)

# Old files: the tests of lossscale-migration.
test-migration: $(TEST)/installed
	$(TEST)/bin/python -m pytest -q --numprocesses $(JOBS) lossscale-migration/tests

# What loss scaling costs: benchmarks/results.json, the tables of the pages and docs/images/cost.svg.
bench: $(TEST)/installed
	$(TEST)/bin/python -m benchmarks
	$(TEST)/bin/python -m benchmarks.pages build/bench/results.json
	$(TEST)/bin/python -m benchmarks.chart

# The site: build/site/index.html, which opens from the disk and needs no network. Warnings are errors.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

$(DEMO)/installed: pyproject.toml constraints.txt
	@echo "[1/3] Making the environment $(DEMO)"
	@"$(PYTHON)" -m venv $(DEMO)
	@$(DEMO)/bin/python $(PIP_INSTALL) --upgrade pip
	@echo "[2/3] Installing PyTorch, scikit-learn and matplotlib: 1 GB or more, one minute or more"
	@$(DEMO)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[torch]" scikit-learn matplotlib
	@touch $@

$(TEST)/installed: pyproject.toml lossscale-migration/pyproject.toml constraints.txt
	@echo "[1/3] Making the environment $(TEST)"
	@"$(PYTHON)" -m venv $(TEST)
	@$(TEST)/bin/python $(PIP_INSTALL) --upgrade pip
	@echo "[2/3] Installing $(or $(FRAMEWORK),every framework) and what the tests use: $(if $(FRAMEWORK),1 to 2,about 4) GB, some minutes"
	@$(TEST)/bin/python $(PIP_INSTALL) --constraint constraints.txt $(PACKAGES)
	$(if $(FRAMEWORK),,@echo "[3/3] Compiling what was installed: about a minute")
	$(if $(FRAMEWORK),,-@$(TEST)/bin/python $(COMPILE) $(TEST)/lib)
	@touch $@

# XLA's compiler for GPUs, which needs none; JAX would use it wherever it finds it. Where there is no
# such wheel, the tests that need it are left out.
$(XLA_GPU)/installed: $(TEST)/installed
	@echo "Downloading XLA's compiler for GPUs: 180 MB"
	@rm -rf $(XLA_GPU)
	-@$(TEST)/bin/python $(PIP_INSTALL) --constraint constraints.txt --no-deps --target $(XLA_GPU) jax-cuda12-pjrt jax-cuda12-plugin && touch $@

$(DOCS)/installed: pyproject.toml constraints.txt
	"$(PYTHON)" -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP_INSTALL) --upgrade pip
	$(DOCS)/bin/python $(PIP_INSTALL) --constraint constraints.txt ".[docs]"
	touch $@

clean:
	rm -rf $(DEMO) .venv-test* $(DOCS) $(XLA_GPU) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
