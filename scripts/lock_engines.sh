#!/usr/bin/env bash
# lock_engines.sh [uv options, such as --upgrade]: pin what the environments of `make test-engines` are made of.
#
# For each NAME.in of tests/engines/requirements it writes NAME.txt: the engine, all that it needs beside PyTorch, and the
# client's base dependencies. NAME.excludes lists what the engine's metadata asks for and a run on the CPU does not use.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT/tests/engines/requirements"
uv=$(uv_bin "$(find_python)")

compile() {
    local name=$1
    shift
    "$uv" pip compile "$name.in" "$@" --python-version 3.11 --quiet --no-annotate \
        --custom-compile-command 'scripts/lock_engines.sh' --output-file "$name.txt"
}

names_in() { sed -n 's/^\([A-Za-z0-9_.-]*\).*/\1/p' "$@" | grep -v '^$'; }

compile torch "$@"
compile vllm --excludes vllm.excludes "$ROOT/pyproject.toml" "$@"
compile sglang --excludes sglang.excludes "$ROOT/pyproject.toml" "$@"
# LMCache lies over vLLM's environment: what is there already is not pinned twice.
compile lmcache --excludes <(cat lmcache.excludes && names_in vllm.txt) "$@"
