"""The stand-in engine: TensorRT-LLM's and vLLM's command lines in front of the real Dynamo frontend and mocker.

`trtllm-serve`, `mpirun` and `vllm` here take what the engines take and refuse what they refuse (the tables are those
of serving_catalog), look for the GPUs and the weights they were promised, take a while to load, then answer on the
engine's endpoints. What answers is Dynamo's mocker: the right number of tokens at a plausible pace, without any sense.

    python -m simulator build --output build/engine-images     an archive that `docker load` takes, with every image
    python -m simulator run tensorrt_llm-1.2.1 trtllm-serve …  the same command as a process of this machine
"""
