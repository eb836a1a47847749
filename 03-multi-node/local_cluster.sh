#!/usr/bin/env bash
# A real Slurm cluster on one Linux machine, to try multi-node jobs before you queue for them. Each
# node is a network namespace with a host name, an address, a slurmd and an sshd of its own. All
# nodes see the machine's files, as if they were on a shared file system. Root is needed, and on
# Debian or Ubuntu: apt-get install slurm-wlm munge openssh-server openssh-client iproute2
#
#   bash 03-multi-node/local_cluster.sh up          # node1 and node2; `up 4` for four nodes
#   bash 03-multi-node/local_cluster.sh status
#   bash 03-multi-node/local_cluster.sh down        # ends all jobs and leaves nothing behind
#
# To pull node1's cable out of the switch, and to plug it in again:
#
#   ip -n lab-switch link set node1 down
#   ip -n lab-switch link set node1 up
#
# It writes to its own folder alone and leaves a Slurm, munge or sshd of the machine in peace. For
# another cluster beside the first, set all three:
#
# LOCAL_CLUSTER_DIR      its folder
# LOCAL_CLUSTER_NAME     what the names of its namespaces begin with
# LOCAL_CLUSTER_NETWORK  the first three numbers of its addresses
set -euo pipefail
DIR=${LOCAL_CLUSTER_DIR:-/run/local-cluster}
NAME=${LOCAL_CLUSTER_NAME:-lab}
NETWORK=${LOCAL_CLUSTER_NETWORK:-10.77.0} # node1 is 10.77.0.1, node2 is 10.77.0.2
LOGIN=$NETWORK.253                        # this machine, where you submit jobs
CONTROLLER=$NETWORK.254                   # where slurmctld runs
MARK=.local-cluster                       # a file in every folder that may be removed
PACKAGES="slurm-wlm munge openssh-server openssh-client iproute2"

refuse() {
    echo "$1" >&2
    exit 2
}

