# Every target is one line over dev.py, which works without make. PYTHON=python3.12 picks the Python, ARGS=... adds options.
PYTHON ?= python3
TARGETS = demo test test-all install lint types fix faults tables audit clean

.PHONY: $(TARGETS)
$(TARGETS):
	@$(PYTHON) dev.py $@ $(ARGS)
