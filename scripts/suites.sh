#!/usr/bin/env bash
# The suites of `make test`: those that compute and those that mostly wait side by side, then the local suite alone,
# because its deadlines are the product's. Arguments go to pytest. Ends with an error when any of them does.
set -euo pipefail
cd "$(dirname "$0")/.."

run() {
    .venv/bin/python -m pytest -m "not deep" "$@"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run tests/contract "$@" >"$log" 2>&1 &
waiting=$!
status=0
run tests/unit tests/operator tests/tidy tests/model "$@" || status=$?
wait "$waiting" || status=$?
cat "$log"
run tests/local "$@" || status=$?
exit "$status"
