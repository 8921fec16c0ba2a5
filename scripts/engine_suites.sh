#!/usr/bin/env bash
# The tests of `make test-engines`, in two steps. Arguments go to pytest. Ends with an error when any of them does.
#   1. Tokens, interfaces, ranks: an engine a core, two engines at a time; what takes longest begins first.
#   2. What is compared by time, alone: faults, the time to the first token.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/steps.sh

long=(
    tests/engines/vllm/test_engines.py tests/engines/sglang/test_*.py tests/engines/vllm/test_tokens.py
    tests/engines/vllm/test_start.py tests/engines/vllm/test_changes.py
)
timed=(tests/engines/vllm/test_faults.py tests/engines/vllm/test_server.py)
rest=()
for file in tests/engines/test_*.py tests/engines/*/test_*.py; do
    if [[ " ${long[*]} ${timed[*]} " != *" $file "* ]]; then rest+=("$file"); fi
done
step -n 2 --no-loadscope-reorder "${long[@]}" "${rest[@]}"
step "${timed[@]}"
exit "$status"
