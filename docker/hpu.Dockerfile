# syntax=docker/dockerfile:1
# anygauge on Gaudi, over Intel's image, which brings torch, its plugin, the driver's libraries, ssh
# and Open MPI. None of these is touched: what is installed here must go with them. From the root:
#   python docker/buildx.py hpu

ARG BASE

# hadolint ignore=DL3006
FROM ${BASE} AS build
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
ARG TORCH_VERSION
ARG DEEPSPEED
ARG DEEPSPEED_SOURCE=git+https://github.com/HabanaAI/DeepSpeed.git
# Pins of the rest: constraints.txt, or those that go with optimum-habana.
ARG CONSTRAINTS
# The torch that is there, with Intel's local part of the version, is a constraint on all others. What
# it or its stack may want in a version of its own (torch 2.6 one of sympy, others one of numpy) is left
# to them; DeepSpeed is Intel's. pyarrow 26 needs numpy 2, which its metadata does not say.
COPY docker/${CONSTRAINTS} /build/pins.txt
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python3 -c "import importlib.metadata as m; v = m.version('torch'); assert v.startswith('${TORCH_VERSION}'), v" \
    && pip list --format=freeze | grep -iE '^(torch|habana|numpy)' > /build/constraints.txt \
    && grep -vE '^(deepspeed|mpmath|networkx|numpy|pandas|pillow|protobuf|scikit-learn|scipy|setuptools|sympy)==' \
        /build/pins.txt >> /build/constraints.txt \
    && if grep -q '^numpy==1\.' /build/constraints.txt; then \
        sed -i 's/^pyarrow==.*/pyarrow<26/' /build/constraints.txt; \
    fi
# Intel's fork: its operations for Gaudi are Python, and there is nothing to build ahead.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    DS_BUILD_OPS=0 \
    pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels \
        "${DEEPSPEED_SOURCE}@${DEEPSPEED}" \
    && pip install hatchling
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
LABEL org.opencontainers.image.title="anygauge, hpu" \
      org.opencontainers.image.description="One LLM fine-tuning loop, any accelerator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/debconf/* /etc/ssh/ssh_host_* \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp anygauge \
    && install -d -o 10001 -g 0 -m 775 /work /anygauge
COPY docker/anygauge-sshd /usr/local/bin/
ARG TRANSFORMERS
ARG OPTIMUM_HABANA=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,from=build,source=/build,target=/build \
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    pip install --no-cache-dir --constraint /build/constraints.txt \
        /build/wheels/deepspeed-*.whl "/build/wheels/anygauge-${VERSION}-py3-none-any.whl[tensorboard]" \
        "transformers==${TRANSFORMERS}" ${OPTIMUM_HABANA:+"optimum-habana==$OPTIMUM_HABANA"} \
    && (pip check || echo "the lines above may be the base's own")
# Gaudi's software writes logs, for which it needs a folder of this user's.
ENV HOME=/tmp \
    HABANA_LOGS=/tmp/habana_logs \
    USER=anygauge \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
USER 10001
HEALTHCHECK --interval=5m --timeout=60s \
    CMD ["anygauge", "doctor", "--backend", "hpu", "--output", "/tmp"]
# tini passes signals on, and buries what ranks leave behind.
ENTRYPOINT ["tini", "--", "anygauge"]
CMD ["--help"]
