# One image for servers and gateways (docs/security.md, "Images"):
#   docker build --build-arg BASE=python:3.11-slim-bookworm@sha256:DIGEST -t lmworks:0.1.0 .
# A digest makes the base the same in a year. None is written here, as none was verified: without one the build stops.
# `docker buildx imagetools inspect python:3.11-slim-bookworm` shows today's.
ARG BASE=give-a-base-with-its-digest

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/lmworks && python -m venv /opt/sbom && /opt/sbom/bin/pip install "cyclonedx-bom==7.5.0"
COPY constraints.txt ./
RUN /opt/lmworks/bin/pip install -c constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE MANIFEST.in ./
COPY src ./src
RUN /opt/lmworks/bin/pip install -c constraints.txt ".[gateway,tracing]" \
  && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/lmworks/sbom.json /opt/lmworks/bin/python

FROM ${BASE}
COPY --from=build /opt/lmworks /opt/lmworks
# Nothing is written but below /tmp, which a container without a writable root mounts (--read-only --tmpfs /tmp).
ENV PATH=/opt/lmworks/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["lmworks"]
CMD ["--help"]
