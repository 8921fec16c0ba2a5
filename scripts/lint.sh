#!/usr/bin/env bash
# lint.sh: run every check even when one fails, so that one run shows all there is to mend; non-zero if any failed.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
bin=.venv/bin
failed=()

check() {
    local name=$1
    shift
    "$@" || failed+=("$name")
}

check ruff "$bin/ruff" check --quiet .
check mypy "$bin/mypy" client dataplane operator
# Tests compare views with bytes, and look twice at what changes in between.
check "mypy (tests)" "$bin/mypy" --no-strict-equality tests
# What is not installed anywhere may be less strict about its own functions, not about what it calls.
loose=()
for folder in bench demo docs; do
    if compgen -G "$folder/*.py" >/dev/null; then loose+=("$folder"); fi
done
check "mypy (${loose[*]})" "$bin/mypy" --allow-untyped-defs --allow-untyped-calls --allow-untyped-decorators \
    --allow-any-generics "${loose[@]}"
check import-linter "$bin/lint-imports" --no-logo --cache-dir .import_linter_cache
check "generated docs" "$bin/python" docs/generate.py --check

if ((${#failed[@]})); then
    printf -v list '%s, ' "${failed[@]}"
    fail "lint: ${list%, }"
fi
