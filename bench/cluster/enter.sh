#!/bin/sh
# What Hydra takes for ssh: `enter.sh [options] ADDRESS COMMAND` runs the command on the emulated host of that address.
# Hosts are the network namespaces PARLINALG_CLUSTER followed by the address's last number.
while [ $# -gt 0 ]; do
    case $1 in
        -x) shift ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
exec ip netns exec "${PARLINALG_CLUSTER:?the name of the emulated cluster}${host##*.}" /bin/sh -c "$*"
