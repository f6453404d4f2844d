# syntax=docker/dockerfile:1
# anygauge on NVIDIA GPUs, over PyTorch's own image with compilers: DeepSpeed's operations are built
# ahead, and Triton compiles its launchers when a kernel is first used.

ARG BASE

# hadolint ignore=DL3006
FROM ${BASE} AS run
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="anygauge, cuda" \
      org.opencontainers.image.description="One LLM fine-tuning loop, any accelerator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
ARG TORCH_VERSION
ARG ARCHITECTURES
COPY pyproject.toml README.md LICENSE /tmp/src/
COPY anygauge /tmp/src/anygauge
COPY backends /tmp/src/backends
COPY kernels /tmp/src/kernels
COPY launchers /tmp/src/launchers
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    DS_BUILD_FUSED_ADAM=1 TORCH_CUDA_ARCH_LIST="${ARCHITECTURES}" \
    pip install --no-build-isolation "torch==${TORCH_VERSION}" "/tmp/src[cuda]" \
    && rm -rf /tmp/src
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp anygauge \
    && mkdir /work \
    && chown 10001:0 /work \
    && chmod g+rwx /work
ENV HOME=/tmp \
    USER=anygauge \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
USER 10001
HEALTHCHECK --interval=5m --timeout=60s CMD ["anygauge", "doctor", "--backend", "cuda", "--output", "/tmp"]
# tini passes signals on, and buries what ranks leave behind.
ENTRYPOINT ["tini", "--", "anygauge"]
CMD ["--help"]
