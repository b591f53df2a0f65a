# Every target is a list of stages; tools/kvikbuild/targets.py has the lists. docs/development.md explains them.
PYTHON ?= python3
ENGINE ?= emulator
STUDY ?= links
BUILD := $(PYTHON) tools/build.py

.DEFAULT_GOAL := help
.PHONY: demo study test test-rdma gpu-check soak mutants wheel docs lint env contenders lock clean help

demo:  ## a prefill engine, a decode engine and a router here; shows each handover (ENGINE=vllm: real vLLM)
	$(if $(filter emulator vllm,$(ENGINE)),,$(error ENGINE is "$(ENGINE)"; it is emulator (the default) or vllm))
	@$(BUILD) $(if $(filter vllm,$(ENGINE)),demo-vllm,demo)

study:  ## a ready study, run and reported (root; 4 to 10 minutes; STUDY=links, loading: a file over NFS, or move)
	$(if $(filter links loading move,$(STUDY)),,$(error STUDY is "$(STUDY)"; it is links, loading or move))
	@$(BUILD) $(if $(filter links,$(STUDY)),study,study-$(STUDY))

test:  ## everything this machine can check (STAGES="rust python" runs only those; QUICK=1: six minutes' worth; JOBS=1)
	@JOBS="$(JOBS)" $(BUILD) $(if $(filter-out 0,$(QUICK)),test-quick,test) $(STAGES)

test-rdma:  ## two soft-RoCE devices in a small virtual machine, and what runs on them (FULL=1: at length)
	@FULL="$(FULL)" $(BUILD) test-rdma

gpu-check:  ## kvik's side of this machine's GPUs: byte by byte, how fast, and the tests over their driver
	@GPU_CHECK="$(GPU_CHECK)" $(BUILD) gpu-check

soak:  ## the same checks at length, for hours (STAGES="soak-sim" runs only that)
	@$(BUILD) soak $(STAGES)

mutants:  ## break each promise on purpose; its tests must notice (MUTANTS="parts of names" runs only those)
	@$(BUILD) mutants

wheel:  ## dist/kvik-*.whl and dist/kvik_lab-*.whl, built and checked
	@$(BUILD) wheel

docs:  ## target/docs/index.html, with every link and command in it checked
	@$(BUILD) docs

lint:  ## rustfmt, clippy, ruff, mypy, and the bounds of tools/house.toml
	@$(BUILD) lint

env:  ## .venv/dev and .venv/vllm with kvik installed, for work by hand
	@$(BUILD) env

contenders:  ## environments of what kvik is measured beside (CONTENDERS="nixl" makes only that)
	@$(PYTHON) tools/contenders.py $(or $(CONTENDERS),nixl mooncake)

lock:  ## pin the Python packages again (tools/locks/*.in -> *.txt)
	@$(BUILD) lock

clean:  ## remove what was built in this checkout (the caches outside it stay)
	@$(BUILD) clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
