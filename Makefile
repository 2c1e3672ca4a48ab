# Two commands do everything on a machine with Python 3.11 and pip: `make demo` and `make test`.

PYTHON ?= python3
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# One process of pip would compile everything; this takes all cores, and leaves out what nobody here
# imports or what is for a later Python. Without bytecode each process of the tests would compile.
COMPILE := -W ignore -m compileall -qq -j 0 -x '/tests?/|/transformers/models/|/py312'
DEMO := .venv-demo
TEST := .venv-test
DOCS := .venv-docs
XLA_GPU := .venv-xla-gpu
# One more than the cores of a small machine: some tests wait for processes that they start.
JOBS ?= 3

.PHONY: demo test test-quick mutants versions peers peers-torch peers-trainers peers-jax lint types tests table bench strangers soak gpu docs release-test calibration rules format clean

demo: $(DEMO)/installed
	@echo "[3/3] Training handwritten digits four ways: under a minute"
	$(DEMO)/bin/python examples/torch/digits.py

test: lint types tests

lint: $(TEST)/installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/python -m pytest -q tests/core/test_words.py

types: $(TEST)/installed
	$(TEST)/bin/mypy

# All backends in one queue of processes (tests/run.py); `make test-quick` is the core and one backend.
tests: $(TEST)/installed $(XLA_GPU)/installed
	$(TEST)/bin/python tests/run.py --jobs $(JOBS)

test-quick: $(TEST)/installed
	$(TEST)/bin/python tests/run.py --quick --jobs $(JOBS)

# Do the tests notice? Wrong versions of the sources, each against the tests that must fail.
mutants: $(TEST)/installed
	$(TEST)/bin/python tests/mutants/run.py

# The suites of other libraries with ours in the place of theirs.
peers: peers-torch peers-trainers peers-jax

# Those of Accelerate and Lightning; that of Lightning needs a checkout of its repository:
# make peers LIGHTNING=...
peers-torch: $(TEST)/installed
	$(TEST)/bin/python tests/peers/torch_libraries.py build/peers --lightning "$(LIGHTNING)"

# The recipes of docs/trainers.md with the libraries themselves, in an environment of their own.
PEERS := .venv-peers
peers-trainers:
	"$(PYTHON)" -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP_INSTALL) -c constraints.txt torch ".[torch]"
	$(PEERS)/bin/python $(PIP_INSTALL) "ray[train]" torchao torchtitan spmd_types
	$(PEERS)/bin/python tests/peers/large_trainers.py

# The tests of jmp and Optax that are about what we do too, with ours in the place of theirs.
peers-jax: $(TEST)/installed
	$(TEST)/bin/python tests/peers/jax_libraries.py

# The promises on the oldest and the newest releases that the extras admit, in environments in a temporary folder.
versions:
	"$(PYTHON)" tests/versions.py $(SETS)

# The tables of docs/api/what_runs_where.md, from the outcomes of the conformance suite, and of
# docs/api/documented_api.md.
RESULTS := $(CURDIR)/build/conformance.json
CONFORMANCE := LOSSSCALE_RESULTS="$(RESULTS)" $(TEST)/bin/python -m pytest -p conformance.results --numprocesses $(JOBS) tests/conformance
table: $(TEST)/installed
	mkdir -p build && rm -f "$(RESULTS)"
	KERAS_BACKEND=tensorflow $(CONFORMANCE)
	KERAS_BACKEND=jax $(CONFORMANCE)
	KERAS_BACKEND=torch $(CONFORMANCE)
	KERAS_BACKEND=tensorflow LOSSSCALE_TEST_KERAS=tf_keras $(CONFORMANCE)
	$(TEST)/bin/python tests/conformance/results.py "$(RESULTS)" docs/api/what_runs_where.md
	$(TEST)/bin/python tests/conformance/page_matrix.py docs/api/documented_api.md

# What loss scaling costs: build/bench/results.json, the tables in docs/internals and docs/images/cost.svg.
bench: $(TEST)/installed
	$(TEST)/bin/python -m benchmarks
	$(TEST)/bin/python -m benchmarks.pages build/bench/results.json
	$(TEST)/bin/python -m benchmarks.chart

# Is the verdict of a diagnosis right? Trainings beside it, and the tables of docs/internals/calibration.md.
CALIBRATION := $(TEST)/bin/python -m benchmarks.calibration --page docs/internals/calibration.md
# Short programs in the shapes of public ones; `make test` runs them too.
STRANGERS := $(TEST)/bin/python -m pytest -q tests/strangers
strangers: $(TEST)/installed
	KERAS_BACKEND=tensorflow $(STRANGERS)
	KERAS_BACKEND=tensorflow LOSSSCALE_TEST_KERAS=tf_keras $(STRANGERS)
	KERAS_BACKEND=jax $(STRANGERS)
	KERAS_BACKEND=torch $(STRANGERS)

# The site: build/site/index.html, which opens from the disk and needs no network. Warnings are errors.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# What is published, installed in bare environments with old and new pips: about an hour.
release-test: $(TEST)/installed
	"$(PYTHON)" tests/release.py $(RELEASE)

# What runs on a GPU, with the frameworks that PYTHON has: build/gpu.json and docs/internals/gpu.md.
gpu:
	"$(PYTHON)" tests/gpu.py

# Random programs by the thousand, long runs and runs that are killed, on every wrapper: some hours.
soak: $(TEST)/installed
	$(TEST)/bin/python tests/soak.py $(SOAK)

calibration: $(TEST)/installed
	for backend in torch tensorflow jax; do KERAS_BACKEND=$$backend $(CALIBRATION) || exit 1; done
	$(CALIBRATION) --library jax

# What bad batches do to a loss scale: the tables of docs/internals/bad_data.md.
rules: $(TEST)/installed
	$(TEST)/bin/python -m benchmarks.rules --page docs/internals/bad_data.md

format: $(TEST)/installed
	$(TEST)/bin/ruff check --fix .
	$(TEST)/bin/ruff format .

$(DEMO)/installed: pyproject.toml constraints.txt
	@echo "[1/3] Making the environment $(DEMO)"
	@"$(PYTHON)" -m venv $(DEMO)
	@$(DEMO)/bin/python $(PIP_INSTALL) --upgrade pip
	@echo "[2/3] Installing PyTorch, scikit-learn and matplotlib: 1 GB or more, one minute or more"
	@$(DEMO)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[torch,plots]" scikit-learn
	@touch $@

$(TEST)/installed: pyproject.toml constraints.txt
	@echo "[1/3] Making the environment $(TEST)"
	@"$(PYTHON)" -m venv $(TEST)
	@$(TEST)/bin/python $(PIP_INSTALL) --upgrade pip
	@echo "[2/3] Installing TensorFlow, JAX, PyTorch and what the tests use: about 4 GB, some minutes"
	@$(TEST)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[test]"
	@echo "[3/3] Compiling what was installed: about a minute"
	-@$(TEST)/bin/python $(COMPILE) $(TEST)/lib
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
	rm -rf $(DEMO) $(TEST) $(DOCS) $(XLA_GPU) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
