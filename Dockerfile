# flowrl in a container.
#
#   docker build -t flowrl .                                  # torch with CUDA, and on a CPU, too
#   docker build -t flowrl:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm --gpus all -v "$PWD/runs:/work/runs" flowrl train quickstart
#
# NOT BUILT HERE: its commands are run by a test, the image is not.
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

# Not as root: what is written into a mounted folder belongs to a user.
RUN useradd --create-home --uid 1000 flowrl
USER flowrl
WORKDIR /work
ENTRYPOINT ["flowrl"]
CMD ["doctor"]
