#!/usr/bin/env bash
# The suites of `make test`, in three steps. Arguments go to pytest. Ends with an error when any of them does.
#   1. What computes beside what mostly waits, two files at a time; what computes longest begins first.
#   2. Faults under full load, alone: their deadlines are the product's, and they take all there is to take.
#   3. The rest of the local suite, which mostly waits for processes and leases: three files at a time.
set -euo pipefail
cd "$(dirname "$0")/.."

NONE_SELECTED=5 # pytest's exit code; with arguments such as "-k name" it is no failure of a step
arguments=("$@")
status=0

step() {
    local code=0
    .venv/bin/python -m pytest -m "not deep" "$@" "${arguments[@]}" || code=$?
    if ((code == NONE_SELECTED && ${#arguments[@]} > 0)); then code=0; fi
    if ((code != 0)); then status=$code; fi
}

loaded=(tests/local/test_soak.py tests/local/test_fault_kill.py tests/local/test_recovery.py)
step -n 2 --dist loadfile --no-loadscope-reorder tests/model tests/sim tests/contract tests/unit tests/operator tests/tidy
step "${loaded[@]}"
step -n 3 --dist loadfile tests/local "${loaded[@]/#/--ignore=}"
exit "$status"
