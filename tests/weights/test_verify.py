"""Reading a verified snapshot again: every checksum, several files at once, and nothing changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.weights.conftest import SHARD, Fetcher, RunningHub


def verify(fetcher: Fetcher) -> tuple[int, dict[str, Any], str]:
    done = fetcher.run("verify", "--workers=4")
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def state(fetcher: Fetcher) -> dict[str, tuple[int, int]]:
    found = [path for path in fetcher.directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_a_whole_snapshot_is_whole_and_asks_no_hub(fetcher: Fetcher, hub: RunningHub) -> None:
    fetcher.fetch()
    hub.mend()
    before = state(fetcher)
    status, result, _ = verify(fetcher)
    assert status == 0
    assert result["verified"]
    assert (result["files"], result["bytes"]) == (len(hub.files), hub.size)
    assert result["bytes_per_second"] > 0
    assert hub.requests == []
    assert state(fetcher) == before


@pytest.mark.parametrize("harm", ["bit", "cut", "gone"])
def test_what_names_sizes_and_times_do_not_show_is_found(fetcher: Fetcher, harm: str) -> None:
    fetcher.fetch()
    shard: Path = fetcher.snapshot / SHARD
    content = bytearray(shard.read_bytes())
    if harm == "gone":
        shard.unlink()
    else:
        content[len(content) // 2] ^= 1
        shard.write_bytes(content if harm == "bit" else content[:-1])
    status, result, _ = verify(fetcher)
    assert status == 1
    assert not result["verified"]
    says = {"bit": "its sha256 should be", "cut": f"has {len(content) - 1} bytes", "gone": "No such file"}
    assert len(result["problems"]) == 1
    assert result["problems"][0].startswith(f"{SHARD}: ")
    assert says[harm] in result["problems"][0]


def test_where_nothing_was_verified_there_is_nothing_to_verify(fetcher: Fetcher) -> None:
    status, result, said = verify(fetcher)
    assert status == 1
    assert result == {}
    assert "nothing was verified here" in said
