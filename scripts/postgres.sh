#!/usr/bin/env bash
# postgres.sh: see that PostgreSQL's server programs are on this machine; install them where that is allowed.
#
# Tests start a private server of their own (the `postgres_url` fixture); nothing here starts one, or touches one that runs.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

for candidate in "${POLARKV_POSTGRES_BIN:-}" "$(pg_config --bindir 2>/dev/null || true)" /usr/lib/postgresql/*/bin; do
    if [[ -n $candidate && -x $candidate/initdb && -x $candidate/postgres ]]; then exit 0; fi
done
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    say "note: no PostgreSQL server programs here, so its tests will be skipped; 'apt-get install postgresql' brings them"
    exit 0
fi
# The Debian package would otherwise create a cluster and start a server that nobody asked for.
if [[ ! -e /etc/postgresql-common/createcluster.conf ]]; then
    mkdir -p /etc/postgresql-common
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
fi
apt_install postgresql
