#!/usr/bin/env bash
# databases.sh: see that the servers of PostgreSQL and MariaDB are on this machine; install them where that is allowed.
#
# Tests start private servers of their own (`postgres_url`, `mariadb_url`); nothing here starts one, or touches one that runs.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

wanted=()
has_postgres() {
    local candidate
    for candidate in "${POLARKV_POSTGRES_BIN:-}" "$(pg_config --bindir 2>/dev/null || true)" /usr/lib/postgresql/*/bin; do
        if [[ -n $candidate && -x $candidate/initdb && -x $candidate/postgres ]]; then return 0; fi
    done
    return 1
}
has_mariadb() {
    local name
    for name in mariadbd mariadb-install-db my_print_defaults; do
        PATH=$PATH:/usr/sbin command -v "$name" >/dev/null || return 1
    done
}

has_postgres || wanted+=(postgresql)
has_mariadb || wanted+=(mariadb-server-core mariadb-client-core)
if ((${#wanted[@]} == 0)); then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    say "note: tests on databases that are not here will be skipped; 'apt-get install ${wanted[*]}' brings them"
    exit 0
fi
# The Debian package would otherwise create a cluster and start a server that nobody asked for.
if [[ ! -e /etc/postgresql-common/createcluster.conf ]]; then
    mkdir -p /etc/postgresql-common
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
fi
apt_install "${wanted[@]}"
