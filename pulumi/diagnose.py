"""Why a deployment is not Ready: one verdict about a namespace, in the form of docs/verdict.md.

    python pulumi/diagnose.py --kubeconfig ~/.kube/config --context gb200 --namespace gpt-oss [--name gpt-oss-agg]

Reads only. The exit status is 0 when nothing is found, 1 when something is, 2 when it was called wrongly.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

import cluster
from serving_catalog.checks import Check, Verdict, judged, summary, table
from serving_catalog.checks.cluster import Snapshot, name_of
from serving_catalog.checks.cluster_diagnosis import diagnose_namespace
from serving_catalog.checks.cluster_pods import NamespaceSettings

LOAD_WITHIN_SECONDS = NamespaceSettings().load_within_seconds
SHOWN = 8  # findings that the program prints when a wait runs out; all of them are in the verdict


def verdict_of(kubeconfig: Path | str, context: str, namespace: str, settings: NamespaceSettings) -> Verdict:
    """Look once, and judge."""
    reads = cluster.Reads(kinds=cluster.DIAGNOSIS, graph=settings.name, refer=True)
    seen = cluster.snapshot(kubeconfig, context, namespace, reads)
    return judged(namespace, seen.at, _request(seen, settings), diagnose_namespace(seen, settings), "namespace")


def _request(seen: Snapshot, settings: NamespaceSettings) -> dict[str, JsonValue]:
    """What was asked to be served there, as far as the objects themselves say it."""
    there = [name_of(entry) for entry in seen.all("DynamoGraphDeployment")]
    return {
        "context": seen.context,
        "server": seen.server,
        "namespace": seen.namespace,
        "graphs": [settings.name] if settings.name is not None else [*there],
    }


def explain(
    kubeconfig: Path | str,
    context: str,
    namespace: str,
    name: str | None = None,
    load_within_seconds: int = LOAD_WITHIN_SECONDS,
) -> str:
    """The findings, short, for whoever waited in vain. Never raises: it runs where something has failed already."""
    try:
        settings = NamespaceSettings(name=name, load_within_seconds=load_within_seconds)
        verdict = verdict_of(kubeconfig, context, namespace, settings)
    except Exception as error:
        return f"{namespace} could not be diagnosed: {type(error).__name__}: {error}"
    return short(verdict, _command(kubeconfig, context, namespace, settings))


def short(verdict: Verdict, command: str = "") -> str:
    """Findings alone, each cause once and what follows from others last; then how to see everything."""
    told = " ".join(found.seen for found in verdict.findings if found.id.startswith("graph."))
    # What the graph's own finding gives as its cause need not be said again by the pod.
    findings = [found for found in verdict.findings if not (found.id.startswith("pod.") and found.seen in told)]
    findings.sort(key=lambda found: found.id.startswith(("graph.", "endpoint.", "workers.")))
    alike: dict[tuple[str, str], list[Check]] = {}
    for found in findings:
        alike.setdefault((found.seen, found.remedy), []).append(found)
    lines = [f"{verdict.name}: {summary(verdict.checks)}"]
    for group in list(alike.values())[:SHOWN]:
        lines += _told(", ".join(found.id for found in group), group[0])
    if len(alike) > SHOWN:
        lines.append(f"and {len(alike) - SHOWN} more")
    waiting = [found for found in verdict.checks if found.ok is None and found.id.startswith(("pod.", "job."))]
    lines += [line for found in waiting[:SHOWN] for line in _told(found.id, found)]
    if command:
        lines.append(f"Everything: {command}")
    return "\n".join(lines)


def _told(subject: str, found: Check) -> list[str]:
    def wrapped(text: str, first: str) -> list[str]:
        return textwrap.wrap(
            text, 116, initial_indent=first, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )

    return [*wrapped(f"{subject}: {found.seen}", "* "), *wrapped(found.remedy, "  > ")]


def _command(kubeconfig: Path | str, context: str, namespace: str, settings: NamespaceSettings) -> str:
    words = ["python diagnose.py", f"--kubeconfig {kubeconfig} --context {context} --namespace {namespace}"]
    words += [f"--name {settings.name}"] if settings.name else []
    limit = settings.load_within_seconds
    words += [f"--load-within {limit}"] if limit != LOAD_WITHIN_SECONDS else []
    return " ".join(words)


def write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kubeconfig", required=True, help="path of the kubeconfig file; the ambient one is not used")
    parser.add_argument("--context", required=True, help="context in it; the current one is not used")
    parser.add_argument("--namespace", required=True, help="namespace of the deployment")
    parser.add_argument("--name", help="the deployment alone, where a namespace has several")
    parser.add_argument(
        "--load-within", type=int, default=LOAD_WITHIN_SECONDS, metavar="SECONDS", help="longest load still normal"
    )
    parser.add_argument("--allow", action="append", default=[], metavar="ID", help="a finding, or pattern, to accept")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the verdict there, as JSON")
    options = parser.parse_args(arguments)
    if options.load_within < 1:
        parser.error(f"--load-within: {options.load_within} is not allowed; allowed: 1 or more seconds")
    settings = NamespaceSettings(
        name=options.name, load_within_seconds=options.load_within, allow_findings=tuple(options.allow)
    )
    verdict = verdict_of(options.kubeconfig, options.context, options.namespace, settings)
    content = verdict.model_dump_json(indent=2) + "\n"
    if options.output is not None:
        try:
            write(options.output, content)
        except OSError as error:
            parser.error(f"--output: {options.output}: {error.strerror}; allowed: a file that you can write")
    if options.format == "json":
        sys.stdout.write(content)
    else:
        width = max(80, min(140, shutil.get_terminal_size((120, 24)).columns))
        sys.stdout.write(f"{table(verdict.checks, width)}\n{summary(verdict.checks)}\n")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