check_machine() {
    [[ "$(uname -s)" == Linux ]] || refuse "The nodes are Linux namespaces: this needs Linux."
    ((EUID == 0)) || refuse "Only root can make namespaces: run this with sudo."
    local missing=() tool
    for tool in slurmctld slurmd sinfo munged sshd ssh ip unshare flock; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    ((${#missing[@]} == 0)) ||
        refuse "Not found: ${missing[*]}. To install: apt-get install $PACKAGES"
    [[ "$DIR $NAME $NETWORK" =~ ^/[a-zA-Z0-9/._-]+\ [a-z]{1,9}\ [0-9]+(\.[0-9]+){2}$ &&
        -d "$(dirname "$DIR")" ]] ||
        refuse "LOCAL_CLUSTER_DIR, _NAME, _NETWORK must be like /run/local-cluster, lab, 10.77.0."
}

check_free() {
    [[ ! -e "$DIR" ]] || refuse "$DIR is something else's folder: choose another LOCAL_CLUSTER_DIR."
    # Routes to a part of the network, and routes to more than it other than those to everywhere.
    local routes show=(ip -4 route show table all to)
    routes=$("${show[@]}" root "$NETWORK.0/24" && "${show[@]}" match "$NETWORK.0/24")
    ! grep -qvE '^(default |0\.0\.0\.0/1 |$)' <<<"$routes" ||
        refuse "$NETWORK.0/24 is in use on this machine: choose another LOCAL_CLUSTER_NETWORK."
    if [[ -e "/run/netns/$NAME-switch" ]] || ip link show "${NAME}0" >/dev/null 2>&1; then
        refuse "The name $NAME is in use on this machine: choose another LOCAL_CLUSTER_NAME."
    fi
}

write_files() {
    mkdir "$DIR"
    mkdir "$DIR"/{log,state,spool}
    touch "$DIR/$MARK"
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
    # sshd refuses root, key or not, where that account is locked. On the nodes it is not.
    echo "root:*:::::::" >"$DIR/shadow"
    slurm_conf >"$DIR/slurm.conf"
    # No cgroup is used, but slurmd looks for them all the same. They can be turned off since 24.05;
    # before, the plugin for version 1 does as well: it touches nothing unless it is told to.
    local plugin=disabled
    [[ "$(slurmd -V)" =~ ([0-9]+)\.([0-9]+) ]]
    ((${BASH_REMATCH[1]}${BASH_REMATCH[2]} >= 2405)) || plugin=cgroup/v1
    echo "CgroupPlugin=$plugin" >"$DIR/cgroup.conf"
}

slurm_conf() {
    # `slurmd -C` prints what this machine has. Every node claims all of it: the nodes share it.
    local hardware k
    hardware=$(slurmd -C | grep -oE '\b(CPUs|RealMemory)=[0-9]+' | tr '\n' ' ')
    cat <<END
ClusterName=local
SlurmctldHost=controller($CONTROLLER)
SlurmUser=root
# cred_expire: a requeued job waits until its old credentials have expired, by default 120 seconds.
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/spool/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none

# Jobs start within a second. Nodes are asked every SlurmdTimeout/3 seconds whether they are alive,
# and at every 20th time one that is down is asked as well: both ways it takes about 15 seconds.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdTimeout=5
ReturnToService=2
JobRequeue=1
KillWait=20
# What ends tasks is answered when they are gone, and a message without an answer is sent again a
# minute later: it would end the job's next start, whose tasks have the same numbers.
MessageTimeout=25

# A job in urgent takes the nodes of jobs in main. Their steps get SIGTERM. A job that ends then is
# done, unless it requeues itself. Others get SIGTERM again 30 to 60 seconds later, SIGKILL after
# KillWait, and are requeued.
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

# The switch is a bridge in a namespace of its own, where no firewall of this machine filters it.
# The controller lives there too.
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

# start HOST DAEMON...: in a session of its own, out of Ctrl-C's reach; without descriptor 9, which
# is this script's lock.
start() {
    local daemon=$1-${2##*/}
    setsid ip netns exec "$NAME-${1/controller/switch}" unshare --uts \
        bash -euc 'become "$@"' start "$@" </dev/null >"$DIR/log/$daemon.log" 2>&1 9<&- &
    DAEMONS[$!]=$daemon
}
DAEMONS=() # by pid

# become HOST DAEMON...: in new namespaces, takes what is the host's own, then runs the daemon.
become() {
    hostname "$1"
    mount -n --bind "$DIR/hosts" /etc/hosts
    mount -n --bind "$DIR/shadow" /etc/shadow
    # sshd needs /run/sshd, which not every machine has: the host gets a /run of its own.
    cd "$DIR"
    mount -n -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/sshd "$DIR"
    mount -n --no-canonicalize --bind . "$DIR"
    cd /
    exec "${@:2}"
}

# All that a cluster runs is in its namespaces.
processes() { ip netns pids "$NAME-$1" 2>/dev/null || true; }
is_up() { [[ -e "$DIR/$MARK" && -n "$(processes switch)" ]]; }

# Ends what runs and removes what was made, at whatever stage of `up`.
clean_up() {
    local host pids deadline=$((SECONDS + 10))
    # What this script has just started may not have entered its namespace yet.
    mapfile -t pids < <(jobs -p)
    { ((${#pids[@]} == 0)) || kill -KILL "${pids[@]}" || true; } 2>/dev/null
    wait 2>/dev/null
    for host in switch node{1..9}; do
        [[ -e "/run/netns/$NAME-$host" ]] || continue
        # More than once: a process may have started another one meanwhile.
        while mapfile -t pids < <(processes "$host") && ((${#pids[@]} && SECONDS < deadline)); do
            kill -KILL "${pids[@]}" 2>/dev/null || true
        done
        ip netns delete "$NAME-$host" || true
    done
    ip link delete "${NAME}0" 2>/dev/null || true
    # `ip netns add` makes this folder and mounts it on itself: the last one out removes it.
    if [[ -d /run/netns && -z "$(ls /run/netns)" ]]; then
        umount -n /run/netns 2>/dev/null || true
        rmdir /run/netns || true
    fi
    rm -rf "$DIR"
}

reachable() { timeout 1 bash -c ": </dev/tcp/$1/22" 2>/dev/null; }

# Waits until every node is idle and reachable, for 30 seconds or until a daemon ends.
wait_for_nodes() {
    local deadline=$((SECONDS + 30)) k=1 pid
    while ((k <= NODES)); do
        if sinfo -h -n "node$k" -p main -o %T 2>/dev/null | grep -x idle >/dev/null &&
            reachable "$NETWORK.$k"; then
            k=$((k + 1))
            continue
        fi
        for pid in "${!DAEMONS[@]}"; do
            kill -0 "$pid" 2>/dev/null || fail "${DAEMONS[$pid]}" "${DAEMONS[$pid]} has ended."
        done
        ((SECONDS < deadline)) || fail controller-slurmctld "node$k is not idle after 30 seconds."
        sleep 0.2
    done
}

fail() {
    echo "$2 The end of $1.log:" >&2
    tail -n 5 "$DIR/log/$1.log" >&2
    exit 1
}

undo() {
    trap '' INT TERM HUP
    clean_up
    echo "The cluster did not come up, and everything that was made for it is removed." >&2
}

up() {
    ! is_up || refuse "A cluster is up already. To end it: bash 03-multi-node/local_cluster.sh down"
    [[ ! -e "$DIR/$MARK" ]] || clean_up # what a crash has left
    check_free
    # Once daemons start there is no more "$( )": bash can fail to read a trap's command within one.
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

status() {
    is_up || { echo "No cluster is up." && exit 1; }
    export SLURM_CONF=$DIR/slurm.conf
    local line name address state
    # Not sinfo, which can take a node that is lost for one that still works on its job.
    scontrol --oneliner show nodes | while read -r line; do
        [[ "$line" =~ NodeName=([^ ]+)\ .*NodeAddr=([^ ]+)\ .*\ State=([^ ]+) ]]
        name=${BASH_REMATCH[1]} address=${BASH_REMATCH[2]} state=${BASH_REMATCH[3],,}
        echo "$name  $address  $state  $(reachable "$address" || echo "not ")reachable"
    done
    squeue
}

down() {
    [[ -e "$DIR/$MARK" ]] || { echo "No cluster was up." && exit; }
    trap '' INT TERM HUP
    clean_up
    echo "The cluster is down."
}

VERB=${1:-}
NODES=${2:-2}
[[ "$VERB" =~ ^(up|status|down)$ && $# -le 2 ]] ||
    refuse "Say what to do: local_cluster.sh up [NODES], status or down."
[[ "$NODES" =~ ^[1-9]$ ]] || refuse "NODES must be a number from 1 to 9, not '$NODES'."
check_machine
# Whoever comes second waits.
exec 9<"$(dirname "$DIR")"
flock 9
"$VERB"
