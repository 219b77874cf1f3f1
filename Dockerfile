# The exporter as an image: docker build -t tokengap .
# What a container of it can see, and what that takes: docs/containers.md.
FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY requirements.txt ./
RUN python3 -m venv --without-pip /opt/tokengap \
    && pip --python /opt/tokengap/bin/python install --no-cache-dir -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
RUN pip --python /opt/tokengap/bin/python install --no-cache-dir --no-deps .

FROM python:3.13-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tokengap" \
      org.opencontainers.image.description="Prometheus exporter that joins proxy sockets, engine counters and GPU telemetry of streaming LLM inference" \
      org.opencontainers.image.source="https://github.com/tokengap/tokengap" \
      org.opencontainers.image.documentation="https://github.com/tokengap/tokengap/blob/main/docs/containers.md" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/tokengap /opt/tokengap
# GPUs are read and not computed on: of NVIDIA's runtime the library of nvidia-smi will do.
ENV PATH=/opt/tokengap/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=utility
# By number, so that Kubernetes can tell that it is not root.
USER 65532:65532
EXPOSE 10788
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:10788/-/healthy', timeout=4)"]
ENTRYPOINT ["tokengap"]
CMD ["serve", "--config", "/etc/tokengap/tokengap.yaml"]
