#!/bin/bash
# First process of User-Mode Linux. Its root is the machine's own, read-only: this lays what the guest adds, and a scratch
# file system in memory, over it, and goes on there. The kernel hands parameters that it does not know on as variables.
set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
# Whatever fails here ends the guest, with the reason on the console.
trap 'echo o >/proc/sysrq-trigger; sleep 60' EXIT

share=$polarkv_share
mount -t proc proc /proc
# The one folder that every root has and nothing here needs.
mount -t tmpfs -o size=90%,mode=755 scratch /mnt
mkdir /mnt/upper /mnt/work /mnt/new /mnt/share /mnt/root
mount -t hostfs -o "$share" none /mnt/share
# Folders of one mounted file system cannot be layers over its root; each is mounted anew.
mount -t hostfs -o ro,/ none /mnt/root
layers=/mnt/root
count=0
while read -r folder; do
    count=$((count + 1))
    mkdir "/mnt/layer$count"
    mount -t hostfs -o "ro,$folder" none "/mnt/layer$count"
    layers=/mnt/layer$count:$layers
done </mnt/share/layers
mount -t overlay -o "lowerdir=$layers,upperdir=/mnt/upper,workdir=/mnt/work" overlay /mnt/new

cd /mnt/new
mkdir -p proc sys dev run
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t devtmpfs dev dev
mount -t tmpfs -o mode=755 run run
mkdir run/polarkv-vm
mount -n --move /mnt/share run/polarkv-vm
pivot_root . mnt
exec bash /run/polarkv-vm/guest.sh
