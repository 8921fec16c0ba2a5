#!/usr/bin/env bash
# The tests of `make test-model`, in two steps. Arguments go to pytest. Ends with an error when any of them does.
#   1. Searches of worlds, two at a time.
#   2. What an entry costs, in bytes and in time: alone.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/steps.sh

budget=tests/model/test_budget.py
step -n 2 tests/model tests/operator/test_plan_world.py --ignore "$budget"
step "$budget"
exit "$status"
