"""Checks every input of a host and makes its plan. Runs on the controller alone; no host is touched."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

from serving_catalog import CatalogError, PlanError, load_catalog, overrides_from_mapping, plan_host, request_from
from serving_catalog.checks.inputs import input_problems
from serving_catalog.errors import nearest

PROJECT = Path(__file__).resolve().parents[2]

Options = Mapping[str, Mapping[str, Any]]

# Field of a ServeRequest by the input it comes from.
_REQUEST = {
    "serving_engine": "engine",
    "serving_profile": "profile",
    "serving_gpu": "gpu",
    "serving_gpu_count": "gpu_count",
    "serving_platform": "platform",
    "serving_model": "model",
    "serving_release": "release",
    "serving_port": "port",
}
_TRUE_OR_FALSE = ("true", "false", "yes", "no", "on", "off", "1", "0")
# Facts that a host has only once it was looked at; inputs made of them are checked by the role, when they are known.
_LATER = re.compile(r"ansible_facts|hostvars|groups\b")


# -- what inputs there are ---------------------------------------------------------------------------------------------


@cache
def role_options(project: Path = PROJECT) -> dict[str, Options]:
    """Each role's inputs, from its argument specification."""
    return {
        file.parents[1].name: _options_of(file)
        for file in sorted((project / "roles").glob("*/meta/argument_specs.yml"))
    }


@cache
def fleet_options(project: Path = PROJECT) -> Options:
    return _options_of(project / "playbooks/vars/inputs.yml")


def _options_of(file: Path) -> Options:
    specification = yaml.safe_load(file.read_text(encoding="utf-8"))["argument_specs"]["main"]
    options: Options = specification.get("options") or {}
    return options


@cache
def handed_over(project: Path = PROJECT) -> dict[str, tuple[str, str]]:
    """Inputs that every playbook which uses their role hands over itself: name -> (playbook, expression)."""
    uses: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for file in sorted((project / "playbooks").rglob("*.yml")):
        for role, variables in _role_uses(yaml.safe_load(file.read_text(encoding="utf-8"))):
            uses.setdefault(role, []).append((str(file.relative_to(project)), variables))
    found = {}
    for role, entries in uses.items():
        for name in set.intersection(*(set(variables) for _, variables in entries)):
            if name.startswith(f"{role}_"):
                found[name] = (entries[0][0], str(entries[0][1][name]))
    return found


