# Everything here works in a fresh clone: the environment is made by whatever needs it first.
#
#   make demo        fine-tune a small model on this machine
#   make plugins     build and install the devices of examples/plugins (C++: four minutes)
#   make test        lint, types, import contracts, and the tests but the slow ones and those of the next
#                    two; about twelve minutes on two cores
#   make test-kit    the conformance kit: over the devices of examples/plugins, whose own tests run too,
#                    over the stand-in for Gaudi and over devices that are wrong; and docs/plugins.md
#   make test-more   clouds, benchmarks, versions of images, what Triton's compiler makes of kernels, reports in a
#                    browser
#   make test-slow   the slow tests of all of these
#   make zoo         every causal architecture of transformers, tiny, and the tables of docs/models.md;
#                    before a release (an hour)
#   make test-launchers     ssh, Open MPI, Slurm and clouds' containers over emulated machines; as root, on
#                    Debian; installs what is missing (20 minutes)
#   make test-gaudi-stack   the tests of what touches transformers, peft and DeepSpeed, with the versions
#                    that go with older releases of Gaudi (the extra hpu-lazy), in an environment of
#                    their own (.venv-gaudi; docs/stacks.md)
#   make test-lowest    the tests of run files, plugins, rows and models, with the oldest version
#                    of each package that pyproject.toml allows (.venv-lowest; docs/stacks.md); a download
#                    of 3 GB, half an hour
#   make image-cpu   build the container image for CPUs without Docker, and run the demo inside it, cut
#                    off from any network; as root, on Debian; installs what is missing
#   make test-image  the same, then the tests of that image
#   make gpu         check and measure an NVIDIA card: at most 8 minutes, no network (docs/gpu.md)
#   make gpu-full    the same with all parts; an hour and a half
#   make docs        write the generated parts of the documentation (docs/make_docs.py)
#   make lint        lint, types and import contracts alone
#   make format      format the code, and repair what the linter can
#   make .venv       only make the environment
#   make site        the documentation as a site with search, in build/site; a link that leads nowhere
#                    is an error
#   make clean       remove builds and caches; the environment stays
#
# PYTHON=python3.12     the interpreter to make the environment with
# TORCH_INDEX=URL       where torch is taken from: https://download.pytorch.org/whl/cpu has a build
#                       without GPU libraries, a tenth of the usual size
# JOBS=4                test processes; a test may start two ranks of its own
#
# Of make gpu and make gpu-full:
# WHEELS=folder         install from there, in .venv-gpu, beside the torch that PYTHON= has
# GPUS=4 HOSTS=file     cards of each machine; a host file of several machines (gpu-full)
# DEVICE=cpu            try the parts without a card
# PREDICT=h100:1        only show what is predicted for a machine
# PARTS=training,kit    only these
# OUTPUT=folder         for the page and the figures

PYTHON ?=
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
JOBS ?= 2

# The second stack is the first one's rules with these three changed.
VENV := .venv
EXTRAS := dev
PINS :=
BIN := $(VENV)/bin
PLUGINS := examples/plugins/anygauge-lazy examples/plugins/anygauge-sim
BUILT := $(VENV)/.plugins
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# More than one thread in each of several ranks only makes them wait for each other.
export OMP_NUM_THREADS ?= 1

# ensurepip, because some distributions ship an interpreter that cannot make an environment.
USABLE := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.DEFAULT_GOAL := test
.PHONY: gpu gpu-full demo docs plugins test tests test-kit test-more test-slow test-launchers test-gaudi-stack test-lowest \
    test-core zoo image-cpu test-image clean-images lint style types format site clean .venv

demo: $(STAMP)
	@$(BIN)/python examples/demo/demo.py

plugins: $(BUILT)

# A file's tests share what they train, so they stay in one process; the longest files come first.
DISTRIBUTED := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Which tests run when: a path below stands for all in it.
KIT := tests/testing tests/backends/test_hpu_kit.py tests/docs/test_plugins_page.py
MORE := tests/benchmarks tests/cli/test_cloud_jobs.py tests/cli/test_report_browser.py tests/clouds tests/docker \
    tests/docs/test_clouds_page.py tests/kernels/test_triton_compiles.py
QUICK := -m "not slow and not launchers and not image"

# Style and the build of the devices, which stand-ins of other tests are made of, have a process each;
# types are checked beside the tests, which wait for processes now and then.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j $(JOBS) --output-sync=target style $(BUILT)
	@$(MAKE) --no-print-directory -j 2 types tests

tests: $(BUILT)
	@echo "==> tests"
	@$(BIN)/python -m pytest $(QUICK) $(DISTRIBUTED) $(addprefix --ignore=,$(KIT) $(MORE))

