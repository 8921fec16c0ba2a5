#!/usr/bin/env bash
# venv.sh DIRECTORY EXTRAS: build or refresh a virtual environment with the project installed editable.
#
# The environment's key is the Python and everything that decides its contents; while it is unchanged nothing is done.
# Packages are hard links into uv's cache, so that a second clone costs seconds and no download.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

venv=$1 extras=$2
cd "$ROOT"

python=$(find_python)
# One build at a time per user: two would race on the same directory.
mkdir -p "$CACHE"
if command -v flock >/dev/null; then
    exec 9>"$CACHE/venv.lock"
    flock --wait 900 9 || fail "another environment has been building for 15 minutes; see who holds $CACHE/venv.lock"
fi
base=$({
    "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
    printf '%s\n' "$ROOT/$venv" "$extras"
    cat constraints.txt
} | sha256sum | cut -d' ' -f1)
key="$base $(cat pyproject.toml scripts/build_native.py client/polarkv_client/native/move.c | sha256sum | cut -d' ' -f1)"
if [[ $(cat "$venv/.polarkv-key" 2>/dev/null) == "$key" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

uv=$(uv_bin "$python")
say "building $venv ($extras)"
# With the same pins it is brought up to date in place: programs may be running from it. Other pins make it anew, so that
# nothing stays in it that is no longer asked for.
if [[ $(cut -d' ' -f1 "$venv/.polarkv-key" 2>/dev/null) != "$base" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    rm -f "$venv/.polarkv-key"
    "$uv" venv --quiet --clear --python "$python" "$venv"
fi
export VIRTUAL_ENV="$ROOT/$venv"

install() { "$uv" pip install --quiet --constraint constraints.txt "$@"; }

case ",$extras," in *,demo,*) install_cpu_torch "$(grep -m1 '^torch==' constraints.txt)" install || true ;; esac
# First without the network: the cache usually has every pinned wheel. A failure there is no news, so it stays silent.
install --offline --editable ".[$extras]" 2>/dev/null || install --editable ".[$extras]"
printf '%s\n' "$key" >"$venv/.polarkv-key"
say "$venv is ready"
