#!/usr/bin/env bash
# Run a Slurm cluster on one Linux machine, to try multi-node jobs before you submit them to a large
# one. Each node is a network namespace with its own host name, address, slurmd and sshd. All nodes
# see the machine's files, like a shared file system. This needs root and, on Debian or Ubuntu:
# apt-get install slurm-wlm munge openssh-server openssh-client iproute2
#
#   bash 03-multi-node/tools/local_cluster.sh up          # node1 and node2; `up 4` for four nodes
#   bash 03-multi-node/tools/local_cluster.sh down        # kills all jobs and removes all files
#
# To disconnect node1 from the network, and to connect it again:
#
#   ip -n local-switch link set node1 down
#   ip -n local-switch link set node1 up
#
# The cluster writes only to /run/local-cluster, and does not affect the machine's own Slurm, munge
# or sshd. To start a second cluster, set both variables: a name of up to nine letters, and the first
# three numbers of the addresses.
set -euo pipefail
NAME=${LOCAL_CLUSTER_NAME:-local}
NETWORK=${LOCAL_CLUSTER_NETWORK:-10.77.0} # node1 is 10.77.0.1, node2 is 10.77.0.2
DIR=/run/$NAME-cluster
LOGIN=$NETWORK.253      # this machine, where you submit jobs
CONTROLLER=$NETWORK.254 # where slurmctld runs

refuse() {
    echo "$1" >&2
    exit 2
}

check_machine() {
    [[ "$(uname -s)" == Linux ]] || refuse "The nodes are Linux namespaces: this needs Linux."
    ((EUID == 0)) || refuse "Only root can make namespaces: run this with sudo."
    command -v slurmctld slurmd sinfo munged sshd ssh ip flock >/dev/null ||
        refuse "Install: apt-get install slurm-wlm munge openssh-server openssh-client iproute2"
}

check_free() {
    # All routes to addresses of the network, except default routes.
    local routes show=(ip -4 route show table all to)
    routes=$("${show[@]}" root "$NETWORK.0/24" && "${show[@]}" match "$NETWORK.0/24")
    ! grep -qvE '^(default |0\.0\.0\.0/1 |$)' <<<"$routes" ||
        refuse "$NETWORK.0/24 is in use on this machine: choose another LOCAL_CLUSTER_NETWORK."
    if [[ -e "/run/netns/$NAME-switch" ]] || ip link show "${NAME}0" >/dev/null 2>&1; then
        refuse "The name $NAME is in use on this machine: choose another LOCAL_CLUSTER_NAME."
    fi
}

write_files() {
    mkdir -p "$DIR"/{log,state,spool}
    (umask 077 && head -c 128 /dev/urandom >"$DIR/munge.key")
    ssh-keygen -q -t ed25519 -N "" -C "local cluster" -f "$DIR/host_key"
    ssh-keygen -q -t ed25519 -N "" -C "local cluster" -f "$DIR/id_ed25519"
    echo "* $(<"$DIR/host_key.pub")" >"$DIR/known_hosts"
    printf '%s\n' "127.0.0.1 localhost" "$LOGIN login" "$CONTROLLER controller" >"$DIR/hosts"
    local k
    for ((k = 1; k <= NODES; k++)); do
        mkdir "$DIR/spool/node$k"
        echo "$NETWORK.$k node$k" >>"$DIR/hosts"
        printf 'Host node%s\n    HostName %s\n' "$k" "$NETWORK.$k" >>"$DIR/ssh_config"
    done
    cat >>"$DIR/ssh_config" <<END
Host node*
    User root
    IdentityFile $DIR/id_ed25519
    IdentitiesOnly yes
    UserKnownHostsFile $DIR/known_hosts
    LogLevel ERROR
END
    cat >"$DIR/sshd_config" <<END
HostKey $DIR/host_key
AuthorizedKeysFile $DIR/id_ed25519.pub
AuthenticationMethods publickey
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv SLURM_CONF=$DIR/slurm.conf
END
    # sshd refuses even root's key if the account is locked, so unlock the account on the nodes.
    echo "root:*:::::::" >"$DIR/shadow"
    slurm_conf >"$DIR/slurm.conf"
    # slurmd looks for cgroups even if nothing uses them. From Slurm 24.05 on they can be disabled.
    # Before, cgroup/v1 works too, because that plugin only acts if other options ask for it.
    local plugin=disabled
    [[ "$(slurmd -V)" =~ ([0-9]+)\.([0-9]+) ]]
    ((${BASH_REMATCH[1]}${BASH_REMATCH[2]} >= 2405)) || plugin=cgroup/v1
    echo "CgroupPlugin=$plugin" >"$DIR/cgroup.conf"
}

slurm_conf() {
    # `slurmd -C` prints the machine's cores and memory. Each node claims all of them.
    local hardware k
    hardware=$(slurmd -C | grep -oE '\b(CPUs|RealMemory)=[0-9]+' | tr '\n' ' ')
    cat <<END
ClusterName=local
SlurmctldHost=controller($CONTROLLER)
SlurmUser=root
# cred_expire: a requeued job waits until its old credentials expire, by default after 120 seconds.
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/spool/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none

# Jobs start within a second. slurmctld pings the nodes every SlurmdTimeout/3 seconds, and at every
# 20th ping also nodes that are down. It notices a lost or recovered node after about 15 seconds.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdTimeout=5
ReturnToService=2
JobRequeue=1
KillWait=20
# A node answers a message that ends tasks after the tasks are gone. Without an answer, the message
# is sent again a minute later, and would end the restarted job, whose tasks have the same ids.
MessageTimeout=25

# A job in partition urgent preempts jobs in main. Their steps get SIGTERM. A job that exits then is
# complete, unless it requeues itself. Other jobs get SIGTERM again 30 to 60 seconds later, SIGKILL
# after KillWait, and are requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=DEFAULT $hardware
END
    for ((k = 1; k <= NODES; k++)); do
        echo "NodeName=node$k NodeAddr=$NETWORK.$k"
    done
    echo "PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30"
    echo "PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF"
}

