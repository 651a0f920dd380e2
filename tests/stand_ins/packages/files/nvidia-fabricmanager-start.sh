#!/bin/sh
# Starts the daemons an NVLink fabric needs, after checking what they need: on NVLink 5 the subnet manager comes first.
set -eu
mode='' fm_config='' fm_pid='' nvlsm_config='' nvlsm_pid=''
while [ $# -gt 0 ]; do
    case $1 in
        --mode) mode=$2 ;;
        --fm-config-file) fm_config=$2 ;;
        --fm-pid-file) fm_pid=$2 ;;
        --nvlsm-config-file) nvlsm_config=$2 ;;
        --nvlsm-pid-file) nvlsm_pid=$2 ;;
        *) echo "unknown option $1" >&2; exit 1 ;;
    esac
    shift 2
done
nvlink5=''
for vpd in /srv/hardware/sys/class/infiniband/*/device/vpd; do
    [ -e "$vpd" ] && grep -q SW_MNG "$vpd" && nvlink5=1
done
if [ -n "$nvlink5" ]; then
    [ -d /srv/hardware/sys/module/ib_umad ] || { echo 'Kernel module "ib_umad" has not been loaded, fabric manager cannot be started' >&2; exit 1; }
    command -v ibstat > /dev/null || { echo 'ibstat was not found: install infiniband-diags' >&2; exit 1; }
    command -v nvlsm > /dev/null || [ -x /opt/nvidia/nvlsm/sbin/nvlsm ] || { echo 'nvlsm was not found: install nvlsm' >&2; exit 1; }
fi
case $mode in
    precheck) exit 0 ;;
    start)
        if [ -n "$nvlink5" ]; then /opt/nvidia/nvlsm/sbin/nvlsm --config "$nvlsm_config" --pid_file "$nvlsm_pid"; fi
        exec /usr/bin/nv-fabricmanager -c "$fm_config"
        ;;
    *) echo "unknown mode $mode: precheck, start" >&2; exit 1 ;;
esac
