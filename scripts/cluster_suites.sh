#!/usr/bin/env bash
# The tests of `make test-cluster`: the suites that SUITES names, one after the other. Arguments go to pytest. Ends with
# an error when any of them does.
#   The operator's loop, two files at a time: each has an API server of its own.
#   The whole cluster, alone: it takes all there is to take.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/steps.sh

for suite in $SUITES; do
    case $suite in
    tests/operator) step -n 2 --dist loadfile --no-loadscope-reorder "$suite" ;;
    *) step "$suite" ;;
    esac
done
exit "$status"
