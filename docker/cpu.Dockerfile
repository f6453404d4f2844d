# syntax=docker/dockerfile:1
# anygauge on CPUs: gloo, ssh and Open MPI. From the repository's root:
#   python docker/buildx.py cpu

ARG BASE

# hadolint ignore=DL3006
FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/anygauge
ENV PATH=/opt/anygauge/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    DS_BUILD_OPS=0 \
    DS_ACCELERATOR=cpu
ARG TORCH_VERSION
ARG TORCH_INDEX=
COPY docker/constraints.txt /build/
# A mirror's address, with its password, comes as a secret and is in no layer.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==${TORCH_VERSION}" \
    && pip install --upgrade pip \
    && pip install --constraint /build/constraints.txt hatchling numpy packaging psutil setuptools wheel
COPY pyproject.toml README.md LICENSE /src/
COPY anygauge /src/anygauge
COPY backends /src/backends
COPY kernels /src/kernels
COPY launchers /src/launchers
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-build-isolation --constraint /build/constraints.txt \
        "torch==${TORCH_VERSION}" "/src[tensorboard,zero]" \
    && pip check \
    && pip uninstall --yes \
        hatchling ninja pathspec pip setuptools tomlkit trove-classifiers wheel

# hadolint ignore=DL3006
FROM ${BASE} AS run
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="anygauge, cpu" \
      org.opencontainers.image.description="One LLM fine-tuning loop, any accelerator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        libtcmalloc-minimal4 openmpi-bin openssh-client openssh-server python3 tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/debconf/* /var/log/* /etc/ssh/ssh_host_* \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp anygauge \
    && install -d -o 10001 -g 0 -m 775 /work /anygauge
COPY docker/anygauge-sshd /usr/local/bin/
COPY --from=build /opt/anygauge /opt/anygauge
# Another user id, and a root file system that cannot be written, leave only /tmp and what is mounted.
ENV PATH=/opt/anygauge/bin:$PATH \
    HOME=/tmp \
    USER=anygauge \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
USER 10001
HEALTHCHECK --interval=5m --timeout=60s \
    CMD ["anygauge", "doctor", "--backend", "cpu", "--output", "/tmp"]
# tini passes signals on, and buries what ranks leave behind.
ENTRYPOINT ["tini", "--", "anygauge"]
CMD ["--help"]
