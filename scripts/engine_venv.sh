#!/usr/bin/env bash
# engine_venv.sh NAME DIRECTORY [BASE]: build the environment of an inference engine for `make test-engines`.
#
# What goes in is pinned in tests/engines/requirements. BASE is another engine's environment, which is then seen from this one.
# Who calls (tests/engines/support) keeps other builds of the same directory out and knows when one is complete.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

name=$1 venv=$2 base=${3:-}
lists="$ROOT/tests/engines/requirements"
python=$(find_python)
uv=$(uv_bin "$python")
say "building the environment of $name"
"$uv" venv --quiet --clear --python "$python" "$venv"
export VIRTUAL_ENV="$venv"

install() { "$uv" pip install --quiet "$@"; }

# First without the network: the cache often has every wheel. A failure there is no news, so it stays silent.
install_list() { install --offline --no-deps --requirements "$1" 2>/dev/null || install --no-deps --requirements "$1"; }

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [[ -n $base ]]; then
    "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
else
    torch=$(grep -m1 '^torch==' "$lists/torch.txt")
    install_cpu_torch "$torch" install --constraint "$lists/torch.txt" || install_list "$lists/torch.txt"
fi
install_list "$lists/$name.txt"
if [[ -d $site/torchvision ]] && ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
    # The index's torchvision has compiled operators that do not load beside a CPU build of torch; importing it needs none.
    # Removed first: the file is a hard link into uv's cache.
    rm "$site/torchvision/_meta_registrations.py"
    touch "$site/torchvision/_meta_registrations.py"
fi
say "the environment of $name is ready"
