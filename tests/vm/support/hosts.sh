#!/bin/bash
# Two "hosts" on one machine: RDMA devices rxe0 (10.9.0.1) and rxe1 (10.9.0.2) on the two ends of one link, host0 and host1.
# In network namespaces of their own soft RoCE of this kernel carries no data; here rules send what one device has for the
# other over the link instead of short-circuiting it. Sockets of these addresses stay local unless bound to a device.
set -eu

# The default loses packets of a single chunk, and soft RoCE waits a second for each.
echo 10000 >/proc/sys/net/core/netdev_max_backlog
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
# In one go each: starting a program is what takes time here.
ip -batch - <<'END'
link set lo up
link add host0 type veth peer name host1
address add 10.9.0.1/32 dev host0
address add 10.9.0.2/32 dev host1
link set host0 mtu 9000 up
link set host1 mtu 9000 up
rule add pref 100 lookup local
rule del pref 0
rule add pref 10 oif host0 to 10.9.0.2 lookup 101
rule add pref 11 oif host1 to 10.9.0.1 lookup 102
route add 10.9.0.2 dev host0 src 10.9.0.1 table 101
route add 10.9.0.1 dev host1 src 10.9.0.2 table 102
END
for end in host0 host1; do
    echo 1 >"/proc/sys/net/ipv4/conf/$end/accept_local"
    echo 0 >"/proc/sys/net/ipv4/conf/$end/rp_filter"
    echo 1 >"/proc/sys/net/ipv4/conf/$end/arp_ignore"
done
rdma -b - <<'END'
link add rxe0 type rxe netdev host0
link add rxe1 type rxe netdev host1
END
