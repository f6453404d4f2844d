# syntax=docker/dockerfile:1
# anygauge on Gaudi, over Intel's image, which brings torch, its plugin, drivers' libraries and Open
# MPI. None of these is touched: what is installed here must go with them.

ARG BASE

# hadolint ignore=DL3006
FROM ${BASE} AS run
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="anygauge, hpu" \
      org.opencontainers.image.description="One LLM fine-tuning loop, any accelerator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
ARG TORCH_VERSION
ARG DEEPSPEED
ARG EXTRAS=
COPY pyproject.toml README.md LICENSE /tmp/src/
COPY anygauge /tmp/src/anygauge
COPY backends /tmp/src/backends
COPY kernels /tmp/src/kernels
COPY launchers /tmp/src/launchers
# The torch that is there stays as it is: its version, with Intel's local part, is the constraint.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -c "import importlib.metadata as m; v = m.version('torch'); assert v.startswith('${TORCH_VERSION}'), v; print('torch==' + v)" > /tmp/constraints \
    && pip install "git+https://github.com/HabanaAI/DeepSpeed.git@${DEEPSPEED}" \
    && pip install --constraint /tmp/constraints "/tmp/src${EXTRAS:+[$EXTRAS]}" \
    && rm -rf /tmp/src /tmp/constraints
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp anygauge \
    && mkdir /work \
    && chown 10001:0 /work \
    && chmod g+rwx /work
ENV HOME=/tmp \
    USER=anygauge \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
USER 10001
HEALTHCHECK --interval=5m --timeout=60s CMD ["anygauge", "doctor", "--backend", "hpu", "--output", "/tmp"]
# exec form: signals reach the command line itself.
ENTRYPOINT ["anygauge"]
CMD ["--help"]
