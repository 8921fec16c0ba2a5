# Sourced by the other scripts: where caches live, which Python is used, and `uv_bin`, which brings uv.
# shellcheck shell=bash
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME, so that there is a place for caches}/.cache}/polarkv
UV_VERSION=0.13.9
export UV_CACHE_DIR="$CACHE/uv"
# The interpreter is the machine's own: uv must never download one.
export UV_PYTHON_DOWNLOADS=never
export UV_NO_PROGRESS=1
# Certificates and local wheels that the machine's pip is set up with serve uv too.
if [[ -n ${PIP_CERT:-} && -z ${SSL_CERT_FILE:-} ]]; then export SSL_CERT_FILE="$PIP_CERT"; fi
if [[ -n ${PIP_FIND_LINKS:-} && -z ${UV_FIND_LINKS:-} ]]; then export UV_FIND_LINKS="${PIP_FIND_LINKS// /,}"; fi
if [[ -n ${PIP_INDEX_URL:-} && -z ${UV_DEFAULT_INDEX:-} ]]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# apt_install PACKAGE...: install Debian packages, or say what to run where this user may not.
apt_install() {
    command -v apt-get >/dev/null || fail "needs $* (or this system's packages of the same purpose); install them and run again"
    [[ $(id -u) == 0 ]] || fail "needs Debian packages: run 'sudo apt-get install $*' once, then run this again"
    say "installing Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
    apt-get update -qq >/dev/null
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null </dev/null
}

# find_python: print the path of a Python >= 3.11 ($PYTHON, else the first found).
find_python() {
    local name path
    for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        path=$("$name" -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else exit(1)' 2>/dev/null) || continue
        printf '%s\n' "$path"
        return
    done
    [[ -z ${PYTHON:-} ]] || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer"
    apt_install python3 python3-venv >&2
    python3 -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else exit(1)' \
        || fail "needs Python 3.11 or newer; name it with PYTHON=/path/to/python"
}

# uv_bin PYTHON: print the path of uv; on first use install it into a small environment of its own.
uv_bin() {
    local tool="$CACHE/tools/uv-$UV_VERSION"
    if ! "$tool/bin/uv" --version >/dev/null 2>&1; then
        "$1" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv >&2
        say "installing uv $UV_VERSION"
        mkdir -p "$CACHE/tools"
        "$1" -m venv --clear "$tool" >&2
        "$tool/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" >&2
    fi
    printf '%s\n' "$tool/bin/uv"
}

# install_cpu_torch PIN INSTALL...: install a CPU build of torch with that command, or end with an error where there is none.
#
# The index's torch for x86-64 Linux brings 6 GB of CUDA libraries; a CPU build a fraction of that. Where one can be had is
# found out by asking: a local wheel first (UV_FIND_LINKS), then PyTorch's own index, for a short time.
install_cpu_torch() {
    local pin=$1
    shift
    "$@" --offline "$pin+cpu" 2>/dev/null || "$@" "$pin+cpu" 2>/dev/null \
        || UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=0 "$@" --torch-backend cpu "$pin" 2>/dev/null \
        || { say "no CPU build of ${pin%%==*} to be had here: installing the default one, which is large" && false; }
}
