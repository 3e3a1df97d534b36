#!/bin/sh
# What Hydra takes for ssh: `enter.sh [options] ADDRESS COMMAND` runs the command on the emulated host of that address.
# Hosts are the network namespaces PARLINALG_CLUSTER followed by the address's last number, and have the cores that
# stand at this place of PARLINALG_CLUSTER_CORES.  What runs there is in the control group PARLINALG_CLUSTER_GROUPS-CORES
# if it is there.
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
cores=$(echo "$PARLINALG_CLUSTER_CORES" | cut -d " " -f "$number")
group=$PARLINALG_CLUSTER_GROUPS-$cores
[ -d "$group" ] && echo $$ >"$group/cgroup.procs"
exec ip netns exec "${PARLINALG_CLUSTER:?the name of the emulated cluster}$number" taskset -c "$cores" \
    /bin/sh -c "$*"
