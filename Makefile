# Every target sets up what it needs. Variables: PORT, RANKS, MODEL, DEVICE, SEED, PYTHON.
PYTHON ?= python3
PORT   ?= 8000
RANKS  ?=
MODEL  ?=
DEVICE ?= cpu
SEED   ?= 1
BIN    := .venv/bin
PYTEST := $(BIN)/python -m pytest
SHORT  := -m "not gpu and not chaos and not long and not fleet"
LANES  := -n 2 --dist loadgroup
# One tree has one result; a run of single files shuffles its tests anew each time.
ORDER  := --randomly-seed=1

# Tests start hundreds of Python processes. Each would compile the modules that it imports again
# where the environment forbids to keep them compiled.
test test-long coverage: export PYTHONDONTWRITEBYTECODE =

.PHONY: up demo test test-long test-fleet references coverage setup check docs sbom chaos soak sim mutants bench gpu-bench screenshot

up: setup  ## serve on 127.0.0.1:$(PORT) until Ctrl-C
	@$(BIN)/aileron up --port $(PORT) --device $(DEVICE) $(if $(RANKS),--ranks $(RANKS)) $(if $(MODEL),--model $(MODEL))

demo: setup  ## watch streams live through dp2 -> tp2 -> dp2
	@$(BIN)/python -m tests.demo.run_demo --device $(DEVICE) $(if $(MODEL),--model $(MODEL))

test: check  ## lint, types, import contracts and every CPU test
	$(PYTEST) $(SHORT) $(LANES) $(ORDER) --durations=10 tests

test-long: setup  ## hours, or a quiet machine: timing, fuzzing, all seeds, new examples, chaos; leaves a record
	$(PYTEST) -m "(long or chaos or hypothesis) and not gpu and not fleet" -p no:randomly --record tests

references: setup  ## static vLLM's results anew, which make test compares with
	$(BIN)/python -m tests.harness.vllm.make_references

coverage: setup  ## lines of the product that make test runs, in all its processes
	$(BIN)/python -m tests.harness.runs.coverage_run $(PYTEST) $(SHORT) $(LANES) tests

test-fleet: setup  ## what the chart installs for many cells, as processes here; takes minutes
	$(BIN)/python -m pytest -s -p no:randomly tests/fleet

setup:  ## .venv with the locked dependencies; does nothing when it is ready
	@$(PYTHON) tools/bootstrap.py --device $(DEVICE)

check: setup  ## lint, format, types, import contracts, unused code and dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.unused_code
	$(BIN)/deptry .

docs: setup  ## the documentation as a site, without a network: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo build/site/index.html

sbom: setup  ## bills of materials (CycloneDX) of what the images install: build/sbom/
	@$(BIN)/python -m tools.sbom

chaos: setup  ## the long fault tests: every crash point, every kind of loss; prints what it measures
	$(BIN)/python -m pytest -m chaos -s -p no:randomly tests

soak: setup  ## two hours of switches, kills, bursts and clients that leave: make soak [SOAK_MINUTES=20] [DEVICE=cuda]
	@SOAK_DEVICE=$(DEVICE) $(BIN)/python -m tests.soak

sim: setup  ## replay one simulation: make sim SEED=4711 [WIDE=1] [PARTS=1 [BORROW=1]] [PRECOPY=1] [PIPELINES=1] [CALM=1]
	@$(BIN)/python -m tests.simulation --seed $(SEED) \
		$(if $(WIDE),--wide) $(if $(PARTS),--parts) $(if $(BORROW),--borrow) $(if $(PRECOPY),--precopy) \
		$(if $(PIPELINES),--pipelines) $(if $(CALM),--calm)

mutants: setup  ## mutation tests of what decides: make mutants [PART="stream pages loans host switch"]
	@$(BIN)/python -m tests.mutants $(PART)

bench: setup  ## CPU benchmarks; leaves JSON and a table under docs/benchmarks/
	@$(BIN)/python -m tests.bench.cpu

screenshot: setup  ## docs/live-page.png anew, of a cell of four ranks under load; needs a Chromium
	@AILERON_KEEP_SCREENSHOT=1 $(PYTEST) -p no:randomly tests/integration/test_metrics.py -k live_page

gpu-bench: DEVICE = cuda
gpu-bench: setup  ## against static vLLM on the GPUs here: make gpu-bench [RANKS=4] [SHAPE=llama-3-8b,qwen3-32b]
	@$(BIN)/python -m tests.bench.gpu $(if $(RANKS),--ranks $(RANKS)) $(if $(SHAPE),--shape $(SHAPE))
