#!/bin/sh
# Builds cuda.Dockerfile and hpu.Dockerfile on stand-ins of their bases, which cannot be fetched
# everywhere: a Debian with the CPU's torch where PyTorch's and Intel's have their own, and a folder
# with DeepSpeed's release where Intel's fork would be fetched. It shows that every step works and what
# it leaves behind; it shows nothing of a GPU or a Gaudi. `make test-image` calls it.
set -eu
# shellcheck source=docker/engine.sh
. "$(dirname "$0")/engine.sh"

make_debian
torch=$(field cpu versions.torch)
deepspeed=$(field hpu versions.deepspeed)
mkdir -p stand-in
cat >stand-in/Dockerfile <<END
FROM $debian
RUN apt-get update && apt-get install -y --no-install-recommends \\
    build-essential ca-certificates git openmpi-bin openssh-server python3-dev python3-pip
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \\
    pip install "torch==$torch" && pip install --upgrade pip hatchling numpy==1.26.4 wheel \\
    && pip download --no-deps --no-binary :all: --no-build-isolation --dest /opt deepspeed==0.16.9
RUN cd /opt && tar --no-same-owner -xzf deepspeed-0.16.9.tar.gz && cd deepspeed-0.16.9 && git init --quiet \\
    && git add . && git -c user.name=stand-in -c user.email=stand-in@localhost commit --quiet -m . \\
    && git tag $deepspeed && git config --system \\
        url.file:///opt/deepspeed-0.16.9.insteadOf https://github.com/HabanaAI/DeepSpeed.git
END
say "making a stand-in for the bases"
./build --quiet --tag localhost/stand-in:1 stand-in >/dev/null
common="--build-arg BASE=localhost/stand-in:1 --build-arg VERSION=$version --build-arg REVISION=$revision"
common="$common --build-arg TORCH_VERSION=$torch --quiet"
say "building cuda.Dockerfile, without CUDA's operations"
# shellcheck disable=SC2086
./build $common --build-arg BUILD_BASE=localhost/stand-in:1 --build-arg OPERATIONS=DS_BUILD_OPS=0 \
    --build-arg ARCHITECTURES="$(field cuda arguments.architectures)" \
    --file "$top/docker/cuda.Dockerfile" --tag localhost/stand-in-cuda "$top" >/dev/null
say "building hpu.Dockerfile"
# shellcheck disable=SC2086
./build $common --build-arg DEEPSPEED="$deepspeed" \
    --build-arg CONSTRAINTS="$(field hpu arguments.constraints)" \
    --build-arg TRANSFORMERS="$(field hpu arguments.transformers)" \
    --build-arg OPTIMUM_HABANA="$(field hpu arguments.optimum_habana)" \
    --file "$top/docker/hpu.Dockerfile" --tag localhost/stand-in-hpu "$top" >/dev/null
say "built"
