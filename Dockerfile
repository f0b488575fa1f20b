# aileron's image: docker build --target cpu (or cuda) --tag aileron:0.1.0 .
# Gateways beside GPU cells need no CUDA: docker build --target gateway --tag aileron:0.1.0-gateway .
#
# Versions are those of requirements/*.lock, less the tools of requirements/tools.txt. A base image is
# a tag here; for a build that can be repeated name its digest: --build-arg PYTHON_CPU=python@sha256:…
ARG PYTHON_CPU=python:3.11-slim-bookworm
ARG PYTHON_CUDA=python:3.12-slim-bookworm

# -------------------------------------------------------------------- aileron itself, as a wheel
FROM ${PYTHON_CPU} AS wheel
ARG AILERON_VERSION=0.1.0
# The build sees no repository, so its tag comes as an argument.
ENV SETUPTOOLS_SCM_PRETEND_VERSION_FOR_AILERON_SERVING=$AILERON_VERSION
WORKDIR /src
COPY requirements/cpu.lock requirements/
RUN grep -E '^(editables|hatch-vcs|hatchling|packaging|pathspec|pluggy|setuptools-scm|trove-classifiers|vcs-versioning)==' requirements/cpu.lock > build.lock
RUN pip install --no-cache-dir --require-hashes --no-deps -r build.lock
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY comm_pool/ comm_pool/
COPY coordinator/ coordinator/
COPY gateway/ gateway/
COPY kvadaptor/ kvadaptor/
COPY loadgen/ loadgen/
COPY worker/ worker/
RUN python -m hatchling build --target wheel --directory /dist

# -------------------------------------------------------------------- packages of each target
FROM ${PYTHON_CPU} AS cpu-packages
ARG AILERON_TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/aileron
COPY requirements/cpu.lock requirements/tools.txt requirements/
RUN grep '^[^#]' requirements/tools.txt > tools.txt
RUN grep '^[^#]' requirements/cpu.lock | grep -v -i -E -f tools.txt > image.lock
# torch's CPU build, which the lock file's plain version then is satisfied by; only x86_64 names it,
# and no hash of it is locked.
RUN grep -o '^torch==[^ ]*' image.lock | sed "s/\$/$(test "$(uname -m)" != x86_64 || echo +cpu)/" > torch.lock
RUN /opt/aileron/bin/pip install --no-cache-dir --no-deps --index-url "$AILERON_TORCH_INDEX" -r torch.lock
RUN /opt/aileron/bin/pip install --no-cache-dir --require-hashes --no-deps -r image.lock
COPY --from=wheel /dist/ /dist/
RUN /opt/aileron/bin/pip install --no-cache-dir --no-deps /dist/*.whl

FROM ${PYTHON_CUDA} AS cuda-packages
WORKDIR /src
RUN python -m venv /opt/aileron
COPY requirements/gpu.lock requirements/tools.txt requirements/
RUN grep '^[^#]' requirements/tools.txt > tools.txt
RUN grep '^[^#]' requirements/gpu.lock | grep -v -i -E -f tools.txt > image.lock
RUN /opt/aileron/bin/pip install --no-cache-dir --require-hashes --no-deps -r image.lock
COPY --from=wheel /dist/ /dist/
RUN /opt/aileron/bin/pip install --no-cache-dir --no-deps /dist/*.whl

# -------------------------------------------------------------------- what runs
FROM ${PYTHON_CUDA} AS cuda
# Triton compiles launchers with a C compiler; CUDA's libraries come with the packages, the driver
# from the host.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 aileron && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache aileron
RUN mkdir /cache && chown 10001:10001 /cache
COPY --from=cuda-packages /opt/aileron/ /opt/aileron/
ENV PATH=/opt/aileron/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN ln -s "$(python -c 'from coordinator.cli.launch import DEMO_MODEL; print(DEMO_MODEL)')" /opt/aileron/demo-model
LABEL org.opencontainers.image.title=aileron org.opencontainers.image.version=0.1.0 org.opencontainers.image.licenses=Apache-2.0 org.opencontainers.image.description="OpenAI-compatible LLM serving that changes its parallelism while requests are running."
USER 10001:10001
EXPOSE 8000 8001 8002 8003 8004
ENTRYPOINT ["aileron"]
CMD ["--help"]

FROM ${PYTHON_CPU} AS cpu
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 aileron && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache aileron
RUN mkdir /cache && chown 10001:10001 /cache
COPY --from=cpu-packages /opt/aileron/ /opt/aileron/
ENV PATH=/opt/aileron/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1
RUN ln -s "$(python -c 'from coordinator.cli.launch import DEMO_MODEL; print(DEMO_MODEL)')" /opt/aileron/demo-model
LABEL org.opencontainers.image.title=aileron org.opencontainers.image.version=0.1.0 org.opencontainers.image.licenses=Apache-2.0 org.opencontainers.image.description="OpenAI-compatible LLM serving that changes its parallelism while requests are running."
USER 10001:10001
EXPOSE 8000 8001 8002 8003 8004
ENTRYPOINT ["aileron"]
CMD ["--help"]

# The CPU's packages: vLLM's front end without CUDA's gigabytes. It listens, and computes nothing.
FROM cpu AS gateway
EXPOSE 8000 8003 8004
CMD ["gateway", "--help"]
