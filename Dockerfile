# Ropewalk as an image: `make image`, then docs/guide/operating.md.
#
# BASE_IMAGE needs Python 3.11 or later with venv and headers, groupadd and useradd, and apt-get or
# gcc. A GPU needs no other base: torch's own wheels bring CUDA's libraries, the host brings the
# driver. Every package is installed by the hashes in locks/. TORCH_INDEX, when set, is the wheel
# index that torch comes from (for instance one that carries CPU builds); TORCH_SHA256 is the hash
# of its wheel there.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# The wheel, from the sources.
FROM ${BASE_IMAGE} AS wheel
WORKDIR /src
COPY locks/build.lock locks/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes --requirement locks/build.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY ropewalk/ ropewalk/
# The commit that `ropewalk --version` tells; the builder is given no clone.
ARG SOURCE_COMMIT=
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

# The environment. Packages installed before the wheel change only when a dependency does, so a
# change of our own code does not fetch torch again.
FROM ${BASE_IMAGE} AS environment
ARG TORCH_INDEX=
ARG TORCH_SHA256=
# Extras of pyproject.toml, with commas between them: `ray` for --replicas, `otel` for --traces,
# `valkey` for --kv-store, `gpu-weights` for quantised weights on a GPU.
ARG EXTRAS=
WORKDIR /src
COPY locks/ locks/
# The pipe splits words, and neither side of it can fail.
# hadolint ignore=DL4006
RUN python3 -m venv /opt/ropewalk \
    && set -- --requirement locks/runtime.lock \
    && for extra in $(echo "$EXTRAS" | tr , ' '); do set -- "$@" --requirement "locks/$extra.lock"; done \
    && if [ -z "$TORCH_INDEX" ]; then set -- "$@" --requirement locks/torch.lock; fi \
    && /opt/ropewalk/bin/pip install --no-cache-dir --require-hashes "$@"
# Another index has another file of torch, so the lock cannot know its hash.
RUN if [ -n "$TORCH_INDEX" ]; then \
        echo "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' locks/torch.lock)${TORCH_SHA256:+ --hash=sha256:$TORCH_SHA256}" > torch.txt \
        && /opt/ropewalk/bin/pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" --requirement torch.txt; \
    fi
COPY --from=wheel /dist/ /dist/
RUN /opt/ropewalk/bin/pip install --no-cache-dir --no-index --no-deps /dist/*.whl \
    && /opt/ropewalk/bin/pip check

# The shipped image: the environment and a user. The user may write to its home and to /models only.
FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 ropewalk \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/ropewalk ropewalk
RUN mkdir -p /models /home/ropewalk/.cache/numba /home/ropewalk/.cache/triton \
    && chown -R 10001:10001 /models /home/ropewalk
# On a GPU, Triton compiles the launcher of its kernels at run time, and looks for gcc or clang. gcc
# is the smaller one (200 MB), and tcc does not know Triton's flags. torch of an index of its own
# comes without Triton. A release of Debian has one gcc, so no version is named.
ARG TORCH_INDEX=
# hadolint ignore=DL3008
RUN if [ -z "$TORCH_INDEX" ] && ! command -v gcc; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=environment /opt/ropewalk/ /opt/ropewalk/
# Downloads from the hub go to the volume, so they outlive the container. The kernels of a CPU are
# compiled at first start and kept in NUMBA_CACHE_DIR, those of a GPU in TRITON_CACHE_DIR: the
# environment itself is not writable.
ENV PATH=/opt/ropewalk/bin:$PATH \
    HOME=/home/ropewalk \
    HF_HOME=/models/hub \
    NUMBA_CACHE_DIR=/home/ropewalk/.cache/numba \
    TRITON_CACHE_DIR=/home/ropewalk/.cache/triton \
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
