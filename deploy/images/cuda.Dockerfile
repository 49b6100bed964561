# Rollout nodes and trainer on NVIDIA GPUs. CUDA comes with the wheels of torch and vLLM, the driver from the machine
# (NVIDIA's container toolkit). From the root of the repository:
#   docker build -f deploy/images/cuda.Dockerfile -t fermata:0.1.0-cuda .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PATH=/opt/fermata/venv/bin:$PATH
WORKDIR /src
COPY deploy/images/cuda.txt deploy/images/cuda.txt
RUN python -m venv /opt/fermata/venv \
    && pip install --no-cache-dir --no-deps -r deploy/images/cuda.txt
COPY . .
RUN pip install --no-cache-dir --no-deps . \
    && mkdir /opt/fermata/demo \
    && cp -r fermata_cli/demo/model fermata_cli/demo/tasks fermata_cli/demo/corpus.jsonl /opt/fermata/demo/

FROM ${PYTHON_IMAGE}
# g++: Triton, torch.compile and FlashInfer make kernels at start. libnuma1: vLLM binds memory with it.
# Versions are those of the base image's Debian release: pinning them would break the build at the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 fermata \
    && useradd --uid 10001 --gid 10001 --create-home fermata \
    && install --directory --owner=10001 --group=10001 /var/lib/fermata
COPY --from=build /opt/fermata /opt/fermata
# What the toolkit mounts: CUDA's driver and NVML. Which GPUs is the device plugin's word, so no image says it.
ENV PATH=/opt/fermata/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /var/lib/fermata
USER 10001:10001
CMD ["fermata", "--help"]
