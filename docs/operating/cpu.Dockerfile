FROM python:3.12-slim
# The compiler makes the CPU's kernels once, for the processor that runs the container.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu /src && useradd --create-home minisgl
USER minisgl
ENV MINISGL_CACHE=/home/minisgl/cache
EXPOSE 8000
ENTRYPOINT ["minisgl", "--host", "0.0.0.0", "--port", "8000"]