def _role_uses(node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every use of a role below a playbook's node, with the variables given to it."""
    if isinstance(node, list):
        for item in node:
            yield from _role_uses(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "roles" and isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict):
                    yield str(entry.get("role", entry.get("name"))), entry.get("vars") or {}
                else:
                    yield str(entry), {}
        elif key.rpartition(".")[2] in ("include_role", "import_role") and isinstance(value, dict):
            if value.get("tasks_from", "main") == "main":  # other entry points take other inputs
                yield str(value.get("name")), node.get("vars") or {}
        else:
            yield from _role_uses(value)


# -- checking values ---------------------------------------------------------------------------------------------------


def value_problems(name: str, value: Any, option: Mapping[str, Any]) -> list[str]:
    """What is wrong with a value, one sentence each. Values of secret options are never shown."""
    kind = option.get("type", "str")
    shown = "(hidden)" if option.get("no_log") else repr(value)
    if value is None:
        return [] if not option.get("required") else [f"{name}: is empty; expected {_described(kind)}"]
    wrong = _type_problem(kind, value)
    choices = option.get("choices")
    if wrong is not None:
        among = f" of {', '.join(map(str, choices))}" if kind == "list" and choices else ""
        return [f"{name}: {shown} is {_name_of_type(value)}; expected {_described(kind)}{among}{wrong}"]
    problems = []
    if choices:
        for item in value if kind == "list" else [value]:
            if item not in choices and str(item) not in map(str, choices):
                asked = "(hidden)" if option.get("no_log") else repr(item)
                hint = nearest(str(item), [str(choice) for choice in choices])
                problems.append(f"{name}: {asked} is not allowed{hint}; allowed: {', '.join(map(str, choices))}")
    inner: Options | None = option.get("options")
    if kind == "list" and option.get("elements"):
        element = {"type": option["elements"], "options": inner, "no_log": option.get("no_log")}
        for index, item in enumerate(value):
            problems += value_problems(f"{name}[{index}]", item, element)
    elif kind == "dict" and inner:
        problems += _member_problems(name, value, inner)
    return problems


def _member_problems(name: str, value: Mapping[str, Any], options: Options) -> list[str]:
    problems = []
    for key, item in value.items():
        if key in options:
            problems += value_problems(f"{name}.{key}", item, options[key])
        else:
            problems.append(
                f"{name}.{key}: there is no such key{nearest(str(key), options)}; allowed: {', '.join(options)}"
            )
    missing = [key for key, option in options.items() if option.get("required") and key not in value]
    return problems + [f"{name}.{key}: is missing" for key in missing]


def _type_problem(kind: str, value: Any) -> str | None:
    """None when the value will do; otherwise a hint for its author, which may be empty."""
    if kind == "raw":
        return None
    if kind in ("str", "path"):
        # A number in YAML loses what was written: 12.10 is 12.1. An integer is the same in both forms.
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return None
        return f': write it in quotes, for example "{value}"' if isinstance(value, float | bool) else ""
    if kind == "bool":
        fine = isinstance(value, bool) or str(value).lower() in _TRUE_OR_FALSE
    elif kind == "int":
        fine = not isinstance(value, bool) and (isinstance(value, int) or _is_number(value, int))
    elif kind == "float":
        fine = not isinstance(value, bool) and (isinstance(value, int | float) or _is_number(value, float))
    elif kind == "list":
        fine = isinstance(value, Sequence) and not isinstance(value, str)
    elif kind == "dict":
        fine = isinstance(value, Mapping)
    else:
        fine = True
    return None if fine else ""


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    try:
        kind(str(value))
    except ValueError:
        return False
    return isinstance(value, str)


def _name_of_type(value: Any) -> str:
    for kind, name in (
        (bool, "a boolean"),
        (str, "text"),
        (int, "a number"),
        (float, "a number"),
        (Mapping, "a mapping"),
    ):
        if isinstance(value, kind):
            return name
    return "a list" if isinstance(value, Sequence) else type(value).__name__


def _described(kind: str) -> str:
    names = {
        "str": "text",
        "path": "a path",
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "list": "a list",
        "dict": "a mapping",
    }
    return names.get(kind, kind)


def unknown_problem(name: str, roles: Mapping[str, Options], fleet: Options, cutoff: float = 0.9) -> str | None:
    """Why this variable is a mistake, if it is one; variables that have nothing to do with the project are not."""
    known = {**fleet, **{key: option for options in roles.values() for key, option in options.items()}}
    if name in known:
        return None
    owner = next((role for role in sorted(roles, key=len, reverse=True) if name.startswith(f"{role}_")), None)
    if owner:
        hint = nearest(name, roles[owner]) or nearest(name, known)
        return f"{name}: role {owner} has no such input{hint}; its inputs: roles/{owner}/README.md"
    if name.startswith("serving_"):
        return f"{name}: there is no such input{nearest(name, known)}; allowed: {', '.join(fleet)}"
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    if close:
        return f"{name}: is it {close[0]}? Inputs begin with the name of their role, or with serving_"
    return None


# -- the plugin --------------------------------------------------------------------------------------------------------


class ActionModule(ActionBase):
    """`serving_plan:` looks at the host's variables; with `plan: false` the host need not serve anything."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset({"plan"})

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        host = str(variables["inventory_hostname"])
        planned = boolean(self._task.args.get("plan", True))
        given, problems = self._given(variables, host, said=set() if planned else set(self._extra_variables()))
        plan = None
        if planned:
            problems += _handed_over_problems(given)
            problems += _missing_problems(given, variables)
            wrong = {re.split(r"[:.\[]", problem, maxsplit=1)[0] for problem in problems}
            plan, plan_problems = _planned(given, wrong)
            problems += plan_problems
            problems += _role_problems(given, wrong, plan, variables["groups"]["all"])
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
            return {
                **result,
                "failed": True,
                "problems": list(dict.fromkeys(problems)),
                "msg": f"{host} is not touched: its inputs have {_counted(len(set(problems)))}\n{listed}",
            }
        if plan is None:
            return {**result, "changed": False, "msg": "every input is known, and of its type"}
        result |= {"changed": False, "ansible_facts": {"serving_plan": plan}, "msg": _summary(plan)}
        if plan["notes"]:
            result["warnings"] = [f"{host}: {note}" for note in plan["notes"]]
        return result

    def _extra_variables(self) -> Mapping[str, Any]:
        extra: Mapping[str, Any] = self._task.get_variable_manager().extra_vars
        return extra

    def _given(self, variables: Mapping[str, Any], host: str, said: Container[str]) -> tuple[dict[str, Any], list[str]]:
        """Inputs that an inventory or the command line sets, with their values, and what is wrong with them.

        The play's own variables, roles' defaults among them, are left out: they are no input of an operator. What was
        `said` for this run alone is sooner taken for a slip than a variable of an inventory.
        """
        roles, fleet = role_options(), fleet_options()
        known = {**fleet, **{key: option for options in roles.values() for key, option in options.items()}}
        given: dict[str, Any] = {}
        problems = []
        for name, raw in sorted(variables["hostvars"].raw_get(host).items()):
            if name in known:
                try:
                    given[name] = self._templar.template(raw)
                except AnsibleUndefinedVariable as error:
                    if not _LATER.search(str(raw)):
                        problems.append(f"{name}: {_first_line(error)}")
                    continue
                except AnsibleError as error:
                    problems.append(f"{name}: its value cannot be made: {_first_line(error)}")
                    continue
                problems += value_problems(name, given[name], known[name])
            elif not name.startswith("ansible_"):
                problem = unknown_problem(name, roles, fleet, cutoff=0.7 if name in said else 0.9)
                problems += [problem] if problem else []
        return given, problems


def _planned(given: Mapping[str, Any], wrong: set[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """The plan, or what stands in its way. Inputs that are `wrong` already are not judged twice."""
    address = given.get("serving_publish_address")
    problems = []
    if address is not None and "serving_publish_address" not in wrong:
        try:
            ipaddress.ip_address(str(address))
        except ValueError:
            problems.append(
                f"serving_publish_address: {address!r} is not an IP address; expected one of the host's own,"
                " 127.0.0.1 for the host alone, or 0.0.0.0 for every network it is in"
            )
    overlay = str(given.get("serving_catalog_overlay") or "")
    if overlay and not Path(overlay).is_absolute():
        hint = "{{ inventory_dir }}/" + overlay
        return None, [*problems, f"serving_catalog_overlay: {overlay!r} is not an absolute path; write {hint!r}"]
    try:
        catalog = load_catalog(overlay or None)
    except CatalogError as error:
        return None, [*problems, f"serving_catalog_overlay: {error}"]
    if wrong & {*_REQUEST, "serving_set"}:
        return None, problems
    request = {field: given[name] for name, field in _REQUEST.items() if given.get(name) is not None}
    for field in ("gpu_count", "port"):
        if field in request:
            request[field] = int(request[field])
    for field in ("release", "platform", "model"):
        if field in request:
            request[field] = str(request[field])
    try:
        overrides = overrides_from_mapping(given.get("serving_set") or {})
        plan = plan_host(request_from(request).model_copy(update={"overrides": overrides}), catalog)
    except PlanError as error:
        return None, problems + [_in_inventory_words(problem) for problem in error.problems]
    data: dict[str, Any] = plan.model_dump(mode="json")
    return data, problems


def _role_problems(
    given: Mapping[str, Any], wrong: set[str], plan: Mapping[str, Any] | None, hosts: Sequence[str]
) -> list[str]:
    """What stands against the roles' inputs beyond their types. What is `wrong` already is not judged twice."""
    right = {name: value for name, value in given.items() if name not in wrong}
    types = {name: option.get("type", "str") for options in role_options().values() for name, option in options.items()}
    overlay = str(right.get("serving_catalog_overlay") or "")
    try:
        catalog = load_catalog(overlay if Path(overlay).is_absolute() else None)
    except CatalogError:  # reported with the plan
        return []
    return input_problems(right, types, plan, catalog, lambda path: Path(path).exists(), hosts)


def _handed_over_problems(given: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in sorted(set(given) & set(handed_over())):
        playbook, expression = handed_over()[name]
        sources = sorted(set(re.findall(r"\bserving_[a-z_]+", expression)) & set(fleet_options()))
        remedy = (
            f"set {', '.join(sources)}" if sources else "it is part of the plan: set the serving_ input it follows from"
        )
        problems.append(f"{name}: has no effect in an inventory, because {playbook} sets it; {remedy}")
    return problems


def _missing_problems(given: Mapping[str, Any], variables: Mapping[str, Any]) -> list[str]:
    """Required inputs that nobody sets: the fleet's, and those of the roles that this play uses."""
    problems = [
        f"{name}: is not set; {str(option['description']).strip()}"
        for name, option in fleet_options().items()
        if option.get("required") and name not in given
    ]
    for role in variables.get("ansible_play_role_names") or ():
        for name, option in role_options().get(role, {}).items():
            if option.get("required") and name not in variables and name not in handed_over():
                problems.append(f"{name}: is not set, and role {role} needs it; see roles/{role}/README.md")
    return problems


def _in_inventory_words(problem: str) -> str:
    field, colon, rest = problem.partition(":")
    names = {field: name for name, field in _REQUEST.items()}
    return f"{names[field]}:{rest}" if colon and field in names else f"serving_set: {problem.removeprefix('set: ')}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _counted(number: int) -> str:
    return "one problem" if number == 1 else f"{number} problems"


def _summary(plan: Mapping[str, Any]) -> str:
    ports = [str(process["port"]) for process in plan["processes"]]
    return (
        f"{plan['model']['name']} with {plan['engine']} {plan['release']}, {plan['profile']}, on {plan['gpu_count']}x"
        f" {plan['gpu']}: {_servers(len(ports))}, port {', '.join(ports)}"
    )


def _servers(number: int) -> str:
    return "one server" if number == 1 else f"{number} servers"


# Read here, in the process that all workers are forked from, instead of once a host.
role_options()
fleet_options()
handed_over()
load_catalog()
