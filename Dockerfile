# syntax=docker/dockerfile:1
# Modelyard's image: `docker build -t modelyard .`; docs/containers.md says how to run it.
# For CUDA: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Wheels get the time of SOURCE_DATE_EPOCH; 0 is before what a zip can say.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 SOURCE_DATE_EPOCH=315532800
WORKDIR /build
RUN python -m venv --without-pip /opt/modelyard
COPY requirements-server.lock requirements-torch.lock ./
# torch from TORCH_INDEX alone: where that cannot be reached, PyPI's build for CUDA must not come
# instead. A build for CUDA names its libraries, exactly; what else it needs is there by then.
RUN pip --python /opt/modelyard/bin/python install --only-binary :all: --no-deps \
        --require-hashes -r requirements-server.lock \
    && pip --python /opt/modelyard/bin/python install --index-url "${TORCH_INDEX}" \
        -r requirements-torch.lock
# Each of these folders becomes a layer.
RUN mkdir /torch /own \
    && find /opt/modelyard/lib/python3.11/site-packages -maxdepth 1 \
        \( -name 'torch*' -o -name functorch -o -name 'nvidia*' -o -name 'cuda*' -o -name 'triton*' \) \
        -exec mv -t /torch {} +
COPY pyproject.toml README.md LICENSE ./
COPY archiver archiver
COPY base base
COPY client client
COPY examples examples
COPY exporter exporter
COPY handlers handlers
COPY plugins plugins
COPY serve serve
COPY modelyard modelyard
RUN pip --python /opt/modelyard/bin/python wheel --no-deps --no-build-isolation \
        --wheel-dir /wheels ./client . \
    && pip install --no-deps --target /own /wheels/*.whl \
    && rm -rf /own/bin
# With hashes in place of times, which builds and the copies below would change. Some packages bring
# files for other versions of Python, which do not compile.
RUN for folder in /torch /own /opt/modelyard/lib/python3.11/site-packages; do \
        python -m compileall -qq --invalidation-mode unchecked-hash -s "$folder" \
            -p /opt/modelyard/lib/python3.11/site-packages "$folder" || true; \
    done

# hadolint ignore=DL3006
FROM ${BASE}
LABEL org.opencontainers.image.title="modelyard" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/modelyard/bin:$PATH \
    HOME=/tmp \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MODELYARD_HOST=:: \
    MODELYARD_MODEL_STORE=/models \
    MODELYARD_STATE_DIR=/state
COPY --from=build /torch /opt/modelyard/lib/python3.11/site-packages
COPY --from=build /opt/modelyard /opt/modelyard
COPY --from=build /own /opt/modelyard/lib/python3.11/site-packages
COPY deploy/bin /opt/modelyard/bin
# Any user of the group 0 may keep state, as one that OpenShift draws.
RUN mkdir -p /models /state && chown 1000:0 /state && chmod 775 /state
USER 1000:0
WORKDIR /tmp
VOLUME /state
EXPOSE 8080 8081 8082
STOPSIGNAL SIGTERM
# Where the server says that it listens: by whatever port, and by TLS, whose names it need not have.
HEALTHCHECK --interval=10s --start-period=120s --timeout=3s CMD ["python", "-c", "import json, os, ssl, urllib.request as u; url = json.load(open(os.environ['MODELYARD_STATE_DIR'] + '/server.json'))['inference']; u.build_opener(u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context())).open(url + '/health/ready', timeout=2)"]
ENTRYPOINT ["modelyard"]
CMD ["serve", "start", "--foreground"]
