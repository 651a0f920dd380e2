"""A small Pulumi engine inside the test's own process, against a real API server.

It does what the engine and the Kubernetes provider do with this project's programs: registers in dependency order,
tells create from update, replacement and nothing to do, refuses what exists, waits, and deletes in reverse order.
What it does not know it refuses; it never guesses.
"""

from .deployment import Deployment, Outcome, StepFailedError
from .programs import Project, run
from .state import State, Step

__all__ = ["Deployment", "Outcome", "Project", "State", "Step", "StepFailedError", "run"]
