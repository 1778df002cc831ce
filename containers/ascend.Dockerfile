# evener on Huawei Ascend. The base has CANN and a Python with torch's CPU wheel and torch_npu:
#   docker build -f containers/ascend.Dockerfile --build-arg BASE=quay.io/ascend/vllm-ascend:latest -t evener-ascend .
# Run it with every NPU that the process may use, their managers and the driver:
#   docker run --rm -it --shm-size=16g -p 8000:8000 \
#     --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#     -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro \
#     -v /data/models:/models:ro evener-ascend \
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
        "evener[serve]" evener-backend-ascend \
    && rm -rf /wheels

ENV HCCL_OP_EXPANSION_MODE=AIV \
    PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
EXPOSE 8000
ENTRYPOINT ["evener"]
CMD ["doctor"]
