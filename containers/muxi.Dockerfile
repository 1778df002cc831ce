# evener on MetaX GPUs. The base is MetaX's image with MACA, torch and Triton:
#   docker build -f containers/muxi.Dockerfile --build-arg BASE=IMAGE -t evener-muxi .
# Run it with the cards' devices:
#   docker run --rm -it --shm-size=100gb -p 8000:8000 \
#     --device=/dev/dri --device=/dev/mxcd --group-add video --privileged=true \
#     --security-opt seccomp=unconfined --security-opt apparmor=unconfined --ulimit memlock=-1 \
#     -v /data/models:/models:ro evener-muxi \
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
        "evener[serve]" evener-backend-muxi \
    && python3 -m pip install --no-cache-dir --no-deps --find-links /wheels evener-kernels-triton \
    && rm -rf /wheels

EXPOSE 8000
ENTRYPOINT ["evener"]
CMD ["doctor"]
