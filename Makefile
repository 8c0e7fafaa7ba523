# Two commands do everything on a fresh machine with Python 3.11: `make serve` and `make test`.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0 # first, and exactly: a range would pull the CUDA build
	$(BIN)/pip install -q -c constraints.txt -e '.[worker,dev]'
	touch $@
