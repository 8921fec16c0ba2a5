#!/usr/bin/env bash
# The tests of `make test-engines`, in two steps. Arguments go to pytest. Ends with an error when any of them does.
#   1. Tokens, interfaces, ranks: an engine a core, two engines at a time.
#   2. What is compared by time, alone: faults, the time to the first token, what the connector costs.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/steps.sh

timed=(tests/engines/vllm/test_faults.py tests/engines/vllm/test_server.py tests/engines/vllm/test_start.py)
step -n 2 tests/engines "${timed[@]/#/--ignore=}"
step "${timed[@]}"
exit "$status"
