# Sourced by the scripts here: images without Docker's daemon, by buildah and podman, as root, on
# Debian. Leaves in $storage what they need again: `build` and `podman`, with all their settings.
# shellcheck shell=sh
top=$(cd "$(dirname "$0")/.." && pwd)
storage=${STORAGE:-$top/build/images}
mkdir -p "$storage"
cd "$storage" || exit

say() { echo "==> $*"; }

PATH=$PATH:/usr/sbin:/sbin
missing=
for program in buildah podman runc debootstrap; do
    command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || { echo "error: run this as root, or install$missing" >&2; exit 1; }
    say "installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

# A mark in pip's settings, by which a test finds out whether they got into an image.
NOT_IN_IMAGES=pip-settings-are-in-no-layer
printf '{"default":[{"type":"insecureAcceptAnything"}]}\n' >policy.json
# Limits that a machine without further rights can give, and no service besides.
cat >containers.conf <<END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
END

# What pip is told on this machine, it is told in there: a mirror, its certificate, local folders. It
# may hold a password.
rm -f pip.conf
(umask 077 && : >pip.conf)
python3 -m pip config list 2>/dev/null |
    sed -n "s/^\(global\|:env:\)\.\.\{0,1\}\([a-z-]*\)='\(.*\)'$/\2 = \3/p" |
    awk -F' = ' 'BEGIN { print "[global]" } !seen[$1]++' >pip.conf
echo "# $NOT_IN_IMAGES" >>pip.conf
mounts=
authority=$(sed -n 's/^cert = //p' pip.conf)
if [ -n "$authority" ]; then
    cp "$authority" authority.pem
    sed -i 's,^cert = .*,cert = /etc/pip-authority.pem,' pip.conf
    mounts="--volume $storage/authority.pem:/etc/pip-authority.pem:ro"
fi
# A file of constraints is given inside by a copy, as the certificate is.
limits=$(sed -n 's/^constraint = //p' pip.conf)
if [ -n "$limits" ]; then
    # shellcheck disable=SC2086
    cat $limits >constraints.txt
    sed -i 's,^constraint = .*,constraint = /etc/pip-constraints.txt,' pip.conf
    mounts="$mounts --volume $storage/constraints.txt:/etc/pip-constraints.txt:ro"
fi
# An index in a folder names files beside it.
for folder in $(sed 's,file://\([^ ]*\)/[^ /]*,\1,g' pip.conf | tr ' ' '\n' | grep '^/' | grep -v '^/etc/' | sort -u); do
    [ -d "$folder" ] || folder=$(dirname "$folder")
    [ -d "$folder" ] && mounts="$mounts --volume $folder:$folder:ro"
done

# By their whole paths: this folder may be on the path, too.
podman=$(PATH=/usr/local/bin:/usr/bin:/bin command -v podman)
buildah=$(PATH=/usr/local/bin:/usr/bin:/bin command -v buildah)
where="--root $storage/root --runroot $storage/run --storage-driver overlay"
cat >podman <<END
#!/bin/sh
# Podman, with the images that are kept here. It would complain of each health check where there is
# no systemd.
CONTAINERS_CONF=$storage/containers.conf exec $podman --log-level fatal $where "\$@"
END
# Docker's format, since the other has no health check.
cat >build <<END
#!/bin/sh
# As \`docker build\`, with the images that are kept here, and with pip's settings.
exec $buildah $where bud --isolation chroot --layers --format docker \\
    --signature-policy $storage/policy.json --secret id=pip,src=$storage/pip.conf $mounts "\$@"
END
chmod +x podman build

# A Debian as the official image is: without what apt leaves behind.
debian=localhost/debian:12
make_debian() {
    ./podman image exists $debian && return
    say "making $debian"
    mkdir -p base
    [ -f base/rootfs.tar ] || {
        rm -rf base/rootfs
        debootstrap --variant=minbase bookworm base/rootfs >base/debootstrap.log
        rm -rf base/rootfs/var/cache/apt/* base/rootfs/var/lib/apt/lists/* base/rootfs/var/log/*
        tar -C base/rootfs -cf base/rootfs.tar.part .
        mv base/rootfs.tar.part base/rootfs.tar
        rm -rf base/rootfs
    }
    printf 'FROM scratch\nADD rootfs.tar /\nCMD ["sh"]\n' >base/Dockerfile
    ./build --quiet --tag $debian base >/dev/null
}

# A field of a backend's newest row: field cpu versions.torch
field() {
    python3 -c 'import sys
sys.path.insert(0, sys.argv[1])
from buildx import releases
one = [row for row in releases(sys.argv[2]) if row["built"]][-1]
for name in sys.argv[3].split("."):
    one = one[name]
print(one)' "$top/docker" "$1" "$2"
}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$top/pyproject.toml")
revision=$(git -C "$top" rev-parse --short HEAD 2>/dev/null || echo unknown)
