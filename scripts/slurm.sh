#!/usr/bin/env bash
# A Slurm cluster of this one machine, which poses as two nodes, on loopback: to try the workflow's Slurm profile for
# real. Needs root.
#
#   scripts/slurm.sh install          slurm-wlm and munge from Debian's or Ubuntu's packages
#   scripts/slurm.sh start FOLDER     configuration, state, logs and process ids go to FOLDER
#   scripts/slurm.sh stop FOLDER      ends the daemons that were started from FOLDER, and no others
#
# While it runs, /etc/slurm/slurm.conf points into FOLDER: a job's own commands look there, since Snakemake clears the
# environment of Slurm's variables. Where a Slurm is configured already, this one is not started.
#
# munged runs as its own user with a key and a socket folder of its own; slurmctld and slurmd run as root without
# cgroups and without accounting. Each node claims two GPUs that are not there, so that what a job does which gets fewer
# devices than it needs can be tried where there is none.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

[ "$#" -ge 1 ] || fail "command must be install, start or stop, got none; see the head of $0"
configuration=/etc/slurm/slurm.conf

[ "$(id -u)" -eq 0 ] || fail "user must be root, got $(id -un); Slurm's daemons start jobs as other users"

install_packages() {
  if type -P slurmctld slurmd munged sbatch > /dev/null; then
    return
  fi
  command -v apt-get > /dev/null || fail "apt-get must be there to install slurm-wlm, got none; install Slurm and munge"
  # Their packages start daemons of their own where an init system runs; these stay as they are, on other ports.
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends slurm-wlm slurm-client munge > /dev/null
}

write_configuration() {
  local node memory
  node=$(hostname -s)
  memory=$(awk '/MemTotal/ { print int($2 / 1024 * 0.9) }' /proc/meminfo)
  cat > "$folder/slurm.conf" << EOF
ClusterName=loopback
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
GresTypes=gpu
# Snakemake asks squeue for jobs that have ended, too.
MinJobAge=600
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
NodeName=DEFAULT CPUs=$(nproc) RealMemory=$memory Gres=gpu:2 State=UNKNOWN
NodeName=node1 NodeHostname=$node NodeAddr=127.0.0.1 Port=26818
NodeName=node2 NodeHostname=$node NodeAddr=127.0.0.1 Port=26819
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
  printf 'Name=gpu File=%s\n' /dev/null /dev/zero > "$folder/gres.conf"
}

start_munge() {
  mkdir -p "$folder/munge"
  head -c 1024 /dev/urandom > "$folder/munge/key"
  # munged refuses a key or a socket folder that others could change.
  chown -R munge:munge "$folder/munge"
  chmod 0400 "$folder/munge/key"
  chmod 0755 "$folder/munge"
  local munged
  munged=$(command -v munged)
  setpriv --reuid=munge --regid=munge --clear-groups "$munged" --force \
    --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/munged.pid" \
    --log-file="$folder/munge/munged.log" --seed-file="$folder/munge/seed"
}

wait_for_node() {
  local state="" _
  for _ in $(seq 120); do
    state=$(sinfo --noheader --format=%T,%D 2> /dev/null || true)
    [ "$state" = "idle,2" ] && return
    sleep 0.5
  done
  tail -n 20 "$folder/slurmctld.log" "$folder"/slurmd.*.log >&2 || true
  stop
  fail "nodes must become idle within a minute, got '${state:-no answer}'; the logs above say why"
}

start() {
  type -P slurmctld slurmd munged sbatch > /dev/null || fail "Slurm must be installed, got none; $0 install"
  if [ -e "$configuration" ] && [ ! "$configuration" -ef "$folder/slurm.conf" ]; then
    fail "no Slurm may be configured here, got $configuration; use that cluster, or stop what was started from it"
  fi
  mkdir -p "$folder/state" "$folder"/spool.node{1,2} "$(dirname "$configuration")"
  # munge's user has to reach its socket.
  chmod 0755 "$folder"
  write_configuration
  start_munge
  ln -sfn "$folder/slurm.conf" "$configuration"
  slurmctld -f "$folder/slurm.conf"
  local name
  for name in node1 node2; do
    slurmd -N "$name" -f "$folder/slurm.conf"
  done
  wait_for_node
}

stop() {
  local file id _
  for file in slurmd.node1.pid slurmd.node2.pid slurmctld.pid munge/munged.pid; do
    id=$(cat "$folder/$file" 2> /dev/null || true)
    [ -n "$id" ] && [ -d "/proc/$id" ] || continue
    kill "$id"
    for _ in $(seq 100); do
      [ -d "/proc/$id" ] || break
      sleep 0.1
    done
  done
  # A link of this cluster's alone, dangling or not.
  if [ "$(readlink "$configuration" 2> /dev/null)" = "$folder/slurm.conf" ]; then
    rm -f "$configuration"
  fi
}

case "$1" in
  install) install_packages ;;
  start | stop)
    [ "$#" -eq 2 ] || fail "folder must be given, got none; $0 $1 FOLDER"
    mkdir -p "$2"
    folder=$(cd "$2" && pwd)
    "$1"
    ;;
  *) fail "command must be install, start or stop, got '$1'; see the head of $0" ;;
esac