# The switch is a bridge in its own namespace, so that this machine's firewall does not filter its
# packets. The controller runs in the same namespace.
plug_network() {
    local switch=$NAME-switch node k
    ip netns add "$switch"
    ip -n "$switch" link add switch type bridge
    ip -n "$switch" address add "$CONTROLLER/24" dev switch
    ip -n "$switch" link set lo up
    ip -n "$switch" link set switch up
    ip link add "${NAME}0" type veth peer name login netns "$switch"
    ip -n "$switch" link set login master switch up
    ip address add "$LOGIN/24" dev "${NAME}0"
    ip link set "${NAME}0" up
    for ((k = 1; k <= NODES; k++)); do
        node=$NAME-node$k
        ip netns add "$node"
        ip -n "$node" link add eth0 type veth peer name "node$k" netns "$switch"
        ip -n "$switch" link set "node$k" master switch up
        ip -n "$node" address add "$NETWORK.$k/24" dev eth0
        ip -n "$node" link set lo up
        ip -n "$node" link set eth0 up
    done
}

# start HOST DAEMON...: setsid protects the daemon from Ctrl-C. The daemon does not inherit file
# descriptor 9, because that would keep this script's lock.
start() {
    setsid ip netns exec "$NAME-${1/controller/switch}" unshare --uts \
        bash -euc 'become "$@"' start "$@" </dev/null >"$DIR/log/$1-${2##*/}.log" 2>&1 9<&- &
    disown # so that bash does not report its end
}

# become HOST DAEMON...: in new namespaces, set up the host's name and files, then run the daemon.
become() {
    hostname "$1"
    mount -n --bind "$DIR/hosts" /etc/hosts
    mount -n --bind "$DIR/shadow" /etc/shadow
    # sshd needs /run/sshd, which not every machine has, so each host gets its own /run.
    cd "$DIR"
    mount -n -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/sshd "$DIR"
    mount -n --no-canonicalize --bind . "$DIR"
    cd /
    exec "${@:2}"
}

# Everything that a cluster runs is in its namespaces.
processes() { ip netns pids "$NAME-$1" 2>/dev/null || true; }

# Kill all processes and remove all files, at whatever stage `up` has stopped.
clean_up() {
    local host pids deadline=$((SECONDS + 10))
    for host in switch node{1..9}; do
        [[ -e "/run/netns/$NAME-$host" ]] || continue
        # Repeat this, because a process may have started another one in the meantime.
        while mapfile -t pids < <(processes "$host") && ((${#pids[@]} && SECONDS < deadline)); do
            kill -KILL "${pids[@]}" 2>/dev/null || true
        done
        ip netns delete "$NAME-$host" || true
    done
    ip link delete "${NAME}0" 2>/dev/null || true
    rm -rf "$DIR"
}

# Wait up to 30 seconds until every node is idle and its sshd answers.
wait_for_nodes() {
    local k deadline=$((SECONDS + 30))
    for ((k = 1; k <= NODES; k++)); do
        until sinfo -h -n "node$k" -p main -o %T 2>/dev/null | grep -x idle >/dev/null &&
            timeout 1 bash -c ": </dev/tcp/$NETWORK.$k/22" 2>/dev/null; do
            if ((SECONDS >= deadline)); then
                tail -n 5 "$DIR"/log/*.log >&2
                exit 1
            fi
            sleep 0.2
        done
    done
}

undo() {
    trap '' INT TERM HUP
    clean_up
    echo "The cluster did not start. All its processes and files are removed." >&2
}

up() {
    [[ -z "$(processes switch)" ]] ||
        refuse "A cluster is up already. To end it: bash 03-multi-node/tools/local_cluster.sh down"
    [[ ! -e "$DIR" ]] || clean_up # remains of a crash
    check_free
    # Use no "$( )" after the daemons have started, because it can break bash's traps.
    local k sshd
    sshd=$(command -v sshd)
    trap '(($? == 0)) || undo' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    umask 022
    write_files
    plug_network
    export -f become
    export DIR SLURM_CONF=$DIR/slurm.conf
    start controller munged --foreground --key-file="$DIR/munge.key" --socket="$DIR/munge.socket" \
        --seed-file="$DIR/munge.seed" --pid-file="$DIR/munge.pid"
    start controller slurmctld -D
    for ((k = 1; k <= NODES; k++)); do
        start "node$k" slurmd -D -N "node$k"
        start "node$k" "$sshd" -D -e -f "$DIR/sshd_config"
    done
    wait_for_nodes
    cat <<END
$NODES nodes are up. To use them:
    export SLURM_CONF=$DIR/slurm.conf
    sinfo
    ssh -F $DIR/ssh_config node1
END
}

down() {
    [[ -e "$DIR" ]] || { echo "No cluster was up." && exit; }
    trap '' INT TERM HUP
    clean_up
    echo "The cluster is down."
}

VERB=${1:-}
NODES=${2:-2}
[[ "$VERB" =~ ^(up|down)$ && $# -le 2 ]] ||
    refuse "Say what to do: local_cluster.sh up [NODES] or down."
[[ "$NODES" =~ ^[1-9]$ ]] || refuse "NODES must be a number from 1 to 9, not '$NODES'."
check_machine
# Only one copy of this script runs at a time. A second one waits for the lock.
exec 9</run
flock 9
"$VERB"
