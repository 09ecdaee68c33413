# headrace on Ascend NPUs.
#   docker build -f docker/npu.Dockerfile -t headrace:npu .
# BASE: a Debian or Ubuntu image with CANN and Python; take the tag of your chip (910b, a3, 310p). TORCH_NPU: the release
# that goes with torch in constraints.txt and with the base's CANN. TORCH_INDEX: where torch comes from when the base
# has none: PyTorch's index of CPU builds, on which torch-npu stands.
ARG BASE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12

FROM ${BASE} AS base

FROM base AS builder
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_NPU=torch-npu==2.13.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/install.sh constraints.txt ./
RUN ./install.sh torch "${TORCH_INDEX}" "${TORCH_NPU}"
COPY . headrace
RUN ./install.sh headrace /src/headrace

FROM base
LABEL org.opencontainers.image.title="headrace (Ascend NPUs)" \
    org.opencontainers.image.licenses="Apache-2.0"
# group root: CANN's files are readable by owner and group in some images
RUN useradd --uid 10001 --create-home --groups root headrace \
    && install -d -o headrace -g headrace /models
COPY --from=builder /opt/headrace /opt/headrace
COPY docker/npu-entry.sh /usr/local/bin/
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
ENTRYPOINT ["npu-entry.sh"]
CMD ["demo"]
