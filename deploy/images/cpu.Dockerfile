# Rollout nodes and trainer on CPUs, with the demo's model and tasks. From the root of the repository:
#   docker build -f deploy/images/cpu.Dockerfile -t fermata:0.1.0-cpu .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=2.13.0+cpu
# PyTorch's own index of CPU builds.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/fermata/venv/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/fermata/venv \
    && pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" "torch==${TORCH}"
COPY requirements/cpu.txt requirements/cpu.txt
RUN pip install --no-cache-dir --no-deps -r requirements/cpu.txt
COPY . .
RUN pip install --no-cache-dir --no-deps . \
    && mkdir /opt/fermata/demo \
    && cp -r fermata_cli/demo/model fermata_cli/demo/tasks fermata_cli/demo/corpus.jsonl /opt/fermata/demo/

FROM ${PYTHON_IMAGE}
# g++: torch.compile makes kernels at start (unless rollout.engine.enforce_eager). libnuma1: vLLM binds memory with it.
# Versions are those of the base image's Debian release: pinning them would break the build at the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 fermata \
    && useradd --uid 10001 --gid 10001 --create-home fermata \
    && install --directory --owner=10001 --group=10001 /var/lib/fermata
COPY --from=build /opt/fermata /opt/fermata
ENV PATH=/opt/fermata/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/fermata
USER 10001:10001
CMD ["fermata", "--help"]
