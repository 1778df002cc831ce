# evener on Hygon DCU. The base is Hygon's image with DTK, torch and Triton:
#   docker build -f containers/hygon.Dockerfile --build-arg BASE=IMAGE -t evener-hygon .
# Run it with the cards' devices:
#   docker run --rm -it --shm-size=16g -p 8000:8000 \
#     --device=/dev/kfd --device=/dev/mkfd --device=/dev/dri --group-add video --ipc=host \
#     --cap-add=SYS_PTRACE --security-opt seccomp=unconfined --ulimit stack=-1:-1 --ulimit memlock=-1:-1 \
#     -v /opt/hyhal:/opt/hyhal:ro -v /data/models:/models:ro evener-hygon \
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
        "evener[serve]" evener-backend-hygon \
    && python3 -m pip install --no-cache-dir --no-deps --find-links /wheels evener-kernels-triton \
    && rm -rf /wheels

ENV HSA_FORCE_FINE_GRAIN_PCIE=1
EXPOSE 8000
ENTRYPOINT ["evener"]
CMD ["doctor"]
