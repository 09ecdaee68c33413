# headrace on NVIDIA GPUs.
#   docker build -f docker/cuda.Dockerfile -t headrace:cuda .
# BASE: a Debian or Ubuntu image with Python and a CUDA build of torch 2.9 or newer, which stays as it is. CUDA 13 needs
# driver 580 or newer; for older ones take the same tag with cuda12.6.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

FROM ${BASE} AS base
# Triton compiles a small launcher of each kernel with the C compiler when it is first used
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

FROM base AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/install.sh constraints.txt ./
RUN ./install.sh torch
COPY . headrace
RUN ./install.sh headrace /src/headrace

FROM base
LABEL org.opencontainers.image.title="headrace (NVIDIA GPUs)" \
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
