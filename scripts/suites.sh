#!/usr/bin/env bash
# The suites of `make test`, in three steps. Arguments go to pytest. Ends with an error when any of them does.
#   1. What computes beside what mostly waits, two files at a time; what computes longest begins first.
#   2. Faults under full load, alone: their deadlines are the product's, and they take all there is to take.
#   3. The rest of the local suite, which mostly waits for processes and leases: three files at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/steps.sh
shallow=(-m "not deep")

loaded=(tests/local/test_soak.py tests/local/test_fault_kill.py tests/local/test_recovery.py)
step "${shallow[@]}" -n 2 --dist loadfile --no-loadscope-reorder tests/model tests/sim tests/contract tests/unit tests/operator tests/tidy
step "${shallow[@]}" "${loaded[@]}"
step "${shallow[@]}" -n 3 --dist loadfile tests/local "${loaded[@]/#/--ignore=}"
exit "$status"
