# Gateway, tools and the `fermata` command: no torch, no vLLM. From the root of the repository:
#   docker build -f deploy/images/gateway.Dockerfile -t fermata-gateway:0.1.0 .
# For tools of your own: FROM fermata-gateway:0.1.0, add your module, and name it as module:object in the chart's tools.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PATH=/opt/fermata/venv/bin:$PATH
WORKDIR /src
COPY requirements/gateway.txt requirements/gateway.txt
RUN python -m venv /opt/fermata/venv \
    && pip install --no-cache-dir --no-deps -r requirements/gateway.txt
COPY . .
RUN pip install --no-cache-dir --no-deps . \
    && mkdir /opt/fermata/demo \
    && cp fermata_cli/demo/corpus.jsonl /opt/fermata/demo/

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 fermata \
    && useradd --uid 10001 --gid 10001 --create-home fermata \
    && install --directory --owner=10001 --group=10001 /var/lib/fermata
COPY --from=build /opt/fermata /opt/fermata
ENV PATH=/opt/fermata/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/fermata
USER 10001:10001
CMD ["fermata", "--help"]
