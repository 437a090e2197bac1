PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
OLDEST := .venv-oldest
ARGS ?=
# Most tests wait for something, so that more of them run at once than there are cores.
JOBS ?= $(shell $(PYTHON) -c "import os; print(max(4, os.cpu_count() or 1))")
ONLY ?=

.PHONY: demo test test-unit test-integration test-browser test-spark test-spark-oldest screenshots chaos bench bench-peers bench-report lint typecheck coverage clean

$(VENV)/demo.stamp: pyproject.toml requirements/demo.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	@touch $@

$(VENV)/dev.stamp: pyproject.toml requirements/demo.txt requirements/dev.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@

demo: $(VENV)/demo.stamp ## the whole system in one command; ARGS=--once ends by itself
	@exec $(BIN)/python manage.py demo $(ARGS)

test: $(VENV)/dev.stamp ## all tests, on the embedded PostgreSQL
	@$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) -m "not spark and not browser and not spark_cluster" $(ARGS)
	@# One Spark at a time. Where ARGS names other tests, there is none of it (5).
	$(BIN)/coverage run -m pytest -m "spark and not spark_cluster" $(ARGS) || test $$? = 5

test-unit: $(VENV)/dev.stamp ## the tests that need no PostgreSQL
	$(BIN)/python -m pytest -m "not integration and not browser and not spark and not spark_cluster" $(ARGS)

test-integration: $(VENV)/dev.stamp ## the tests that need PostgreSQL, but no Spark
	$(BIN)/python -m pytest -n $(JOBS) -m "integration and not browser and not spark and not spark_cluster" $(ARGS)

test-browser: $(VENV)/dev.stamp ## an operator's journeys in a real browser; on Debian: apt-get install chromium
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-spark: $(VENV)/dev.stamp ## on a real Spark cluster: a master, two workers, and what can go wrong
	$(BIN)/python -m pytest -m spark_cluster tests/spark_cluster $(ARGS)

# The oldest Spark that is supported, before everything else of the development environment.
$(OLDEST)/spark.stamp: $(VENV)/dev.stamp
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check "pyspark==4.1.0"
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/development.pth
	@touch $@

# (It leaves sockets of its own unclosed, which is no warning to us.)
test-spark-oldest: $(OLDEST)/spark.stamp ## what is written through Spark, with the oldest Spark
	$(OLDEST)/bin/python -m pytest -W "ignore::pytest.PytestUnraisableExceptionWarning" tests/spark/test_writing.py $(ARGS)

screenshots: $(VENV)/dev.stamp ## the pictures of README.md and docs
	$(BIN)/python -m pytest -q -m browser tests/browser/pictures.py $(ARGS)

chaos: $(VENV)/dev.stamp ## workers under random faults, then an account of every command; ARGS="--seconds 600 --seed 7"
	$(BIN)/python -m tests.soak $(ARGS)

$(PEERS)/peers.stamp: requirements/peers.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/peers.txt
	@touch $@

bench: $(VENV)/dev.stamp $(PEERS)/peers.stamp ## docs/performance.md, measured here; ONLY=work_io for one comparison
	$(BIN)/python -m benchmarks $(addprefix --only=,$(ONLY)) $(ARGS)

bench-peers: ## every peer: how fast it sends, works and reacts
	@$(MAKE) --no-print-directory bench ONLY=peers

bench-report: $(VENV)/dev.stamp ## the README's table, from what was measured last
	$(BIN)/python -m benchmarks.report

coverage: $(VENV)/dev.stamp ## of the last `make test`: at least 95 % of lines and branches
	@test -z "$$(ls .coverage.* 2>/dev/null)" || $(BIN)/coverage combine --quiet
	@test -f .coverage || { echo "There is nothing to report on: run 'make test' first."; exit 1; }
	$(BIN)/coverage report

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python manage.py makemigrations --check --dry-run

typecheck: $(VENV)/dev.stamp
	$(BIN)/mypy

clean: ## remove the virtual environment and the embedded databases
	@test ! -x $(BIN)/python || $(BIN)/python manage.py remove_embedded
	rm -rf $(VENV) $(PEERS) $(OLDEST) build dist .mypy_cache .ruff_cache .pytest_cache .coverage .coverage.* htmlcov
