"""The engine's image, pulled in the background while the weights come: hub and registry are busy at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_catalog import load_catalog
from serving_catalog.planning import plan_host
from serving_catalog.plans import ServeRequest

from .conftest import ROOT
from .test_plays import Plays


@pytest.fixture
def plays(tmp_path: Path) -> Plays:
    return Plays(tmp_path)


def test_a_pull_that_failed_meanwhile_is_told_by_the_task_that_needs_the_image(plays: Plays, tmp_path: Path) -> None:
    """There is no Docker behind the image's name here, so the pull fails: the play learns it where it matters, once."""
    request = ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4)
    plan: dict[str, Any] = plan_host(request, load_catalog()).model_dump(mode="json")
    plan["image"] = "registry.invalid/nobody/nothing:1"
    variables = {"inference_server_plan": plan, "inference_server_configuration_directory": str(tmp_path / "etc")}
    run = plays.run(
        [
            {
                "name": "Begin",
                "ansible.builtin.include_role": {"name": "inference_server", "tasks_from": tasks},
                "vars": variables,
            }
            for tasks in ("pull", "image")
        ]
    )
    assert run.status != 0
    waited = run.output.index("Image | Wait for the pull that began before the weights")
    failed = run.output.index("Image | Have it from the registry")
    assert waited < failed
    assert "failed=1" in run.output
    assert "ignored=0" in run.output
    assert not (tmp_path / "etc").exists(), "no record of an image that is not there"


def test_only_serve_pulls_and_filling_the_cache_alone_does_not() -> None:
    imports = yaml.safe_load((ROOT / "playbooks/serve.yml").read_text())
    given = next(play for play in imports if play.get("ansible.builtin.import_playbook") == "weights.yml")["vars"]
    path = Path(given["model_weights_meanwhile"].replace("{{ playbook_dir }}", str(ROOT / "playbooks")))
    assert path.is_file()
    assert "model_weights_meanwhile" not in (ROOT / "playbooks/weights.yml").read_text()
