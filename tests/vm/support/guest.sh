# The guest from the moment on when its file systems are there: devices, networks, then the command, then off.
# shellcheck shell=bash
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec </dev/null
vm=/run/polarkv-vm
off() { echo o >/proc/sysrq-trigger && sleep 60; }
trap off EXIT

ln -sfn /proc/self/fd /dev/fd
mkdir -p /dev/shm /dev/pts /run/lock /scratch
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t devpts devpts /dev/pts
echo polarkv-vm >/proc/sys/kernel/hostname

# A kernel that has its drivers in modules finds none by itself: there is no udev.
if [[ -d /lib/modules/$(uname -r) ]]; then
    modprobe -a virtio_blk ext4 loop brd raid0 raid1 veth rdma_rxe || exit
fi

read -r -a disks <$vm/disks
if ((${#disks[@]} == 0)); then
    echo "no scratch disk was attached"
    exit
fi
# Not in memory: files on a real file system take direct transfers, and a guest's memory is small.
mkfs.ext4 -q -F -E lazy_itable_init=1,nodiscard "${disks[0]}" && mount -o noatime "${disks[0]}" /scratch || exit
chmod 1777 /scratch
bash $vm/hosts.sh || { echo "the two hosts' network could not be made"; exit; }

# shellcheck source=/dev/null
. $vm/environment
export TMPDIR=/scratch PYTHONPATH="$POLARKV_VM_PYTHONPATH" POLARKV_VM_DISKS="${disks[*]:1}"
cd "$(<$vm/directory)" || exit
echo "started" >>$vm/state
bash $vm/command >>$vm/output 2>&1
echo "exit $?" >>$vm/state
