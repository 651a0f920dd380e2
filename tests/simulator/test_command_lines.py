"""What the engines' command lines and options files accept and refuse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from serving_catalog import PlanError, Process, ServeRequest, load_catalog, plan_host
from simulator.commands import trtllm_serve, vllm
from simulator.engine import Engine, schema_of
from tests.simulator.conftest import MODEL

CATALOG = load_catalog()


def engine_of(
    release: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, gpus: str = "0,1,2,3,4,5,6,7"
) -> Engine:
    """The engine that a command line describes; the words are those after the command's name."""
    kind, _, version = release.partition("-")
    monkeypatch.setenv("SIMULATOR_RELEASE", version)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", gpus)
    if kind == "vllm":
        assert words[0] == "serve"
        return vllm.engine_from(schema_of("vllm"), list(words[1:]))
    made: list[Engine] = []

    def run(engine: Engine) -> int:
        made.append(engine)
        return 0

    monkeypatch.setattr(trtllm_serve, "run", run)
    with pytest.raises(SystemExit) as ended:
        trtllm_serve.command(schema_of("tensorrt_llm")).main(list(words), standalone_mode=False)
    assert ended.value.code == 0
    return made[0]


def targets() -> list[tuple[str, str, Process]]:
    """Every process of every target, for every release."""
    found = []
    for engine, entry in CATALOG.engines.items():
        for release, profile, gpu, count in itertools.product(
            entry.releases, ("low_latency", "max_throughput", "max_throughput_replicated"), CATALOG.gpus, (1, 2, 4, 8)
        ):
            request = ServeRequest(engine=engine, profile=profile, gpu=gpu, gpu_count=count, release=release)
            try:
                plan = plan_host(request, CATALOG)
            except PlanError:
                continue
            found.append((f"{engine}-{release}", f"{release}/{profile}/{count}x{gpu}", plan.processes[-1]))
    return found


@pytest.mark.parametrize(("release", "process"), [pytest.param(r, p, id=f"{r}-{name}") for r, name, p in targets()])
def test_every_target_of_the_catalog_is_taken(
    release: str, process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / process.options_file_name).write_text(yaml.safe_dump(dict(process.options_file)))
    name = "vllm" if release.startswith("vllm") else "trtllm-serve"
    engine = engine_of(release, process.argv[process.argv.index(name) + 1 :], monkeypatch)
    assert engine.world_size == len(process.gpus)
    assert engine.served_names == (process.served_model_id,)
    assert engine.port == process.container_port


def test_there_are_targets_to_take() -> None:
    assert len({name for _, name, _ in targets()}) >= 64


REFUSED_TRTLLM: dict[str, tuple[list[str], dict[str, Any] | None, str]] = {
    "unknown option": (["--foo"], None, "No such option '--foo'"),
    "option that never was": (["--moe_backend", "TRITON"], None, "No such option '--moe_backend'"),
    "wrong type": (["--tp_size", "four"], None, "'four' is not a valid integer"),
    "wrong choice": (["--backend", "torch"], None, "'torch' is not one of"),
    "unknown key": ([], {"enable_mixed_sampler": True}, "enable_mixed_sampler\n  Extra inputs are not permitted"),
    "unknown key below": (
        [],
        {"cuda_graph_config": {"enable_paddin": True}},
        "cuda_graph_config.enable_paddin\n  Extra inputs are not permitted",
    ),
    "wrong enum": (
        [],
        {"moe_config": {"backend": "TRTLMM"}},
        "moe_config.backend\n  Input should be 'AUTO', 'CUTLASS'",
    ),
    "too large": (
        [],
        {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}},
        "free_gpu_memory_fraction\n  Input should be less than or equal to 1",
    ),
    "too large on the command line": (
        ["--free_gpu_memory_fraction", "1.5"],
        None,
        "free_gpu_memory_fraction\n  Input should be less than or equal to 1",
    ),
    "too small": ([], {"stream_interval": 0}, "stream_interval\n  Input should be greater than 0"),
    "wrong type in the file": (
        [],
        {"tensor_parallel_size": "eight"},
        "tensor_parallel_size\n  Input should be a valid int",
    ),
    "graph sizes disagree": (
        [],
        {"cuda_graph_config": {"batch_sizes": [1, 8], "max_batch_size": 16}},
        "batch_sizes and max_batch_size disagree",
    ),
}


