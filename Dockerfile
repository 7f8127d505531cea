# flowrl in a container.
#
#   docker build -t flowrl .                                  # torch with CUDA, and on a CPU, too
#   docker build -t flowrl:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
#   mkdir -p runs                                             # or Docker makes it, as root's
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" -e HOME=/tmp \
#     -v "$PWD/runs:/work/runs" flowrl train quickstart
#
# --user: runs then belong to you, whatever your number is; HOME=/tmp is where that user may write
# caches. Leave --gpus out on a CPU.
#
# NOT BUILT HERE: a test reads its lines and tries the program's first words; no image was made.
FROM python:3.11-slim

# OpenCV's and RapidOCR's wheels need these two.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libglib2.0-0 libgomp1 \
    && rm -rf /var/lib/apt/lists/*

# The packages first: they change less often than the source, and weigh gigabytes.
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir .

# Not as root, and /work is anybody's to write to: --user may name any user.
RUN useradd --create-home --uid 1000 flowrl && mkdir --mode 1777 /work
USER flowrl
WORKDIR /work
ENTRYPOINT ["flowrl"]
CMD ["doctor"]
