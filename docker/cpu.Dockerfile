# headrace on CPUs.
#   docker build -f docker/cpu.Dockerfile -t headrace:cpu .
# BASE: any Debian or Ubuntu image with Python 3.10 or newer. TORCH_INDEX: where torch comes from when the base has
# none; PyTorch's index of CPU builds by default, since the general index gives the CUDA build, several GB larger.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS builder
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/install.sh constraints.txt ./
RUN ./install.sh torch "${TORCH_INDEX}" \
    # what only extensions and tests of torch need; not there when torch is the base's
    && rm -rf /opt/headrace/lib/python3*/site-packages/torch/include \
        /opt/headrace/lib/python3*/site-packages/torch/test
COPY . headrace
RUN ./install.sh headrace /src/headrace

FROM ${BASE}
LABEL org.opencontainers.image.title="headrace (CPU)" \
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
