#!/usr/bin/env bash
# lock.sh [uv options, such as --upgrade]: pin every dependency of every extra in constraints.txt.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
uv=$(uv_bin "$(find_python)")
# torch stays on the release whose CPU build the vLLM connector is tested with.
"$uv" pip compile pyproject.toml --all-extras --universal --python-version 3.11 --quiet --no-annotate \
    --constraint <(echo 'torch==2.13.*') --custom-compile-command 'scripts/lock.sh' --output-file constraints.txt "$@"
