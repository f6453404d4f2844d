#!/bin/sh
# Builds the CPU image and has it run the demo, cut off from any network. `make image-cpu` calls it.
#
#   STORAGE=FOLDER  where images are kept (default: build/images)
#   BASE=IMAGE      instead of a Debian that is made here
#   DEMO=--quick    further arguments of the demo
#
# What it leaves is used with build/images/podman, and removed with `make clean-images`.
set -eu
# shellcheck source=docker/engine.sh
. "$(dirname "$0")/engine.sh"

base=${BASE:-}
if [ -z "$base" ]; then
    make_debian
    base=$debian
fi
index=$(field cpu arguments.index)
# The machine's own source of torch comes first, where it has one.
grep -q 'find-links\|index-url' pip.conf && index=
image=localhost/anygauge:$version-cpu-$(field cpu name)
say "building $image"
began=$(date +%s)
./build --quiet --build-arg BASE="$base" --build-arg TORCH_VERSION="$(field cpu versions.torch)" \
    --build-arg TORCH_INDEX="$index" --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" --file "$top/docker/cpu.Dockerfile" --tag "$image" "$top" \
    >/dev/null
size=$(./podman image inspect --format '{{.Size}}' "$image")
say "built in $(($(date +%s) - began)) s, $((size / 1000000)) MB"

say "the demo, inside, without a network"
began=$(date +%s)
# shellcheck disable=SC2086
./podman run --rm --network none --shm-size 2g --env OMP_NUM_THREADS=1 \
    --volume "$top/examples:/work/examples:ro" \
    --entrypoint tini "$image" -- python /work/examples/demo/demo.py ${DEMO:-}
say "ended in $(($(date +%s) - began)) s"