test-kit: $(BUILT)
	@$(MAKE) --no-print-directory -j $(JOBS) --output-sync=target $(PLUGINS:%=test/%)
	@echo "==> tests of the kit"
	@$(BIN)/python -m pytest $(QUICK) $(DISTRIBUTED) $(KIT)

# Some benchmarks are tried on the simulated cards.
test-more: $(BUILT)
	@echo "==> more tests"
	@$(BIN)/python -m pytest $(QUICK) $(DISTRIBUTED) $(MORE)

# In a process of their own: a device that torch has loaded is there for good.
test/%: $(BUILT)
	@echo "==> tests of $*"
	@cd $* && $(CURDIR)/$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP) $(BUILT)
	@echo "==> slow tests"
	@$(BIN)/python -m pytest -m "slow and not launchers and not image" $(DISTRIBUTED)
	@for plugin in $(PLUGINS); do \
	    echo "==> slow tests of $$plugin"; \
	    (cd $$plugin && $(CURDIR)/$(BIN)/python -m pytest -m slow) || exit 1; \
	done

zoo: $(STAMP)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m tests.models.zoo

CLUSTER := openssh-server openssh-client openmpi-bin slurmctld slurmd slurm-client munge iproute2

test-launchers: $(STAMP) .venv-clouds/.installed
	@for program in sshd mpirun slurmctld slurmd sbatch munged ip; do \
	    PATH=$$PATH:/usr/sbin:/sbin command -v $$program >/dev/null || missing=1; \
	done; \
	if [ -n "$$missing" ]; then \
	    echo "==> installing $(CLUSTER)"; \
	    apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(CLUSTER); \
	fi
	@echo "==> tests of the launchers"
	@PATH=$$PATH:/usr/sbin:/sbin $(BIN)/python -m pytest -m launchers

# What clouds publish of their jobs' models, and a simulated service; none of it goes with ours.
CLOUDS := azure-ai-ml==1.35.2 kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 \
    awscli==1.46.3 moto[sagemaker,server]==5.2.5 pluggy

.venv-clouds/.installed: $(STAMP)
	@echo "==> installing the clouds' packages"
	@$(BIN)/python -m venv .venv-clouds
	@.venv-clouds/bin/python -m pip --quiet --disable-pip-version-check install $(CLOUDS)
	@touch $@

# Not what reads no model: the command line's pages, run files, the build, the benchmarks.
CORE := $(addprefix tests/,launch backends cli data gaudi_stack interface models planning strategies \
    training util)

test-core: $(BUILT)
	@echo "==> tests of the core in $(VENV)"
	@$(BIN)/python -m pytest $(QUICK) $(DISTRIBUTED) $(CORE) $(addprefix --ignore=,$(MORE))

# DeepSpeed's release that is nearest to Intel's fork, which comes with the vendor's image.
test-gaudi-stack:
	@$(MAKE) --no-print-directory test-core \
	    VENV=.venv-gaudi EXTRAS=dev,hpu-lazy PINS="deepspeed==0.16.9"

# DeepSpeed's oldest release cannot be built or imported where triton is and no GPU.
LOWEST := .venv-lowest
UV := $(LOWEST)/bin/uv pip
$(LOWEST)/.installed: pyproject.toml
	@echo "==> $(LOWEST) with the lower ends of the ranges"
	@$(or $(PYTHON),python3) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip --quiet --disable-pip-version-check install uv
	@$(UV) compile --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --extra dev pyproject.toml \
	    --output-file $(LOWEST)/all.txt
	@grep -v '^triton==\|^deepspeed==' $(LOWEST)/all.txt >$(LOWEST)/first.txt
	@$(UV) install --quiet --python $(LOWEST)/bin/python --no-deps -r $(LOWEST)/first.txt wheel editables
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(UV) install --quiet --python $(LOWEST)/bin/python --no-deps \
	    --no-build-isolation "$$(grep '^deepspeed==' $(LOWEST)/all.txt)" --editable .
	@touch $@

LOWEST_TESTS := $(addprefix tests/,config registry interface data models)

test-lowest: $(LOWEST)/.installed
	@$(LOWEST)/bin/python -m pytest $(QUICK) $(DISTRIBUTED) $(LOWEST_TESTS)

image-cpu:
	@sh docker/image-cpu.sh

test-image: $(STAMP) image-cpu
	@sh docker/stand-ins.sh
	@echo "==> tests of the image"
	@$(BIN)/python -m pytest -m image

clean-images:
	@sh docker/clean.sh

