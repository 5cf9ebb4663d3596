# syntax=docker/dockerfile:1
# Two images from one file: `cpu` (the default) and `cuda`.
#
#   docker build --target cpu --tag weft:cpu .
#   docker build --target cuda --tag weft:cuda .
#
# Dependencies have layers of their own before the source, so a change of the source rebuilds in seconds. Weft runs as
# process 1: it takes the signals of `docker stop` itself and waits for its children, so no init is needed.

ARG PYTHON_IMAGE=python:3.13.11-slim-bookworm

# --- what the images are made with ---------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/weft/bin:$PATH
RUN python -m venv /opt/weft
WORKDIR /build

FROM build AS requirements
COPY pyproject.toml .
# With events,audio,images,ray it runs on Ray, too.
ARG EXTRAS=events,audio,images
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = [line for name in '${EXTRAS:-events,audio,images}'.split(',') for line in project['optional-dependencies'][name]]; \
    print(*project['dependencies'], *extras, sep='\n')" > requirements.txt

FROM build AS wheel
# For the CPU kernels. Debian keeps no old versions, so a pinned one would break the build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE ./
COPY engine engine
COPY server server
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /wheel .

FROM build AS build-cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY --from=requirements /build/requirements.txt .
RUN --mount=type=cache,target=/root/.cache/pip pip install --requirement requirements.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM build AS build-cuda
RUN --mount=type=cache,target=/root/.cache/pip pip install torch==2.13.0
COPY --from=requirements /build/requirements.txt .
RUN --mount=type=cache,target=/root/.cache/pip pip install --requirement requirements.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

# --- what both images run on --------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Weft" \
      org.opencontainers.image.description="OpenAI-compatible inference server" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 1000 --user-group --create-home weft \
    && install --directory --owner weft --group weft /cache
# Inside a container the loopback address would be heard by nobody. What is downloaded or compiled goes to the volume.
ENV PATH=/opt/weft/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    WEFT_HOST=0.0.0.0 \
    WEFT_PORT=8000 \
    XDG_CACHE_HOME=/cache \
    XDG_DATA_HOME=/cache/data \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
WORKDIR /home/weft
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first answer may be minutes away, while weights are downloaded. A port that is set by flag is not seen here.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --start-interval=1s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; s = 's' * ('WEFT_SSL_CERTFILE' in os.environ); r.urlopen(f\"http{s}://127.0.0.1:{os.environ['WEFT_PORT']}/health\", timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["weft"]
CMD ["serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles a launcher for each kernel, which takes a C compiler; Python's headers are in the base image. Debian
# keeps no old versions, so a pinned one would break the build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/weft /opt/weft
USER 1000:1000

FROM runtime AS cpu
COPY --from=build-cpu /opt/weft /opt/weft
USER 1000:1000
