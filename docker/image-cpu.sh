#!/bin/sh
# Builds the CPU image without Docker's daemon and has it run the demo, cut off from any network.
# As root, on Debian; installs what is missing. `make image-cpu` calls it.
#
#   STORAGE=FOLDER  where images are kept (default: build/images)
#   BASE=IMAGE      instead of a Debian that is made here
#   DEMO=--quick    further arguments of the demo
#
# What it leaves is used with build/images/podman, and removed with `podman system reset` of that.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
storage=${STORAGE:-$top/build/images}
mkdir -p "$storage"
cd "$storage"

say() { echo "==> $*"; }

missing=
for program in buildah podman runc debootstrap; do
    PATH=$PATH:/usr/sbin:/sbin command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    say "installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
PATH=$PATH:/usr/sbin:/sbin

where="--root $storage/root --runroot $storage/run --storage-driver overlay"
[ -f policy.json ] || printf '{"default":[{"type":"insecureAcceptAnything"}]}' >policy.json
# Limits that a machine without further rights can give, and no service besides.
cat >containers.conf <<END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
END
printf '#!/bin/sh\n%s\nCONTAINERS_CONF=%s exec podman %s "$@"\n' \
    "# Podman with the images that are kept here." "$storage/containers.conf" "$where" >podman
chmod +x podman
build() {
    # Docker's format, since the other has no health check.
    # shellcheck disable=SC2086
    buildah $where bud --isolation chroot --layers --format docker \
        --signature-policy policy.json "$@"
}

base=${BASE:-localhost/debian:12}
if [ -z "${BASE:-}" ] && ! ./podman image exists "$base"; then
    say "making $base"
    mkdir -p base
    [ -f base/rootfs.tar ] || {
        debootstrap --variant=minbase bookworm base/rootfs >base/debootstrap.log
        rm -rf base/rootfs/var/cache/apt/* base/rootfs/var/lib/apt/lists/* base/rootfs/var/log/*
        tar -C base/rootfs -cf base/rootfs.tar.part .
        mv base/rootfs.tar.part base/rootfs.tar
        rm -rf base/rootfs
    }
    printf 'FROM scratch\nADD rootfs.tar /\nCMD ["sh"]\n' >base/Dockerfile
    build --quiet --tag "$base" base >/dev/null
fi

# What pip is told on this machine, it is told in there: a mirror, its certificate, local folders.
python3 -m pip config list 2>/dev/null |
    sed -n "s/^\(global\|:env:\)\.\.\{0,1\}\([a-z-]*\)='\(.*\)'$/\2 = \3/p" |
    awk -F' = ' 'BEGIN { print "[global]" } !seen[$1]++' >pip.conf
mounts=
authority=$(sed -n 's/^cert = //p' pip.conf)
if [ -n "$authority" ]; then
    cp "$authority" authority.pem
    sed -i 's,^cert = .*,cert = /etc/pip-authority.pem,' pip.conf
    mounts="--volume $storage/authority.pem:/etc/pip-authority.pem:ro"
fi
# An index in a folder names files beside it.
for folder in $(sed 's,file://\([^ ]*\)/[^ /]*,\1,g' pip.conf | tr ' ' '\n' | grep '^/' | grep -v '^/etc/' | sort -u); do
    [ -d "$folder" ] || folder=$(dirname "$folder")
    [ -d "$folder" ] && mounts="$mounts --volume $folder:$folder:ro"
done
field() {
    python3 -c 'import json, sys
one = json.load(open(sys.argv[1]))["variable"]["CPU_RELEASES"]["default"][-1]
for name in sys.argv[2].split("."):
    one = one[name]
print(one)' "$top/backends/anygauge_cpu/releases.json" "$1"
}
index=$(field arguments.index)
# The machine's own source of torch comes first, where it has one.
grep -q 'find-links\|index-url' pip.conf && index=
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$top/pyproject.toml")
image=localhost/anygauge:$version-cpu-$(field release)
say "building $image"
began=$(date +%s)
# shellcheck disable=SC2086
build --quiet $mounts --secret id=pip,src=pip.conf --build-arg BASE="$base" \
    --build-arg TORCH_VERSION="$(field versions.torch)" --build-arg TORCH_INDEX="$index" \
    --build-arg VERSION="$version" --build-arg REVISION="$(git -C "$top" rev-parse --short HEAD)" \
    --file "$top/docker/cpu.Dockerfile" --tag "$image" "$top" >/dev/null
size=$(./podman image inspect --format '{{.Size}}' "$image")
say "built in $(($(date +%s) - began)) s, $((size / 1000000)) MB"

say "the demo, inside, without a network"
began=$(date +%s)
# shellcheck disable=SC2086
./podman run --rm --network none --shm-size 2g --env OMP_NUM_THREADS=1 --volume "$top/examples:/work/examples:ro" \
    --entrypoint tini "$image" -- python /work/examples/demo/demo.py ${DEMO:-}
say "ended in $(($(date +%s) - began)) s"
