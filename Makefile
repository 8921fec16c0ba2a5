# Every target is documented by the text after its `##`; `make help` prints it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv

help: ## List every target with one line
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## Build .venv: the project installed editable, with all that development needs
	@scripts/venv.sh .venv dev
