# syntax=docker/dockerfile:1
# anygauge on NVIDIA GPUs, over PyTorch's own images: the one with CUDA's compiler builds, the one
# without runs. From the repository's root:
#   python docker/buildx.py cuda

ARG BASE
ARG BUILD_BASE

# hadolint ignore=DL3006
FROM ${BUILD_BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential libaio-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
ARG TORCH_VERSION
ARG ARCHITECTURES
ARG OPERATIONS="DS_BUILD_AIO=1 DS_BUILD_PIN_MEMORY=1 DS_BUILD_CPU_ADAM=1 DS_BUILD_FUSED_ADAM=1"
COPY docker/constraints.txt docker/portable-c++ docker/built_operations.py /build/
# The torch that is there decides; an image of another one is a mistake.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -c "import importlib.metadata as m; v = m.version('torch'); assert v.split('+')[0] == '${TORCH_VERSION}', v" \
    && pip install --constraint /build/constraints.txt \
        hatchling ninja numpy packaging psutil py-cpuinfo setuptools wheel
# The operations of offloading, for any processor with AVX2 and the GPUs named. There is no driver
# here to link with: CUDA brings a stub of it.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    env ${OPERATIONS} DS_ACCELERATOR=cuda CXX=/build/portable-c++ \
        TORCH_CUDA_ARCH_LIST="${ARCHITECTURES}" LIBRARY_PATH=/usr/local/cuda/lib64/stubs \
    pip wheel --no-deps --no-build-isolation --no-binary deepspeed \
        --constraint /build/constraints.txt --wheel-dir /build/wheels deepspeed \
    && python3 /build/built_operations.py /build/wheels/deepspeed-*.whl cuda ${OPERATIONS}
COPY pyproject.toml README.md LICENSE /src/
COPY anygauge /src/anygauge
COPY backends /src/backends
COPY kernels /src/kernels
COPY launchers /src/launchers
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels /src

# hadolint ignore=DL3006
FROM ${BASE} AS run
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="anygauge, cuda" \
      org.opencontainers.image.description="One LLM fine-tuning loop, any accelerator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# gcc and Python's headers belong to running: Triton compiles the call of a kernel at its first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc libaio-dev libc6-dev openmpi-bin openssh-client openssh-server python3-dev tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/debconf/* /var/log/* /etc/ssh/ssh_host_* \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp anygauge \
    && install -d -o 10001 -g 0 -m 775 /work /anygauge
COPY docker/anygauge-sshd /usr/local/bin/
ARG TORCH_VERSION
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,from=build,source=/build,target=/build \
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    pip install --no-cache-dir --constraint /build/constraints.txt "torch==${TORCH_VERSION}" \
        /build/wheels/deepspeed-*.whl "/build/wheels/anygauge-${VERSION}-py3-none-any.whl[cuda,tensorboard]" \
    && pip check
ENV HOME=/tmp \
    USER=anygauge \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
USER 10001
HEALTHCHECK --interval=5m --timeout=60s \
    CMD ["anygauge", "doctor", "--backend", "cuda", "--output", "/tmp"]
# tini passes signals on, and buries what ranks leave behind.
ENTRYPOINT ["tini", "--", "anygauge"]
CMD ["--help"]
