# Two commands for a fresh machine: make demo, make test. Each is a uv command that can be typed as well, once uv is there.
UV_RUN := ./scripts/uv run --no-sync

.DEFAULT_GOAL := help
.PHONY: help demo test lint check images clean

help:  ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo:  ## Evaluate the multiply rollout on the embedded model, in local sandboxes
	@$(UV_RUN) python -m harness run configs/eval/multiply.toml --policy embedded --sandbox local --name demo --fresh --yes

test:  ## Run the tests
	@$(UV_RUN) pytest

lint:  ## Check style and types
	@$(UV_RUN) ruff check
	@$(UV_RUN) ruff format --check
	@$(UV_RUN) mypy

check: lint test  ## Check style and types, run the tests

images:  ## Make the default sandbox image from Debian packages, where no registry can be reached
	@$(UV_RUN) python -m harness images bootstrap

clean:  ## Remove everything that the targets above have made here
	rm -rf .bootstrap .venv uv.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
