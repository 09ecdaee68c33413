# headrace on Intel GPUs.
#   docker build -f docker/xpu.Dockerfile -t headrace:xpu .
# BASE: a Debian or Ubuntu image whose packages have Intel's Level Zero driver. TORCH_INDEX: where torch comes from when
# the base has none: PyTorch's index of XPU builds, which bring the oneAPI runtime along. DRIVER: Debian packages of
# the driver; "" where the base has it.
ARG BASE=ubuntu:26.04

FROM ${BASE} AS base
# Level Zero's loader and driver, with headers for what Triton compiles when a kernel is first used
ARG DRIVER="intel-opencl-icd libze-dev libze-intel-gpu1 libze1"
# DRIVER is words: packages
# hadolint ignore=SC2086
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ python3 python3-dev ${DRIVER} \
    && rm -rf /var/lib/apt/lists/*

FROM base AS builder
ARG TORCH_INDEX=https://download.pytorch.org/whl/xpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/install.sh constraints.txt ./
RUN ./install.sh torch "${TORCH_INDEX}"
COPY . headrace
RUN ./install.sh headrace /src/headrace

FROM base
LABEL org.opencontainers.image.title="headrace (Intel GPUs)" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home headrace \
    && install -d -o headrace -g headrace /models
COPY --from=builder /opt/headrace /opt/headrace
# what is downloaded goes to the volume, too
ENV PATH=/opt/headrace/bin:$PATH \
    HEADRACE_CACHE=/models/cache \
    HF_HOME=/models/huggingface \
    PYTHONUNBUFFERED=1
WORKDIR /models
USER 10001
EXPOSE 8000
# /health answers 503 once the engine has failed; while a model is being downloaded nothing answers yet
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# exec form: the server is process 1 and gets SIGTERM itself; it drains (--shutdown-timeout) and ends with 0
ENTRYPOINT ["headrace", "serve", "--host", "0.0.0.0"]
CMD ["demo"]