@pytest.mark.parametrize(("words", "options", "said"), REFUSED_TRTLLM.values(), ids=REFUSED_TRTLLM)
def test_trtllm_serve_refuses(
    words: list[str], options: dict[str, Any] | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options is not None:
        (tmp_path / "options.yaml").write_text(yaml.safe_dump(options))
        words = [*words, "--config", str(tmp_path / "options.yaml")]
    with pytest.raises((click.ClickException, ValueError)) as refused:
        engine_of("tensorrt_llm-1.2.1", [MODEL, *words], monkeypatch)
    error = refused.value
    assert said in (error.format_message() if isinstance(error, click.ClickException) else str(error))


def test_trtllm_serve_takes_the_guides_file_only_where_the_guides_image_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "low_latency.yaml").write_text("enable_mixed_sampler: true\n")
    words = [MODEL, "--extra_llm_api_options", str(tmp_path / "low_latency.yaml")]
    assert engine_of("tensorrt_llm-gpt-oss-dev", words, monkeypatch).release == "gpt-oss-dev"
    with pytest.raises(ValueError, match="enable_mixed_sampler"):
        engine_of("tensorrt_llm-1.2.1", words, monkeypatch)
    with pytest.raises(click.NoSuchOption):
        engine_of("tensorrt_llm-gpt-oss-dev", [MODEL, "--config", str(tmp_path / "low_latency.yaml")], monkeypatch)


def test_trtllm_serve_joins_file_and_command_line_as_the_release_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "options.yaml").write_text("max_batch_size: 64\nkv_cache_config: {dtype: fp8}\n")
    words = [MODEL, "--max_batch_size", "8", "--tp_size", "2", "--config", str(tmp_path / "options.yaml")]
    engine = engine_of("tensorrt_llm-1.2.1", words, monkeypatch)
    assert (engine.max_batch_size, engine.world_size) == (64, 2)


def test_trtllm_serve_names_a_directory_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    assert engine_of("tensorrt_llm-1.2.1", [str(tmp_path / "my-model")], monkeypatch).served_names == ("my-model",)


@pytest.mark.parametrize(
    ("content", "error"), [("- a\n", TypeError), ("a: [\n", yaml.YAMLError), (None, FileNotFoundError)]
)
def test_trtllm_serve_wants_a_mapping(
    content: str | None, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error):
        engine_of("tensorrt_llm-1.2.1", [MODEL, "--config", str(path)], monkeypatch)


REFUSED_VLLM: dict[str, tuple[str, list[str], dict[str, Any] | None, str]] = {
    "unknown option": ("0.31.0", ["--foo"], None, "unrecognized arguments: --foo"),
    "abbreviated option": ("0.31.0", ["--tensor-par", "2"], None, "unrecognized arguments: --tensor-par 2"),
    "wrong type": ("0.31.0", ["--tensor-parallel-size", "x"], None, "invalid int value: 'x'"),
    "wrong choice": ("0.31.0", ["--moe-backend", "TRITON"], None, "invalid choice: 'TRITON' (choose from"),
    "unknown key": ("0.31.0", [], {"stream-intervall": 2}, "unrecognized arguments: --stream-intervall 2"),
    "wrong choice in the file": ("0.31.0", [], {"kv-cache-dtype": "fp7"}, "invalid choice: 'fp7'"),
    "gone since 0.22": ("0.31.0", ["--max-num-partial-prefills", "2"], None, "unrecognized arguments"),
    "newer than 0.22": ("0.22.0", ["--watermark", "0.1"], None, "unrecognized arguments"),
}


@pytest.mark.parametrize(("release", "words", "options", "said"), REFUSED_VLLM.values(), ids=REFUSED_VLLM)
def test_vllm_refuses(
    release: str,
    words: list[str],
    options: dict[str, Any] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if options is not None:
        (tmp_path / "options.yaml").write_text(yaml.safe_dump(options))
        words = [*words, "--config", str(tmp_path / "options.yaml")]
    with pytest.raises(SystemExit) as ended:
        engine_of(f"vllm-{release}", ["serve", MODEL, *words], monkeypatch)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (
            ["--gpu-memory-utilization", "1.5"],
            ValueError,
            "gpu-memory-utilization\n  Input should be less than or equal to 1",
        ),
        (
            ["--tensor-parallel-size", "0"],
            ValueError,
            "tensor-parallel-size\n  Input should be greater than or equal to 1",
        ),
        (["--model", MODEL], ValueError, "provide the model as a positional argument"),
        (["--config", "a.json"], ValueError, "Config file must be of a yaml/yml type"),
        (["--config", "a.yaml", "--config", "b.yaml"], AssertionError, "More than one config file"),
        (["--config", "absent.yaml"], FileNotFoundError, "absent.yaml"),
    ],
)
def test_vllm_refuses_values(
    words: list[str], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as refused:
        engine_of("vllm-0.31.0", ["serve", MODEL, *words], monkeypatch)
    assert said in str(refused.value)


def test_vllm_lets_the_command_line_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "o.yaml").write_text("max-num-seqs: 8\ntensor-parallel-size: 2\nenable-auto-tool-choice: true\n")
    words = ["serve", MODEL, "--config", str(tmp_path / "o.yaml"), "--max_num_seqs", "16"]
    engine = engine_of("vllm-0.31.0", words, monkeypatch)
    assert (engine.max_batch_size, engine.world_size) == (16, 2)


@pytest.mark.parametrize(
    ("text", "length"), [("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("auto", 131072), ("4096", 4096)]
)
def test_vllm_reads_sizes_as_people_write_them(text: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_of("vllm-0.31.0", ["serve", MODEL, "--max-model-len", text], monkeypatch).max_seq_len == length
