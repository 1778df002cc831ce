# evener on Enflame GCU. The base is Enflame's image with TopsRider, torch_gcu and vllm_gcu:
#   docker build -f containers/gcu.Dockerfile --build-arg BASE=IMAGE -t evener-gcu .
# Run it with the cards' devices:
#   docker run --rm -it --shm-size=16g -p 8000:8000 --device=/dev/gcu0 --device=/dev/gcuctl \
#     -v /data/models:/models:ro evener-gcu \
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
        "evener[serve]" evener-backend-gcu \
    && rm -rf /wheels

ENV TORCHGCU_INDUCTOR_ENABLE=0 \
    TORCH_ECCL_AVOID_RECORD_STREAMS=1
EXPOSE 8000
ENTRYPOINT ["evener"]
CMD ["doctor"]
