# docker run --gpus all: with --tp, NCCL needs shared memory too: --shm-size 8g.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv python3-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/minisgl && /opt/minisgl/bin/pip install --no-cache-dir "/src[cuda]" && useradd --create-home minisgl
USER minisgl
ENV MINISGL_CACHE=/home/minisgl/cache
EXPOSE 8000
ENTRYPOINT ["/opt/minisgl/bin/minisgl", "--host", "0.0.0.0", "--port", "8000"]
