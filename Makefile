# Two commands do everything on a fresh machine with Python 3.11: `make serve` and `make test`.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# A folder, hub id or GGUF file. Empty: SmolLM2-135M-Instruct, or the toy where it cannot be fetched.
MODEL  ?=
PORT   ?= 8000
# Where pip finds torch's CPU build if the default index has only the CUDA one.
TORCH_INDEX ?=
ARGS   ?=

.PHONY: help setup packages kernels resolve serve test check lint types imports proto chart render images unit sim integration pods pictures explore fmt clean
.DEFAULT_GOAL := help

help: ## Show these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# pip takes what an interrupted installation left for whole, programs that it had not written yet included.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/.installing),--clear) $(VENV)
	@touch $(VENV)/.installing
	@$(MAKE) --no-print-directory --jobs 2 packages kernels
	@rm $(VENV)/.installing
	@touch $@

packages:
	$(BIN)/pip install --quiet --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,dev]'

# Beside pip, which mostly waits. It needs the standard library alone. Where it fails, the first start says so.
kernels:
	@nice $(PYTHON) -m engine.native 2> /dev/null || true

setup: $(VENV)/.installed ## Create the environment

resolve: $(VENV)/.installed ## Check that PyPI alone, with torch's build for CUDA, has what constraints.txt asks for
	@PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(BIN)/pip install --dry-run --quiet --ignore-installed \
	    --disable-pip-version-check -c constraints.txt torch '.[worker,dev]' && echo "PyPI has all of it"

SMALL := models/SmolLM2-135M-Instruct.gguf
TOY   := models/baton-demo

# Status 130 is an interrupted fetch, after which nothing else starts.
serve: $(VENV)/.installed ## Set up, fetch a small instruct model and serve it on port 8000
	@model="$(MODEL)"; \
	if [ -z "$$model" ]; then \
	    model=$(SMALL); \
	    [ -f $$model ] || $(BIN)/baton fetch-model $$model || { \
	        [ $$? -ne 130 ] || exit 130; \
	        model=$(TOY); echo "Serving the toy model $$model, which is trained here in two minutes, instead"; \
	        [ -d $$model ] || $(BIN)/baton demo-model $$model || exit; }; \
	fi; \
	exec $(BIN)/baton serve --model $$model --port $(PORT) $(ARGS)

test: check unit sim integration ## Set up and run every check and test

check: $(VENV)/.installed ## Lint, check types and imports, and compare generated files with their sources
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types imports render

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/pyright

imports: $(VENV)/.installed
	$(BIN)/lint-imports

PROTO_OUT := baton/wire/proto
GENERATE   = $(BIN)/python -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
             $(PROTO_OUT)/baton.proto

proto: $(VENV)/.installed ## Generate the .proto file, the mapping and the gRPC stubs from the messages' structs
	$(BIN)/python -m baton.wire.generate $(PROTO_OUT)
	$(call GENERATE,.)

# The chart's generated parts, and what each example's values make of it, into the folder $(1).
CHART    := deploy/helm/baton
EXAMPLES := $(basename $(notdir $(wildcard deploy/helm/values/*.yaml)))
define CHART_PARTS
	@mkdir -p $(1)/baton $(1)/rendered
	@$(BIN)/python -m baton.telemetry.render $(1)/baton
	@$(BIN)/python -m commands.chart $(1)/baton/values.schema.json
	@$(BIN)/python -m commands.chart_readme $(CHART) $(1)/baton/README.md
endef
define CHART_EXAMPLES
	@for name in $(EXAMPLES); do \
	    $(BIN)/helm template baton $(CHART) --namespace baton --values deploy/helm/values/$$name.yaml \
	        > $(1)/rendered/$$name.yaml || exit 1; done
endef

chart: $(VENV)/.installed ## Generate the chart's schema, rules and dashboards, and render the examples
	$(call CHART_PARTS,deploy/helm)
	$(call CHART_EXAMPLES,deploy/helm)

render: $(VENV)/.installed ## Fail if a generated file is not what its source generates
	@rm -rf build/render && mkdir -p build/render
	@$(call GENERATE,build/render)
	@$(BIN)/python -m baton.wire.generate build/render/$(PROTO_OUT)
	@for f in baton.proto mapping.py baton_pb2.py baton_pb2.pyi baton_pb2_grpc.py; do \
	    diff -u $(PROTO_OUT)/$$f build/render/$(PROTO_OUT)/$$f || { echo "stale: run 'make proto'"; exit 1; }; done
	$(call CHART_PARTS,build/render)
	$(call CHART_EXAMPLES,build/render)
	@for f in baton/values.schema.json baton/README.md baton/rules baton/dashboards rendered; do \
	    diff -ru deploy/helm/$$f build/render/$$f || { echo "stale: run 'make chart'"; exit 1; }; done

# Where images are pushed, and what builds them (docker or podman).
REGISTRY ?= localhost
DOCKER   ?= docker
VERSION  := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

images: ## Build the three images, run each once, and print the values that install exactly them
	@for kind in light cpu cuda; do \
	    $(DOCKER) build -f deploy/docker/Dockerfile.$$kind --build-arg VERSION=$(VERSION) \
	        --build-arg REVISION=$$(git rev-parse HEAD) $(ARGS) -t $(REGISTRY)/baton/$$kind:$(VERSION) . \
	    && $(DOCKER) run --rm --read-only --tmpfs /tmp $(REGISTRY)/baton/$$kind:$(VERSION) --help > /dev/null \
	    || exit 1; done
	@echo "images: {registry: $(REGISTRY), light: {tag: \"$(VERSION)\"}, worker: {tag: \"$(VERSION)\"}}"

unit: $(VENV)/.installed ## Run the unit, contract and tidy tests
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder tests/unit tests/contract tests/tidy

sim: $(VENV)/.installed ## Run the tests of the fault simulator; SEED=7 repeats one seed
	$(if $(SEED),$(BIN)/baton sim --seed $(SEED),$(BIN)/pytest -n auto --dist worksteal tests/simulator)

integration: $(VENV)/.installed ## Run the tests with real processes
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/integration

# What the tool is told: `make pods PODS="rdma-multi-node"` runs one variant with the images that are there.
PODS ?= --build --all
pods: $(VENV)/.installed ## Build the images and run the chart's pods on podman, as root; delete each in turn under load
	$(BIN)/python -m tests.pods $(PODS) $(ARGS)

pictures: $(VENV)/.installed ## Take the dashboard's pictures in docs/images anew: 20 minutes on a quiet machine
	$(BIN)/python -m tests.pictures docs/images

explore: $(VENV)/.installed ## Run unit and contract tests with cases that are new in each run
	BATON_EXPLORE=1 $(BIN)/pytest -n auto --dist loadfile tests/unit tests/contract

sanitize: $(VENV)/.installed ## Run the C++ kernels' tests under the address and undefined-behaviour sanitizers
	$(BIN)/python -m tests.sanitize

fmt: $(VENV)/.installed ## Format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove everything that was built, models included
	rm -rf $(VENV) build models *.egg-info engine/native/compiled
