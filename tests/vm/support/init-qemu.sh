#!/bin/busybox sh
# First process of a stock kernel under qemu, in a file system of busybox and a few modules. As init-uml.sh does: the
# machine's root, read-only, under what the guest adds and a scratch file system in memory.
export PATH=/bin
busybox mkdir -p /proc /sys /dev /machine /scratch /share /new
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs dev /dev
exec </dev/null >/dev/console 2>&1
off() {
    echo o >/proc/sysrq-trigger
    busybox sleep 60
}
while read -r module; do busybox insmod "/modules/$module" || off; done </modules/order

machine() { busybox mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,access=any,$3" "$1" "$2"; }
machine machine /machine ro,cache=loose || off
machine share /share cache=none || off
busybox mount -t tmpfs -o size=90%,mode=755 scratch /scratch || off
busybox mkdir /scratch/upper /scratch/work
layers=/machine
count=0
while read -r _; do
    count=$((count + 1))
    busybox mkdir "/layer$count"
    machine "layer$count" "/layer$count" ro,cache=loose || off
    layers=/layer$count:$layers
done </share/layers
busybox mount -t overlay -o "lowerdir=$layers,upperdir=/scratch/upper,workdir=/scratch/work" overlay /new || off
busybox mkdir -p /new/proc /new/sys /new/dev /new/run
for folder in proc sys dev; do busybox mount --move "/$folder" "/new/$folder"; done
busybox mount -t tmpfs -o mode=755 run /new/run
busybox mkdir /new/run/polarkv-vm
busybox mount --move /share /new/run/polarkv-vm
exec busybox switch_root /new /bin/bash /run/polarkv-vm/guest.sh
