#!/bin/sh
# Removes the images and containers in build/images, and nothing else of podman's.
set -eu
storage=${STORAGE:-$(cd "$(dirname "$0")/.." && pwd)/build/images}
[ -d "$storage" ] || exit 0
if [ -x "$storage/podman" ]; then
    "$storage/podman" image unmount --all >/dev/null
    "$storage/podman" rm --all --force >/dev/null
    "$storage/podman" rmi --all --force >/dev/null
fi
# What is still mounted there (the storage itself is) cannot be removed as files.
awk -v under="$storage/" 'index($2, under) == 1 { print $2 }' /proc/mounts | sort -r |
    while read -r place; do umount "$place"; done
rm -rf "$storage"
