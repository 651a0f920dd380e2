"""Last words of engines and of Docker, as they were seen, and what they most likely mean."""

from __future__ import annotations

import pytest

from ansible.module_utils.gpt_oss.engine_log import failure, likely_cause  # isort: skip


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
        ("ValueError: No available memory for the cache blocks.", "out_of_memory"),
        ("gpt-oss@0.service: Main process exited, code=exited, status=137/n/a", "out_of_memory"),
        (
            "docker: Error response from daemon: driver failed programming external connectivity on endpoint x: "
            "Bind for 127.0.0.1:8000 failed: port is already allocated.",
            "port_in_use",
        ),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("RuntimeError: Failed to bind socket", "port_in_use"),
        (
            "weights are missing: /srv/x.json is not there. Run playbooks/weights.yml",
            "missing_weights",
        ),
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and "
            "outgoing traffic has been disabled.",
            "missing_weights",
        ),
        (
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            "missing_toolkit",
        ),
        (
            "docker: Error response from daemon: CDI device injection failed: unresolvable CDI devices x",
            "missing_toolkit",
        ),
        ("Error: No such option: --max_batchsize Did you mean --max_batch_size?", "unknown_option"),
        ("cuda_graph_config.enable_paddin\n  Extra inputs are not permitted", "unknown_option"),
        ("vllm serve: error: unrecognized arguments: --gpu-memory", "unknown_option"),
        ("docker: Error response from daemon: No such image: nvcr.io/nvidia/x@sha256:00.", "bad_image"),
        ("exec /usr/bin/trtllm-serve: exec format error", "bad_image"),
        ("[FATAL tini (8)] exec trtllm-serve failed: No such file or directory", "bad_image"),
        ("error setting rlimit type 8: operation not permitted", "limits"),
        ("RuntimeError: CUDA error 802: system not yet initialized", "driver"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("docker: Error response from daemon: cannot assign requested address.", "publish_address"),
        ("The quick brown fox", None),
    ],
)
def test_likely_cause(said: str, cause: str | None) -> None:
    found = likely_cause(f"loading\n{said}\ndone")
    assert (found.name if found else None) == cause


def test_an_ordinary_log_has_no_cause() -> None:
    log = "[I] Set option max_batch_size\nINFO: Uvicorn running on http://0.0.0.0:8000\nKV cache memory 58 GiB"
    assert likely_cause(log) is None


def test_a_failure_shows_the_last_lines_and_what_to_do() -> None:
    report = failure("gpt-oss@0.service", "did not stay up", [f"line {n}" for n in range(40)] + ["CUDA out of memory"])
    assert report["cause"] == "out_of_memory"
    assert report["msg"].startswith("gpt-oss@0.service did not stay up. Likely cause: memory ran out")
    assert "serving_set" in report["msg"]
    assert "  line 39\n  CUDA out of memory" in report["msg"]
    assert "line 10\n" not in report["msg"]
