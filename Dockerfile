# Ropewalk as an image: `make image`, then docs/deploy.md.
#
# BASE_IMAGE needs Python 3.11 or later with venv, and groupadd and useradd. A GPU needs no other
# base: torch's own wheels bring CUDA's libraries, the host brings the driver. TORCH_INDEX, when
# set, is one more wheel index to look in (for instance one that carries CPU builds of torch).
ARG BASE_IMAGE=python:3.11-slim-bookworm

# The wheel, from the sources.
FROM ${BASE_IMAGE} AS wheel
# What `ropewalk --version` tells; the builder is given no clone.
ARG SOURCE_COMMIT=
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ropewalk.py ./
COPY rope/ rope/
COPY model_runtime/ model_runtime/
COPY server/ server/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip wheel --no-deps --wheel-dir /dist .

# The environment. What is installed before the wheel changes only when a dependency does, so a
# change of our own code does not fetch torch again.
FROM ${BASE_IMAGE} AS environment
ARG TORCH_INDEX=
# Extras of pyproject.toml, with commas between them: `ray` for --replicas.
ARG EXTRAS=
WORKDIR /src
COPY pyproject.toml requirements.lock ./
RUN EXTRAS=${EXTRAS} python3 -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; names = filter(None, os.environ['EXTRAS'].split(',')); print(*project['dependencies'], *(each for name in names for each in project['optional-dependencies'][name]), sep='\n')" > dependencies.txt
RUN python3 -m venv /opt/ropewalk \
    && /opt/ropewalk/bin/pip install --no-cache-dir \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint requirements.lock --requirement dependencies.txt
COPY --from=wheel /dist/ /dist/
RUN /opt/ropewalk/bin/pip install --no-cache-dir --no-index --no-deps /dist/*.whl \
    && /opt/ropewalk/bin/pip check

# The shipped image: the environment and a user. The user may write to its home and to /models only.
FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 ropewalk \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/ropewalk ropewalk
RUN mkdir -p /models /home/ropewalk/.cache/numba
RUN chown -R 10001:10001 /models /home/ropewalk
COPY --from=environment /opt/ropewalk/ /opt/ropewalk/
# Downloads from the hub go to the volume, so they outlive the container. The CPU kernel is compiled
# at first start and kept in NUMBA_CACHE_DIR: the environment itself is not writable.
ENV PATH=/opt/ropewalk/bin:$PATH \
    HOME=/home/ropewalk \
    HF_HOME=/models/hub \
    NUMBA_CACHE_DIR=/home/ropewalk/.cache/numba \
    PYTHONUNBUFFERED=1 \
    ROPEWALK_HOST=0.0.0.0 \
    ROPEWALK_PORT=8000
USER 10001:10001
WORKDIR /home/ropewalk
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# A large model takes minutes to load, a hub id longer.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["python", "-c", "import http.client, os, sys; server = http.client.HTTPConnection('127.0.0.1', int(os.environ['ROPEWALK_PORT']), timeout=4); server.request('GET', '/health'); sys.exit(server.getresponse().status != 200)"]
ENTRYPOINT ["ropewalk"]
CMD ["serve"]
