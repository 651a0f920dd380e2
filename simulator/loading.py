"""From a command line to a loaded model: the port, the GPUs, shared memory, the weights; then the wait, or the fault.

Errors are the engine's own exceptions and messages wherever they were known; Python prints them as the engine's does.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from simulator.engine import Engine
from simulator.settings import Settings

DOCKER_DEFAULT_SHM = 64 * 1024 * 1024
ENCODINGS = ("o200k_base.tiktoken", "cl100k_base.tiktoken")
HARMONY_ERROR = "error downloading or loading vocab file: failed to download or load vocab file"


class SafetensorError(Exception):
    """As the safetensors library calls it."""


class HarmonyError(RuntimeError):
    """As the openai_harmony library calls it."""


class OutOfMemoryError(RuntimeError):
    """As PyTorch calls it."""


def bind(engine: Engine) -> socket.socket:
    """Take the port without listening: until the model is loaded, a connection is refused."""
    family = socket.AF_INET6 if ":" in engine.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    if engine.kind == "vllm":  # TensorRT-LLM does not: even a port that is only bound is taken
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((engine.host, engine.port))
    except OSError as error:
        server.close()
        if engine.kind == "tensorrt_llm":
            raise RuntimeError(f"Failed to bind socket to {engine.host}:{engine.port}: {error}") from error
        raise OSError(error.errno or errno.EADDRINUSE, os.strerror(error.errno or errno.EADDRINUSE)) from error
    return server


def visible_gpus() -> int | None:
    """How many GPUs this process was given; None when it was given all of an unknown number."""
    devices = os.environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if devices not in ("", "all", "void", "none"):
        return len([device for device in devices.split(",") if device.strip()])
    if devices == "none":
        return 0
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if nodes:
        return len(nodes)
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return None if devices == "all" else 0


def require_gpus(engine: Engine) -> None:
    """Fail as the engine does with no GPU, or with fewer than its parallel sizes need."""
    have, need = visible_gpus(), engine.world_size
    if have is None or have >= need:
        return
    if engine.kind == "tensorrt_llm":
        if have == 0:
            raise ValueError("No GPU devices found on the node")
        raise RuntimeError(f"Only {have} GPUs are available, but {need} are required.")
    if have == 0:
        raise RuntimeError(
            "Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"
        )
    raise ValueError(
        f"World size ({need}) is larger than the number of available GPUs ({have}) in this node. "
        "If this is intentional and you are using:\n- ray, set '--distributed-executor-backend ray'.\n"
        "- multiprocessing, set '--nnodes' appropriately."
    )


def require_shared_memory(engine: Engine, path: str = "/dev/shm") -> None:  # noqa: S108 - the real one
    """Where the engine would hang without a word, say why: several ranks need more than Docker's default."""
    if engine.world_size == 1 or not Path(path).is_dir():
        return
    size = os.statvfs(path)
    total = size.f_frsize * size.f_blocks
    if total <= DOCKER_DEFAULT_SHM:
        raise RuntimeError(
            f"{path} has {total} bytes: with {engine.world_size} ranks the engine hangs here. "
            "Start the container with --ipc=host or a larger --shm-size"
        )


def find_model(engine: Engine) -> Path:
    """The snapshot to load, from the cache or a directory; never from the network."""
    if Path(engine.model).is_dir():
        return Path(engine.model)
    if engine.model.startswith(("/", ".")):
        raise ValueError(f"Failed to find model directory {engine.model}")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(engine.model, revision=engine.revision, local_files_only=True))


def shards(snapshot: Path) -> list[Path]:
    """Every file of weights that the index names, each checked against its own header."""
    if not (snapshot / "config.json").is_file():
        raise OSError(f"Can't load the configuration of '{snapshot}': it has no file named config.json")
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({snapshot / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(snapshot.glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"Cannot find any model weights with `{snapshot}`")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"No such file or directory: {file}")
        _require_whole(file)
    return files


def _require_whole(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise SafetensorError(f"Error while deserializing header: invalid header length: {file}")
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            raise SafetensorError(f"Error while deserializing header: invalid JSON in header: {file}") from None
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if end != size - 8 - length:
        raise SafetensorError(f"Error while deserializing header: incomplete metadata, file not fully covered: {file}")


def encodings_present() -> bool:
    """Harmony finds its vocabularies; without them it would ask the internet."""
    base = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    return bool(base) and all((Path(base or "") / name).is_file() for name in ENCODINGS)


def prepare(engine: Engine) -> list[Path]:
    """Everything that can be known before the wait. Returns the files to load."""
    require_gpus(engine)
    require_shared_memory(engine)
    return shards(find_model(engine))


def load(engine: Engine, files: list[Path], settings: Settings, still_well: Callable[[], None]) -> None:
    """Take as long as asked, telling how far it is; or fail as asked. `still_well` raises when Dynamo has ended."""
    deadline = time.monotonic() + settings.load_seconds
    began = time.monotonic()
    size = sum(file.stat().st_size for file in files) / 2**30
    if engine.kind == "tensorrt_llm":
        engine.log(f"Use {size:.2f} GB for model weights.")
    else:
        engine.log(f"Starting to load model {engine.model}...")
    step = settings.load_seconds / len(files)
    bar = (
        "weights in parallel: {}% {}/{}"
        if engine.kind == "tensorrt_llm"
        else "checkpoint shards: {}% Completed | {}/{}"
    )
    for number in range(1, len(files) + 1):
        _wait_until(deadline - (len(files) - number) * step, still_well)
        if number > len(files) // 2:
            _fail(engine, settings)
        print("Loading safetensors " + bar.format(100 * number // len(files), number, len(files)), flush=True)
    _tell_the_end(engine, size, time.monotonic() - began)


def _tell_the_end(engine: Engine, size: float, seconds: float) -> None:
    """What the engines say once the weights are on the GPUs; the rest takes no time here. `size` is in GiB."""
    if engine.kind == "tensorrt_llm":
        print(f"Model init total -- {seconds:.2f}s", flush=True)
        engine.log("Creating CUDA graph instances for 1 batch sizes.")
        return
    engine.log(f"Loading weights took {seconds:.2f} seconds")
    engine.log(f"Model loading took {size:.2f} GiB memory and {seconds:.6f} seconds")
    engine.log("Graph capturing finished in 0 secs, took 0.00 GiB")


def _wait_until(deadline: float, still_well: Callable[[], None]) -> None:
    while (left := deadline - time.monotonic()) > 0:
        still_well()
        time.sleep(min(left, 0.5))


def _fail(engine: Engine, settings: Settings) -> None:
    match settings.fail:
        case "out_of_memory":
            problem = (
                "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
                "of which 1.21 GiB is free."
            )
            if engine.kind == "tensorrt_llm":
                raise OutOfMemoryError(problem)
            print(f"(EngineCore pid={os.getpid()}) ERROR torch.OutOfMemoryError: {problem}", file=sys.stderr)
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        case "crash":
            raise RuntimeError("Executor worker returned error: the simulator was asked to crash while loading")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            engine.log("Waiting for the other ranks (simulated hang)")
            while True:
                signal.pause()
        case _:
            pass