WHEELS ?=
GPUS ?=
HOSTS ?=
DEVICE ?=
PREDICT ?=
PARTS ?=
OUTPUT ?= runs/gpu/$(shell date +%Y-%m-%d-%H%M%S)
GPU_VENV := $(if $(WHEELS),.venv-gpu,$(VENV))

MEASURE = $(GPU_VENV)/bin/python -m benchmarks.gpu --output $(OUTPUT) \
    $(if $(DEVICE),--device $(DEVICE)) $(if $(GPUS),--gpus $(GPUS)) $(if $(HOSTS),--hosts $(HOSTS)) \
    $(if $(PREDICT),--predict $(PREDICT)) $(if $(PARTS),--parts $(PARTS))

gpu: $(GPU_VENV)/.installed
	@$(MEASURE)

gpu-full: $(GPU_VENV)/.installed
	@$(MEASURE) --full

.venv-gpu/.installed: pyproject.toml
	@echo "==> .venv-gpu from $(WHEELS), beside the torch of $(or $(PYTHON),python3)"
	@$(or $(PYTHON),python3) benchmarks/gpu/install.py $(WHEELS) .venv-gpu
	@touch $@

lint: style types

style: $(STAMP)
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@echo "==> hadolint"
	@$(BIN)/hadolint docker/*.Dockerfile
	@echo "==> import contracts"
	@$(BIN)/python -m tests.architecture.contracts

types: $(STAMP)
	@echo "==> mypy"
	@$(BIN)/mypy

docs: $(STAMP)
	@$(BIN)/python -m docs.make_docs

format: $(STAMP)
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

SITE := mkdocs-material==9.8.2

.venv-site/.installed:
	@$(or $(PYTHON),python3) -m venv .venv-site
	@.venv-site/bin/python -m pip --quiet --disable-pip-version-check install $(SITE)
	@touch $@

site: .venv-site/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict
	@echo "==> open build/site/index.html"

clean: clean-images
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name $(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Removed builds and caches. To make the environment anew: rm -rf $(VENV)"

CUDA_STANDIN := tests/standins/cuda

# Without isolation, because an isolated build would fetch the largest torch there is.
$(BUILT): $(STAMP) $(wildcard $(PLUGINS:=/csrc/*) $(PLUGINS:=/*.py) $(PLUGINS:=/pyproject.toml)) \
    $(wildcard $(CUDA_STANDIN)/*.py $(CUDA_STANDIN)/*.cpp)
	@echo "==> the devices of examples/plugins"
	@$(PIP) install --no-build-isolation --no-deps $(PLUGINS:%=--editable %)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	    echo "==> the stand-in for CUDA"; \
	    cd $(CUDA_STANDIN) && $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace >/dev/null; \
	fi
	@touch $@

.venv: $(STAMP)

# torch comes first and by itself: deepspeed's build needs it, and a build in isolation would fetch
# the largest torch there is once more. Naming torch again keeps the one that was chosen here.
# The stamp is written last, so that whatever was interrupted is taken up again.
$(STAMP): pyproject.toml
	@rm -f $@
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    chosen=; \
	    for candidate in $(or $(PYTHON),python3 python3.12 python3.11 python3.13); do \
	        if "$$candidate" -c '$(USABLE)' >/dev/null 2>&1; then chosen="$$candidate"; break; fi; \
	    done; \
	    if [ -z "$$chosen" ]; then \
	        echo "error: no usable Python 3.11, 3.12 or 3.13 with venv;" \
	            "tried: $(or $(PYTHON),python3 python3.12 python3.11 python3.13)." \
	            "Install one (Debian, Ubuntu: also python3-venv)," \
	            "or name it: make PYTHON=/path/to/python3.12" >&2; \
	        exit 1; \
	    fi; \
	    echo "==> $(VENV) with $$("$$chosen" --version)"; \
	    "$$chosen" -m venv --clear $(VENV); \
	fi
	@$(PIP) install --upgrade pip
	@echo "==> torch $(TORCH_VERSION)$(if $(TORCH_INDEX), from $(TORCH_INDEX)): the longest part"
	@$(PIP) install "torch==$(TORCH_VERSION)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@echo "==> what the builds need"
	@$(PIP) install setuptools wheel hatchling editables ninja numpy packaging psutil py-cpuinfo
	@echo "==> anygauge, deepspeed and the developer's tools"
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --no-build-isolation --editable ".[$(EXTRAS)]" "torch==$(TORCH_VERSION)" \
	    $(PINS)
	@$(PIP) check
	@touch $@
	@echo "==> ready: $(BIN)/anygauge --help"
