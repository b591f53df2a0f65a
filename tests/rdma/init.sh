#!/bin/busybox sh
# The first process of the guest: sets up the host's files, the cable and both soft-RoCE devices, and
# then runs one job after the other.
#
# What the host hears is on the second serial port, a line for each event; times are seconds since the start:
#   @failed STEP: WHAT IT SAID              the guest could not be set up, and ends
#   @ready TIME                             both devices are up
#   @ended NUMBER STATUS BEGUN ENDED        job NUMBER has ended; its output is in the shared folder
# What it is told is a line too: `NUMBER LIMIT` runs NUMBER.sh of the shared folder for at most LIMIT seconds,
# and `off` ends the guest.

/bin/busybox --install -s /bin
export PATH=/bin:/usr/sbin:/usr/bin:/sbin
ROOT=/root
LAB=/run/lab  # the folder shared with the host, within $ROOT

now() { cut -d ' ' -f 1 /proc/uptime; }
say() { echo "@$*" >&3; }

# A step that fails ends the guest, and is named: `step "what it does" COMMAND...`
step() {
    what=$1
    shift
    echo "$(now) $what: $*"
    if ! said=$("$@" 2>&1); then
        say "failed $what: \`$*\`: $(echo "$said" | tail -n 3 | tr '\n' ' ')"
        poweroff -f
    fi
}

# With a path, since busybox takes a bare name for its own command of that name.
inside() { chroot $ROOT /usr/bin/env "$@"; }
# Commands of ip, one a line; it says which one failed.
ip_lines() { inside ip "$@" -batch -; }
write() { echo "$1" >"$2"; }

# For what the kernel does a moment later and tells nobody of; a minute at most.
until_true() {
    for _ in $(seq 600); do
        "$@" && return
        usleep 100000
    done
    echo "not so within a minute"
    return 1
}

load_modules() {
    while read -r module; do
        insmod "/modules/$module" || return
    done </modules/order
}

shared() { mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"; }

# The host's root, read-only, below memory that takes what is written: any program of the host runs as it is.
files() {
    step "mount the host's files" shared host /lower ro,cache=loose
    step "make room for what is written" mount -t tmpfs tmpfs /written
    mkdir /written/upper /written/work
    step "join both" mount -t overlay \
        -o lowerdir=/lower,upperdir=/written/upper,workdir=/written/work overlay $ROOT
    step "keep all of it in reach" mount --bind $ROOT /whole
    for folder in tmp run var/tmp; do
        step "empty /$folder" mount -t tmpfs tmpfs $ROOT/$folder
    done
    step "mount /dev" mount -t devtmpfs devtmpfs $ROOT/dev
    mkdir -p $ROOT/dev/pts $ROOT/dev/shm $ROOT$LAB
    step "mount /dev/pts" mount -t devpts devpts $ROOT/dev/pts
    step "mount /dev/shm" mount -t tmpfs tmpfs $ROOT/dev/shm
    step "mount /sys" mount -t sysfs sysfs $ROOT/sys
    step "mount /proc" mount -t proc proc $ROOT/proc
    step "mount the shared folder" shared lab $ROOT$LAB cache=none
    # What a checkout needs and lies in a folder that was emptied above: a line each, SOURCE tab TARGET.
    while IFS="$tab" read -r source target; do
        step "show $target" show "$source" "$target"
    done <$ROOT$LAB/shown
}

tab=$(printf '\t')
show() { mkdir -p "$ROOT$2" && mount --bind "/whole$1" "$ROOT$2"; }

# d0 and d1 are the ends of one cable. Both hold addresses of one kernel, which would not use the cable but
# pass everything from hand to hand. So what goes out from one to the other is routed before the table of own
# addresses is asked, and what comes in from an own address is not refused.
cable() {
    step "make the cable" ip_lines <<END
link add d0 mtu 4500 type veth peer name d1 mtu 4500
link set lo up
END
    for end in d0 d1; do
        for setting in 4/conf/$end/accept_local=1 4/conf/$end/rp_filter=0 4/conf/$end/arp_ignore=1 \
            4/conf/$end/arp_announce=2 6/conf/$end/accept_dad=0; do
            step "set $end" write "${setting#*=}" "/proc/sys/net/ipv${setting%=*}"
        done
    done
    step "give both ends their addresses" ip_lines <<END
addr add 10.9.0.1/24 dev d0
addr add 10.9.0.2/24 dev d1
addr add fd09::1/64 dev d0 nodad
addr add fd09::2/64 dev d1 nodad
link set d0 up
link set d1 up
END
    for version in -4:10.9.0. -6:fd09::; do
        net=${version#*:}
        step "route each end to the other" ip_lines "${version%%:*}" <<END
rule add pref 100 lookup local
rule del pref 0
rule add pref 10 iif lo from ${net}1 to ${net}2 lookup 10
rule add pref 11 iif lo from ${net}2 to ${net}1 lookup 11
route add ${net}2 dev d0 table 10
route add ${net}1 dev d1 table 11
END
    done
}

has_gids() {
    for index in 0 1 2; do
        case $(cat $ROOT/sys/class/infiniband/$1/ports/1/gids/$index) in
            0000:0000:0000:0000:0000:0000:0000:0000 | "") return 1 ;;
        esac
    done
}

devices() {
    for end in 0 1; do
        step "make rxe$end" inside rdma link add rxe$end type rxe netdev d$end
        step "wait for the addresses of rxe$end" until_true has_gids rxe$end
    done
}

# In a PID namespace of its own, so that nothing of a job stays: with its first process all others die.
job() {
    begun=$(now)
    inside -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        timeout -s KILL "$2" unshare --pid --fork --kill-child --mount-proc \
        /bin/sh "$LAB/$1.sh" >"$ROOT$LAB/$1.out" 2>&1 </dev/null
    say "ended $1 $? $begun $(now)"
}

mkdir -p /proc /sys /dev /lower /written /whole $ROOT
mount -t proc proc /proc
mount -t devtmpfs devtmpfs /dev
# Open from here on: what comes for a port that nobody has open is lost.
exec 3<>/dev/ttyS1
stty raw -echo <&3
limit=$(sed 's/.*kvik.limit=\([0-9]*\).*/\1/' /proc/cmdline)
# Whoever started this guest may have died.
(sleep "$limit" && poweroff -f) &
step "load the modules" load_modules
files
cable
devices

say "ready $(now)"
while read -r number limit; do
    test "$number" = off && break
    job "$number" "$limit"
done <&3
poweroff -f
