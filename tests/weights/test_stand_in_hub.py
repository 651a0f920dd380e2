"""The stand-in hub against the real client: what tests rest on."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from serving_catalog.loading import load_catalog
from tests.stand_ins.hub import content, overlay

from .conftest import MODEL, ROOT, TOKEN, RunningHub


def api(hub: RunningHub, token: str | None = None) -> HfApi:
    return HfApi(endpoint=hub.url, token=token or False)


def test_the_client_downloads_and_verifies_it(hub: RunningHub, tmp_path: Path) -> None:
    found = snapshot_download(MODEL, endpoint=hub.url, cache_dir=tmp_path, token=False)
    assert {str(p.relative_to(found)) for p in Path(found).rglob("*") if p.is_file()} == set(hub.repository.by_path)
    verified = api(hub).verify_repo_checksums(MODEL, cache_dir=tmp_path)
    assert verified.checked_count == len(hub.repository.files)
    assert not verified.mismatches


def test_tree_listing_in_pages(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.state, "page_size", 3)
    listed = list(api(hub).list_repo_tree(MODEL, recursive=True, revision=hub.repository.revision))
    files = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
    assert set(files) == set(hub.repository.by_path)
    shard = files["model-00000-of-00002.safetensors"]
    assert shard.lfs is not None
    assert shard.lfs.sha256 == hub.repository.by_path[shard.path].sha256
    assert [e.path for e in api(hub).list_repo_tree(MODEL, "metal")] == ["metal/model.bin"]


def test_it_refuses_as_the_hub_does(hub: RunningHub, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        api(hub).model_info("openai/none")
    with pytest.raises(RevisionNotFoundError):
        api(hub).model_info(MODEL, revision="0" * 40)
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(MODEL, "none.bin", endpoint=hub.url, cache_dir=tmp_path, token=False)
    hub.state.gated.add(MODEL)
    with pytest.raises(GatedRepoError):
        hf_hub_download(MODEL, "config.json", endpoint=hub.url, cache_dir=tmp_path, token=False)
    hub.state.tokens["hf_other"] = []
    with pytest.raises(HfHubHTTPError, match="401"):
        api(hub, TOKEN).model_info(MODEL)


def test_faults_are_set_and_reset_over_http(hub: RunningHub) -> None:
    def control(method: str, body: dict[str, object] | None = None) -> dict[str, object]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{hub.url}/control", data=data, method=method)
        with urllib.request.urlopen(request) as answer:
            result: dict[str, object] = json.load(answer)
            return result

    control("POST", {"faults": [{"kind": "status", "match": "/api/*", "status": 500}]})
    with pytest.raises(HfHubHTTPError, match="500"):
        api(hub).model_info(MODEL)
    api(hub).model_info(MODEL)
    assert len(control("GET")["requests"]) == 2  # type: ignore[arg-type]
    control("DELETE")
    assert control("GET")["requests"] == []
    with pytest.raises(urllib.error.HTTPError, match="400"):
        control("POST", {"faults": [{"kind": "explode"}]})


def test_simulated_engines_answer_in_words() -> None:
    vocabulary = content.tokenizer()["model"]["vocab"]  # type: ignore[index]
    by_id = {number: token for token, number in vocabulary.items()}
    assert sorted(by_id) == list(range(len(by_id)))
    assert all(by_id[number].startswith("Ġ") and by_id[number][1:].isalpha() for number in range(1000, 2001))


def test_safetensors_are_valid() -> None:
    body = content.safetensors({"a": 10, "b": 30}, "seed")
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    assert header["b"]["data_offsets"] == [10, 40]
    assert len(body) == 8 + length + 40
    assert length % 8 == 0


def test_the_overlay_that_is_kept_is_the_current_one(tmp_path: Path) -> None:
    overlay.write(tmp_path)
    kept = ROOT / "tests" / "stand_ins" / "hub" / "catalog_overlay"
    for file in ("models.yml", "encodings.yml"):
        assert (kept / file).read_text() == (tmp_path / file).read_text(), "run the command in its first line"
    catalog = load_catalog(kept)
    entry = content.repositories()[MODEL]
    assert catalog.models["gpt-oss-120b"].revision == entry.revision
    assert catalog.models["gpt-oss-120b"].size_bytes == entry.served_bytes()


def test_it_needs_nothing_but_python(tmp_path: Path) -> None:
    command = ["/usr/bin/python3", "-S", "-m", "tests.stand_ins.hub", "cache", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()) / "config.json").is_file()
