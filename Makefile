PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: setup test tests lint demo docs clean

setup: $(READY)

# Runs again only when what it depends on changed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Esper needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

lint: $(READY)
	$(VENV)/bin/ruff check src tests tools benchmarks experiments
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Both at once: types alone would leave a core idle. Stealing keeps the tests of a file, and what they share, together.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint tests

tests: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

demo: $(READY)
	$(VENV)/bin/esper demo

# Needs nothing from the network once the extra is installed; the site is build/site/index.html.
docs: $(READY)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(VENV)/bin/python tools/docs.py api
	$(VENV)/bin/python tools/docs.py site

clean:
	rm -rf $(VENV) build dist demo
