# evener on NVIDIA GPUs. The base is any image with torch 2.11 to 2.13 for CUDA, its Triton and a C compiler, which Triton
# needs at the first start: NVIDIA's PyTorch image, or a "devel" image of PyTorch.
#   docker build -f containers/cuda.Dockerfile --build-arg BASE=IMAGE -t evener-cuda .
# Run it with the GPUs:
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1:-1 -p 8000:8000 \
#     -v /data/models:/models:ro -v evener-cache:/root/.cache/evener evener-cuda \
#     serve /models/Qwen3-8B serve.host=0.0.0.0 serve.port=8000
ARG BASE
FROM ${BASE}

# `make wheels` writes them here; pip takes what else is needed from the index, and never another torch.
COPY dist/ /wheels/
# A container is its own environment: pip may install beside the distribution's packages.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# hadolint ignore=DL3013
RUN python3 -c "import importlib.metadata as m; print(f'torch=={m.version(\"torch\")}')" > /constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /constraints.txt --find-links /wheels \
        "evener[serve]" evener-backend-cuda \
    && rm -rf /wheels

EXPOSE 8000
ENTRYPOINT ["evener"]
CMD ["doctor"]
