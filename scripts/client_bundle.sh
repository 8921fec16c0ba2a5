#!/usr/bin/env bash
# client_bundle.sh DIRECTORY: build what injection copies into inference pods; the directory is made anew.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

target=$1
python=$(find_python)
uv=$(uv_bin "$python")
build() {
    rm -rf "$target"
    "$python" "$ROOT/scripts/client_bundle.py" "$target" --uv "$uv"
}
# First without the network: the cache may have every pinned wheel. A failure there is no news, so it stays silent.
UV_OFFLINE=1 build 2>/dev/null || build
