#!/usr/bin/python
"""One point of a benchmark, or the end of one: on the machine where AIPerf is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark_run
short_description: Measure an endpoint with AIPerf, and draw what came out
description:
  - With O(point) it runs AIPerf once and judges the figures. Without, it writes C(benchmark.json), C(benchmark.csv) and
    C(benchmark.png) from O(results). Either way the files come back.
  - The action plugin of the same name takes O(shapes), calls it for every point, tells the figures as they come, and
    puts the files into O(results_directory) on the controller.
  - Nothing but O(directory) changes. In check mode nothing is measured.
options:
  aiperf: {type: path, required: true, description: The program, in its virtual environment.}
  urls: {type: list, elements: str, required: true, description: The endpoints; requests take turns.}
  model: {type: str, required: true, description: As C(/v1/models) lists it.}
  tokenizer: {type: str, required: true, description: A repository of the Hugging Face Hub.}
  tokenizer_cache: {type: str, default: "", description: A Hugging Face cache that has it; nothing is downloaded then.}
  timeout_seconds: {type: float, default: 3600, description: What one point may take.}
  directory: {type: path, required: true, description: Where AIPerf writes.}
  point: {type: dict, description: A C(shape) and a C(concurrency).}
  results: {type: list, elements: dict, default: [], description: What the points returned.}
  about: {type: dict, default: {}, description: Told in the results and the picture.}
  api_key: {type: str, default: "", description: Bearer token of the endpoints. AIPerf gets it by environment.}
  shapes: {type: list, elements: dict, default: [], description: Traffic to measure. The action plugin reads it.}
  concurrency:
    description: Instead of the shapes' own. The action plugin reads it.
    type: list
    elements: int
    default: []
  results_directory: {type: str, default: results, description: On the controller. The action plugin reads it.}
  fail: {type: bool, default: true, description: Whether a failed point fails the task. The action plugin reads it.}
attributes:
  check_mode: {support: full, description: Measures nothing.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Measure
  benchmark_run:
    aiperf: /opt/gpt-oss/venvs/aiperf/bin/aiperf
    urls: [http://127.0.0.1:8000]
    model: openai/gpt-oss-120b
    tokenizer: openai/gpt-oss-120b
    tokenizer_cache: /var/lib/gpt-oss/weights
    directory: /var/tmp/gpt-oss-benchmark
    shapes: ["{{ {'name': 'short'} | combine(lookup('serving_catalog', 'traffic.short')) }}"]
"""

RETURN = r"""
result: {description: The figures of a point, returned: with a point, type: dict}
line: {description: The same for a person., returned: with a point, type: str}
summary: {description: What a verdict asks for., returned: without a point, type: dict}
files: {description: Contents in base64 by file name., returned: always, type: dict}
"""

import base64
import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import run_benchmark
from ansible.module_utils.gpt_oss.run_benchmark import Point, Shape, Target


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode("ascii") for name, content in files.items()}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "aiperf": {"type": "path", "required": True},
            "urls": {"type": "list", "elements": "str", "required": True},
            "model": {"type": "str", "required": True},
            "tokenizer": {"type": "str", "required": True},
            "tokenizer_cache": {"type": "str", "default": ""},
            "timeout_seconds": {"type": "float", "default": 3600},
            "directory": {"type": "path", "required": True},
            "point": {"type": "dict"},
            "results": {"type": "list", "elements": "dict", "default": []},
            "about": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "shapes": {"type": "list", "elements": "dict", "default": []},
            "concurrency": {"type": "list", "elements": "int", "default": []},
            "results_directory": {"type": "str", "default": "results"},
            "fail": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="nothing is measured in check mode")
    target = Target(
        aiperf=given["aiperf"],
        urls=given["urls"],
        model=given["model"],
        tokenizer=given["tokenizer"],
        tokenizer_cache=given["tokenizer_cache"],
        timeout_seconds=given["timeout_seconds"],
    )
    if given["api_key"]:
        os.environ["OPENAI_API_KEY"] = given["api_key"]
    directory = Path(given["directory"])
    if given["point"]:
        try:
            point = Point(Shape.from_entry(given["point"]["shape"]), int(given["point"]["concurrency"]))
        except (KeyError, TypeError, ValueError) as error:
            module.fail_json(msg=f"point: {error}; a shape needs {', '.join(Shape._fields)}")
        where = directory / point.name
        result = run_benchmark.run_point(point, target, where)
        files = run_benchmark.collect(where, run_benchmark.EXPORTS)
        module.exit_json(changed=False, result=result, line=run_benchmark.line(result), files=encoded(files))
    run_benchmark.write_results(directory, target, given["about"], given["results"])
    drawing = run_benchmark.draw_with(given["aiperf"], directory)
    files = run_benchmark.collect(directory, ("benchmark.json", "benchmark.csv", "benchmark.png"))
    summary = run_benchmark.summary(given["results"])
    module.exit_json(changed=False, summary=summary, drawing=drawing, files=encoded(files))


if __name__ == "__main__":
    main()
