#!/bin/sh
# What Hydra takes for ssh: `enter.sh [options] ADDRESS COMMAND` runs the command on the emulated host of that address.
# Hosts are the network namespaces PARLINALG_CLUSTER followed by the address's last number, and have the cores that stand
# at this place of PARLINALG_CLUSTER_CORES, or all where that is empty.
while [ $# -gt 0 ]; do
    case $1 in
        -x) shift ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
number=${host##*.}
cores=$(echo "${PARLINALG_CLUSTER_CORES:-}" | cut -d " " -f "$number")
exec ip netns exec "${PARLINALG_CLUSTER:?the name of the emulated cluster}$number" ${cores:+taskset -c "$cores"} \
    /bin/sh -c "$*"
