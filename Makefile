# The front door. Each command is a short script in tools/; a command brings what it needs with it.
#   make demo ARGS="--quick"     passes ARGS on
#   OXYTORCH_TORCH_SPEC=torch==2.15.0 make test     with another torch, in an environment and a build folder of its own
.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-devices nightly mutation bench gpu lint docs sanitize fuzz clean

help:
	@echo "make setup     install what is missing: Debian packages, .venv, PyTorch"
	@echo "make build     compile the libraries, the Python module, tests and benchmarks"
	@echo "make demo      train three models with plain, tuned and Oxytorch loops, and show the result"
	@echo "make test      build everything and run every test"
	@echo "make test-devices  every test on each device: cpu, sim, hpu, privateuse1, cuda (DEVICE=... chooses)"
	@echo "make nightly   20,000 random optimizer cases, a wheel from the source distribution, and make test with other torch versions"
	@echo "make mutation  plant 200 random faults in the sources, one by one, and count those that the tests notice"
	@echo "make bench     measure the kernels and race the peers; DEVICE=cuda races on a GPU instead"
	@echo "make gpu       on a GPU machine: build, conformance, tests and races in slices of nine minutes; ARGS=--list"
	@echo "make lint      formats, types, static analysis"
	@echo "make docs      the site, in build/docs/index.html"
	@echo "make sanitize  core tests under the address, undefined and thread sanitizers"
	@echo "make fuzz      the parsers under libFuzzer, ten minutes each; ARGS=\"60 dataset\" is a minute of one; needs clang++"
	@echo "make clean     remove what was built; .venv stays"

# Compiles while what only tests and the demo need is installed.
set_up_and_build = tools/setup.sh --to-build && { tools/setup.sh & tools/build.sh $(1); built=$$?; wait $$! && exit $$built; }

setup:
	@tools/setup.sh
build:
	@$(call set_up_and_build)
# All that it runs; --cpp installs the whole library first.
demo:
	@$(call set_up_and_build,$(if $(findstring --cpp,$(ARGS)),,oxytorch_python))
	@tools/run.sh oxytorch demo $(ARGS)
test: build
	@tools/test.sh $(ARGS)
test-devices: build
	@DEVICE="$(DEVICE)" tools/test_devices.sh $(ARGS)
nightly: build
	@tools/nightly.sh $(ARGS)
mutation: build
	@tools/run.sh python tests/mutation/run.py $(ARGS)
bench: build
	@DEVICE=$(DEVICE) tools/bench.sh $(ARGS)
# Sets up nothing: it takes the torch that the machine has.
gpu:
	@python3 tools/gpu.py $(ARGS)
lint: build
	@tools/run.sh python tools/lint.py $(ARGS)
docs: build
	@tools/docs.sh
sanitize: setup
	@tools/sanitize.sh
fuzz: build
	@tools/fuzz.sh $(ARGS)
clean:
	@tools/clean.sh
