# The commands of this project. Each sets up .venv first if needed: once in minutes, then in no time.
#   make serve     serve the bundled model on 127.0.0.1:8000; ARGS="model=... port=..." for your own
#   make demo-adapters  the same questions to the bundled model and to two adapters, in one batch
#   make train-adapters  train these two adapters anew
#   make test      every test that a CPU machine can run
#   make check     lint, format, types, import rules
#   make test-unit the quick tests: no Ray, no real model
#   make fmt       format the code
#   make bench     print the table of speeds
#   make bench-sampling  the same of sampling by itself, beside transformers' processors
#   make bench-adapters  what adapters cost, beside the same engine without them
#   make test-gpu  what needs a GPU: kernels, the engine, equal bits in any company
#   make bench-gpu    attention backends on a GPU, and what batch_invariant costs
#   make bench-contract  what reading, refusing and framing cost, without a model
#   make soak      the long runs
#   make lock      resolve the dependencies anew into constraints.txt
#   make clean     remove caches (not .venv)
.PHONY: serve demo-adapters train-adapters test check test-unit fmt bench bench-sampling bench-adapters bench-contract soak lock
.PHONY: test-gpu bench-gpu clean setup
.NOTPARALLEL:

# Asked for only when .venv must be made. A pyenv shim may exist and still not run: try each.
PYTHON ?= $(shell for name in python3.11 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	&& echo $$name && break; done)
VENV_PYTHON := .venv/bin/python
STAMP := .venv/.medley-ready
# The converted bundled model lies here, so that serve, test and bench share one copy.
export MEDLEY_CACHE_DIR ?= $(CURDIR)/.cache/medley
ARGS ?=

serve: $(STAMP)
	@exec $(VENV_PYTHON) -m cluster.launch up $(ARGS)

# Trains first what .cache/medley/adapters lacks. ARGS goes to the service: "port=8080".
demo-adapters: $(STAMP)
	@exec $(VENV_PYTHON) -m examples.demo_adapters $(ARGS)

train-adapters: $(STAMP)
	@exec $(VENV_PYTHON) -m examples.train_adapters $(ARGS)

test: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -m "not gpu and not bench and not soak"

test-unit: $(STAMP)
	$(VENV_PYTHON) -m pytest -q tests/unit tests/contract

check: $(STAMP)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	.venv/bin/lint-imports

fmt: $(STAMP)
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

# BENCH=engine,http,start chooses parts; SAVE=1 also writes docs/benchmarks.md; QUICK=1 only shows
# that everything runs. ARGS goes to pytest.
bench: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -s -m bench tests/benchmarks $(if $(BENCH),--bench-parts=$(BENCH)) \
		$(if $(SAVE),--bench-save) $(if $(QUICK),--bench-quick) $(ARGS)

# SAVE=1 also writes docs/benchmarks-sampling.md; QUICK=1 only shows that everything runs.
bench-sampling: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -s -m bench tests/benchmarks/test_sampling_speed.py \
		--bench-sampling $(if $(SAVE),--bench-save) $(if $(QUICK),--bench-quick) $(ARGS)

# SAVE=1 also writes docs/benchmarks-adapters.md; QUICK=1 only shows that everything runs.
bench-adapters: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -s -m bench tests/benchmarks/test_adapter_speed.py \
		--bench-adapters $(if $(SAVE),--bench-save) $(if $(QUICK),--bench-quick) $(ARGS)

# Both need a torch with CUDA, which constraints.txt does not have; without one they say so.
test-gpu: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -m gpu tests/gpu $(ARGS)

# QUICK=1 only shows that everything runs.
bench-gpu: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -s -m bench tests/benchmarks/test_gpu_speed.py \
		--bench-gpu $(if $(QUICK),--bench-quick) $(ARGS)

# SAVE=1 also writes docs/benchmarks-contract.md.
bench-contract: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -s -m bench tests/benchmarks/test_contract_speed.py \
		--bench-contract $(if $(SAVE),--bench-save) $(ARGS)

soak: $(STAMP)
	$(VENV_PYTHON) -m pytest -q -s -m soak tests/soak $(ARGS)

lock:
	@sh scripts/lock.sh $(PYTHON) > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean:
	rm -rf .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build
	rm -rf *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

setup: $(STAMP)

# flock, where there is one, keeps two makes at the same time from building one .venv.
$(STAMP): pyproject.toml constraints.txt scripts/setup_venv.sh
	@mkdir -p .cache
	@$(if $(shell command -v flock),flock .cache/setup.lock) \
		sh scripts/setup_venv.sh "$(PYTHON)" $(STAMP)
